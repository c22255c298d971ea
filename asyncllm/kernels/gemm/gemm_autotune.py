"""GEMMs of many rows, each by the algorithm of cuBLAS that is quickest for it here.

torch runs what cuBLAS's heuristic puts first. At some numbers of tokens another is quicker: of an
8B model's GEMMs 4 to 6 % in steps of 640 to 1280 tokens (docs/log/gemm.md). So before a step is
captured, what the heuristic names for each of its GEMMs is timed on the model's own weights.
Choices are kept on disk; a start that finds them times nothing. Ranks that share a model take the
first one's choices: a router's logits that differ in a bit would send a token to other experts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from asyncllm.host import cache_folder, replaced
from asyncllm.kernels.gemm.cublas_lt import ALGORITHM_BYTES, ALIGNMENT_BYTES, CublasLt, Shape

logger = logging.getLogger("asyncllm")

COLD_BYTES = 128 << 20  # of weights one after another: no cache holds them, as in a step
MOST_WEIGHTS = 32
MOST_BYTES = 4 << 20  # of the file: a model has some hundred GEMMs of 150 bytes
LEAST_GAIN = 0.02  # of torch's time; repeated measurements differ by less
Choices = dict[Shape, bytes | None]  # None: torch's own
# seconds of each; raises `RuntimeError` where it cannot say
Time = Callable[[Sequence[Callable[[], object]]], list[float]]
# what the first rank gives, of what each gives, all equally long; each rank calls it
Agree = Callable[[bytes], bytes]
_TORCHS = bytes(1 + ALGORITHM_BYTES)  # as ranks tell each other: else 1 and the algorithm


class AutotunedGemm:
    """torch's `linear`, for `sizes` tokens by the quickest algorithm."""

    def __init__(
        self,
        library: CublasLt,
        sizes: Collection[int],
        cache: GemmCache,
        time: Time,
        agree: Agree | None = None,
    ) -> None:
        """agree: with the ranks that run the same GEMMs; None: there are no others."""
        self._library = library
        self._sizes = frozenset(sizes)
        self._cache = cache
        self._time = time
        self._agree = agree
        self._remembered = cache.load()  # of all models, by starts before; not yet asked for
        self._choices: Choices = {}
        self._open: dict[Shape, list[torch.Tensor]] = {}  # still to be chosen -> weights

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, in] times weight [out, in] transposed, plus bias [out]: a new tensor."""
        shape = Shape(x.shape[0], *weight.shape)
        if shape.num_tokens not in self._sizes or not _takes(x, weight):
            return F.linear(x, weight, bias)
        if bias is not None and self._agree is None:
            return F.linear(x, weight, bias)
        if shape not in self._choices and (self._agree or not self._remembers(shape)):
            weights = self._open.setdefault(shape, [])
            if len(weights) < MOST_WEIGHTS:
                weights.append(weight)
        if bias is not None:  # of one rank alone, perhaps: all must choose for the same shapes
            return F.linear(x, weight, bias)
        return self._run(x, weight, self._choices.get(shape))

    def autotune(self) -> None:
        """Choose for all that has run since the last call. Waits some 10 ms a GEMM. Raises
        `RuntimeError` where another rank's choice is none here."""
        if not self._open:
            return
        made: Choices = {}
        for shape, weights in self._open.items():
            if self._agree is not None and self._remembers(shape):
                continue
            try:
                made[shape] = self._quickest(shape, weights)
            except RuntimeError as error:  # no engine fails to start for a faster kernel
                logger.info("%s: falling back to torch: %s", shape, error)
                self._choices[shape] = None  # until the next start, which may have it better
        if made:
            self._choices |= made
            self._cache.save(made)
        if self._agree is not None:
            self._take_the_first_ranks(list(self._open), self._agree)
        self._open.clear()

    def _take_the_first_ranks(self, shapes: list[Shape], agree: Agree) -> None:
        ours = [self._choices[shape] for shape in shapes]
        agreed = agree(b"".join(_TORCHS if each is None else b"\1" + each for each in ours))
        size = len(_TORCHS)
        for i, shape in enumerate(shapes):
            is_ours, *algorithm = agreed[i * size : (i + 1) * size]
            choice = bytes(algorithm) if is_ours else None
            if choice is not None and not self._library.can_run(shape, choice):
                raise RuntimeError(f"{shape}: the first rank's algorithm cannot run on this one")
            self._choices[shape] = choice

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

        seconds = self._time([partial(run, each) for each in algorithms])
        times = ", ".join(f"{each * 1e6 / len(weights):.1f}" for each in seconds)
        logger.debug("%s: torch and the other algorithms take %s us", shape, times)
        return algorithms[quickest(seconds)]

    def _run(self, x: torch.Tensor, weight: torch.Tensor, algorithm: bytes | None) -> torch.Tensor:
        if algorithm is None:
            return F.linear(x, weight)
        return self._library.linear(x, weight, algorithm)


def quickest(seconds: Sequence[float]) -> int:
    """Whose time it is; 0, torch's, where no other is clearly quicker: what is as quick must not
    change between two starts, whose answers may differ with it in the last bit."""
    best = min(range(len(seconds)), key=seconds.__getitem__)
    return best if seconds[best] < seconds[0] * (1 - LEAST_GAIN) else 0


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there is something to do, and it lies as cuBLAS's heuristic takes for granted."""
    return (
        weight.numel() > 0
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.data_ptr() % ALIGNMENT_BYTES == weight.data_ptr() % ALIGNMENT_BYTES == 0
    )


class GemmCache:
    """Choices on disk, a file for each `key`: what makes a measurement worth nothing elsewhere. It
    serves all models: a GEMM is its three sizes.

    A file that cannot be read or written, or holds anything else, is a start that measures again.
    What the bytes of an algorithm mean only the library knows, which is asked before they are used.
    """

    def __init__(self, *key: object) -> None:
        digest = hashlib.sha256(json.dumps([str(part) for part in key]).encode()).hexdigest()
        self._name = f"gemm-{digest[:16]}.json"

    def load(self) -> Choices:
        """Empty where there is nothing that can be read."""
        try:
            with self._path.open("rb") as file:
                text = file.read(MOST_BYTES + 1)
            if len(text) > MOST_BYTES:
                raise ValueError(f"{self._path} has more than {MOST_BYTES} bytes")
            return dict(_choice(*entry) for entry in json.loads(text).items())
        except FileNotFoundError:
            return {}
        except (OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.info("GEMMs are measured again: %s", error)
            return {}

    def save(self, choices: Choices) -> None:
        """Beside what others have kept meanwhile. Whole or not at all."""
        entries = {
            " ".join(map(str, shape)): None if algorithm is None else algorithm.hex()
            for shape, algorithm in {**self.load(), **choices}.items()
        }
        try:
            with replaced(self._path) as made:
                made.write_text(json.dumps(entries))
        except (OSError, RuntimeError) as error:  # a read-only folder, no home
            logger.info("choices of GEMM algorithms are not kept: %s", error)

    @property
    def _path(self) -> Path:
        return cache_folder() / self._name


def _choice(shape: str, algorithm: str | None) -> tuple[Shape, bytes | None]:
    """As an entry of the file has it. Raises `ValueError` or `TypeError` for what is none."""
    sizes = Shape(*map(int, shape.split()))
    chosen = None if algorithm is None else bytes.fromhex(algorithm)
    if min(sizes) < 1 or (chosen is not None and len(chosen) != ALGORITHM_BYTES):
        raise ValueError(f"{shape!r} is no GEMM, or its algorithm none")
    return sizes, chosen
