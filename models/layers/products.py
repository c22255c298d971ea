"""Products of many rows, each by the algorithm of cuBLAS that is quickest for it here.

torch runs what cuBLAS's heuristic puts first. At some numbers of tokens another is quicker: of an
8B model's products 4 to 6 % in steps of 640 to 1280 tokens, none at 512 (docs/LOG.md). So before a
step is captured, what the heuristic names for each of its products is timed on the model's own
weights. Choices are kept on disk; a start that finds them times nothing. Gated products have a
kernel of ours among the algorithms (gated_product.py), and a `Products` of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from asyncllm.attention.device_trial import quickest, seconds_by_turns
from asyncllm.models.layers.cublas_lt import ALIGNMENT_BYTES, Shape
from asyncllm.models.layers.kept_choices import Choices, KeptChoices

logger = logging.getLogger("asyncllm")

COLD_BYTES = 128 << 20  # of weights by turns, so that no cache holds them, as in a step
MOST_WEIGHTS = 32
ROUNDS = 2
MOST_SPREAD = 1.5  # of the times of one way; above it the device has another's work too
# Launching waits for nothing meanwhile, so the device must be busy until all is launched: for as
# long as that took before, and some more for other threads' Python.
LAUNCHING_SLACK = 1.5
CYCLES_PER_SECOND = 2e9  # of a device's clock, at most

Ways = Sequence[Callable[[], object]]
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Algorithms(Protocol):
    """What is used of `CublasLt`."""

    def algorithms(self, shape: Shape) -> list[bytes]: ...
    def can_run(self, shape: Shape, algorithm: bytes) -> bool: ...
    def linear(self, x: torch.Tensor, weight: torch.Tensor, algorithm: bytes) -> torch.Tensor: ...


class Products:
    """`plain` of x, weight and bias, for `sizes` tokens by choice."""

    def __init__(
        self,
        library: Algorithms,
        sizes: Collection[int],
        kept: KeptChoices,
        plain: Linear = F.linear,
        time_ways: Callable[[Ways], list[float]] | None = None,
    ) -> None:
        """`time_ways`: seconds of each, for tests another."""
        self._library = library
        self._plain = plain
        self._sizes = frozenset(sizes)
        self._kept = kept
        self._time_ways = time_ways or time_on_device
        self._remembered = kept.load()  # of all models, by starts before; not yet asked for
        self._choices: Choices = {}
        self._open: dict[Shape, list[torch.Tensor]] = {}  # still to be chosen -> weights

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] times weight [out, in] transposed, plus bias [out], or what `plain` makes of
        it: a new tensor."""
        shape = Shape(x.shape[0], *weight.shape)
        if shape.num_tokens not in self._sizes or bias is not None or not _takes(x, weight):
            return self._plain(x, weight, bias)
        if shape not in self._choices and not self._remembers(shape):
            weights = self._open.setdefault(shape, [])
            if len(weights) < MOST_WEIGHTS:
                weights.append(weight)
        return self._run(x, weight, self._choices.get(shape))

    def choose(self) -> None:
        """For what has run since the last call. Waits for the device some 10 ms a product."""
        if not self._open:
            return
        made: Choices = {}
        for shape, weights in self._open.items():
            try:
                made[shape] = self._quickest(shape, weights)
            except RuntimeError as error:  # no engine fails to start for a faster kernel
                logger.info("%s is left to torch: %s", shape, error)
                self._choices[shape] = None  # until the next start, which may have it better
        self._open.clear()
        if made:
            self._choices |= made
            self._kept.save(made)

    def _remembers(self, shape: Shape) -> bool:
        """Takes over what a start before has chosen, where this library knows it."""
        if shape not in self._remembered:
            return False
        algorithm = self._remembered.pop(shape)
        if algorithm is not None and not self._library.can_run(shape, algorithm):
            return False
        self._choices[shape] = algorithm
        return True

    def _quickest(self, shape: Shape, weights: list[torch.Tensor]) -> bytes | None:
        weights = weights[: max(2, -(-COLD_BYTES // weights[0].nbytes))]
        # As a norm leaves it: what numbers are like decides what they cost in power.
        generator = torch.Generator(weights[0].device).manual_seed(0)
        x = weights[0].new_empty(shape.num_tokens, shape.in_features).normal_(generator=generator)
        algorithms = [None, *self._library.algorithms(shape)]

        def run(algorithm: bytes | None) -> None:
            for weight in weights:
                self._run(x, weight, algorithm)

        seconds = self._time_ways([partial(run, each) for each in algorithms])
        times = ", ".join(f"{each * 1e6 / len(weights):.1f}" for each in seconds)
        logger.debug("%s: torch and the other algorithms take %s us", shape, times)
        return algorithms[quickest(seconds)]

    def _run(self, x: torch.Tensor, weight: torch.Tensor, algorithm: bytes | None) -> torch.Tensor:
        if algorithm is None:
            return self._plain(x, weight, None)
        return self._library.linear(x, weight, algorithm)


def time_on_device(ways: Ways) -> list[float]:
    """Seconds of each, the quickest of ROUNDS in which they take turns. On the current stream.

    Raises `RuntimeError` where the device is not theirs alone.
    """
    for way in ways:
        way()  # loads its kernel
    start = time.perf_counter()
    for way in ways:
        way()
    launching = (time.perf_counter() - start) * ROUNDS
    torch.cuda._sleep(int(launching * LAUNCHING_SLACK * CYCLES_PER_SECOND))
    return [least(seconds) for seconds in seconds_by_turns(ways, ROUNDS)]


def least(seconds: Sequence[float]) -> float:
    """Of one way's rounds. Raises `RuntimeError` where they are too different to say anything: what
    was measured beside another process would be kept for ever."""
    if max(seconds) > MOST_SPREAD * min(seconds):
        us = ", ".join(f"{each * 1e6:.0f}" for each in seconds)
        raise RuntimeError(f"the device has other work: it took {us} us")
    return min(seconds)


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there is something to do, and it lies as cuBLAS's heuristic takes for granted."""
    return (
        weight.numel() > 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.data_ptr() % ALIGNMENT_BYTES == weight.data_ptr() % ALIGNMENT_BYTES == 0
    )
