"""An answer that repeats itself: do its last tokens consist of one pattern, again and again?

For each pattern size p it counts how many of the last tokens equal the one p places before; the
tail is `min_count` copies of a pattern once that reaches p * (min_count - 1). So a token costs one
pass over the sizes, in numpy, whatever the answer's length and the count asked for.
"""

from __future__ import annotations

import numpy as np

from asyncllm.sampling_params import RepetitionDetectionParams

REPETITION_STOP_REASON = "repetition_detected"  # vLLM's word
NO_TOKEN = -1


class RepetitionDetector:
    """The state of one sequence. `push` is called once per output token.

    A repetition counts only when a token after the first `min_tokens` completes it.
    """

    __slots__ = ("_first", "_latest", "_num_tokens_left", "_runs", "_size", "_wanted", "_window")

    def __init__(self, params: RepetitionDetectionParams, min_tokens: int = 0) -> None:
        assert params.max_pattern_size > 0, "detection is off"
        least = max(params.min_pattern_size, 1)
        sizes = np.arange(least, params.max_pattern_size + 1, dtype=np.int32)
        self._first = least - 1
        self._size = params.max_pattern_size
        self._wanted = sizes * (params.min_count - 1)
        self._runs = np.zeros_like(sizes)  # per size: how long the tail has repeated
        # The latest tokens, newest first, from `_latest` on; what comes before is room for more.
        self._window = np.full(2 * self._size, NO_TOKEN, np.int64)
        self._latest = self._size
        self._num_tokens_left = min_tokens

    def push(self, token_id: int) -> bool:
        """Take one token: whether the answer repeats itself now."""
        window, latest = self._window, self._latest
        before = window[latest + self._first : latest + self._size]
        self._runs = np.where(before == token_id, self._runs + 1, 0)
        if latest == 0:
            window[self._size :] = window[: self._size]
            latest = self._size
        self._latest = latest - 1
        window[latest - 1] = token_id
        self._num_tokens_left -= 1
        return self._num_tokens_left < 0 and bool((self._runs >= self._wanted).any())
