"""Sampling parameters by the fields that they were made of: most clients send the same ones again.

To check a request's fields and to make parameters of them takes a few dozen functions, each of them
cold for a lone request; to find what they gave before takes one look. Only what was accepted is
kept, of the last MAX_KNOWN combinations, so nothing is large: each text among the fields has its
limit. Requests are prepared on the loop and, if they are large, in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from asyncllm.sampling_params import SamplingParams

MAX_KNOWN = 64


class KnownParams:
    """Of one server's requests of one kind."""

    def __init__(self) -> None:
        self._params: dict[tuple[object, ...], SamplingParams] = {}  # the oldest first
        self._forgetting = threading.Lock()

    def of(self, fields: tuple[object, ...], make: Callable[[], SamplingParams]) -> SamplingParams:
        """What `make` returns, or returned for equal `fields`. Raises what it raises.

        Nobody may change them: they are shared.
        """
        try:
            known = self._params.get(fields)
        except TypeError:  # a list or a dict among them has no hash
            return make()
        if known is not None:
            return known
        params = make()
        with self._forgetting:
            if len(self._params) >= MAX_KNOWN:
                self._params.pop(next(iter(self._params)))
            self._params[fields] = params
        return params
