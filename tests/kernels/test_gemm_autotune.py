"""Which algorithm a product is run by, with a library and a clock of the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from asyncllm.kernels.gemm.cublas_lt import ALGORITHM_BYTES, Shape
from asyncllm.kernels.gemm.gemm_autotune import (
    LEAST_GAIN,
    MOST_BYTES,
    MOST_WEIGHTS,
    AutotunedGemm,
    Choices,
    GemmCache,
    quickest,
)
from asyncllm.worker.kernels import first_of_stage
from tests.parallel.thread_mesh import ThreadMesh, on_ranks

ALGORITHMS = [bytes([i]) * ALGORITHM_BYTES for i in range(3)]
SIZES = (4, 8)


class Library:
    """Three algorithms, which multiply as torch does."""

    def __init__(self, unknown: Sequence[bytes] = ()) -> None:
        self.unknown = unknown
        self.ran: list[bytes] = []
        self.checked: list[Shape] = []

    def algorithms(self, shape: Shape) -> list[bytes]:
        return ALGORITHMS

    def can_run(self, shape: Shape, algorithm: bytes) -> bool:
        self.checked.append(shape)
        return algorithm not in self.unknown

    def linear(self, x: torch.Tensor, weight: torch.Tensor, algorithm: bytes) -> torch.Tensor:
        self.ran.append(algorithm)
        return F.linear(x, weight)


def aligned(*shape: int) -> torch.Tensor:
    """As CUDA's allocator gives them."""
    size = torch.Size(shape).numel()
    whole = torch.randn(size + 64)
    first = -whole.data_ptr() % 256 // whole.itemsize
    return whole[first : first + size].view(shape)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "asyncllm"


def products(library: Library, *seconds: float) -> AutotunedGemm:
    """torch takes the first of `seconds`, the algorithms the others."""

    def time(implementations: Sequence[Callable[[], object]]) -> list[float]:
        for implementation in implementations:
            implementation()
        return list(seconds)

    return AutotunedGemm(library, SIZES, GemmCache("a GPU"), time)


def ran(
    products: AutotunedGemm, library: Library, x: torch.Tensor, weight: torch.Tensor
) -> list[bytes]:
    """The algorithm that runs it by now; the result is checked."""
    library.ran.clear()
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    return list(library.ran)


def test_torch_stays_unless_another_is_clearly_quicker() -> None:
    assert quickest([1.0]) == 0
    assert quickest([1.0, 1.0]) == 0
    assert quickest([1.0, 1.0 - LEAST_GAIN / 2]) == 0
    assert quickest([1.0, 0.9]) == 1
    assert quickest([1.0, 0.9, 0.8]) == 2
    assert quickest([1.0, 1.1, 2.0]) == 0


def test_the_quickest_is_taken_from_the_choice_on() -> None:
    library, x, weight = Library(), aligned(4, 6), aligned(5, 6)
    ours = products(library, 1.0, 0.99, 0.5, 0.7)
    assert ran(ours, library, x, weight) == []
    ours.autotune()
    assert ran(ours, library, x, weight) == [ALGORITHMS[1]]


def test_what_is_hardly_quicker_leaves_torchs_choice() -> None:
    library, x, weight = Library(), aligned(4, 6), aligned(5, 6)
    ours = products(library, 1.0, 0.985, 1.5, 0.99)
    ours.linear(x, weight)
    ours.autotune()
    assert ran(ours, library, x, weight) == []


def test_each_product_has_its_own_choice_and_is_timed_once() -> None:
    library, weight, other = Library(), aligned(5, 6), aligned(7, 6)
    ours = products(library, 1.0, 0.5, 0.6, 0.7)
    ours.linear(aligned(4, 6), weight)
    ours.autotune()
    assert ran(ours, library, aligned(8, 6), weight) == []  # another size: still to be chosen
    assert ran(ours, library, aligned(4, 6), other) == []
    library.ran.clear()
    ours.autotune()
    assert len(library.ran) == 2 * len(ALGORITHMS)  # one weight each, not the first one's again
    ours.autotune()
    assert len(library.ran) == 2 * len(ALGORITHMS)
    assert ran(ours, library, aligned(8, 6), weight) == [ALGORITHMS[0]]


def test_many_weights_of_a_product_are_timed_but_not_all() -> None:
    library, x = Library(), aligned(4, 6)
    ours = products(library, 1.0, 0.5, 0.6, 0.7)
    for _ in range(2 * MOST_WEIGHTS):
        ours.linear(x, aligned(5, 6))
    ours.autotune()
    assert len(library.ran) == MOST_WEIGHTS * len(ALGORITHMS)


@pytest.mark.parametrize("what", ["bias", "tokens", "strided x", "misplaced weight", "nothing"])
def test_other_products_are_torchs(what: str) -> None:
    library, x, weight = Library(), aligned(4, 6), aligned(5, 6)
    bias = aligned(5) if what == "bias" else None
    if what == "tokens":
        x = aligned(5, 6)
    elif what == "nothing":
        x, weight = x[:, :0].contiguous(), weight[:, :0].contiguous()
    elif what == "strided x":
        x = aligned(6, 4).T
    elif what == "misplaced weight":
        weight = aligned(6, 6).flatten()[1:31].view(5, 6)
    ours = products(library, 1.0, 0.5, 0.6, 0.7)
    for _ in range(2):
        assert torch.equal(ours.linear(x, weight, bias), F.linear(x, weight, bias))
        ours.autotune()
    assert library.ran == []


def test_an_algorithm_that_fails_leaves_the_product_to_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library, x, weight = Library(), aligned(4, 6), aligned(5, 6)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("cublasLtMatmul: cuBLAS status 15")

    ours = products(library, 1.0, 0.5, 0.6, 0.7)
    ours.linear(x, weight)
    library.linear = fail  # type: ignore[method-assign, assignment]
    with caplog.at_level("INFO", logger="asyncllm"):
        ours.autotune()
    assert torch.equal(ours.linear(x, weight), F.linear(x, weight))
    assert "falling back to torch: cublasLtMatmul: cuBLAS status 15" in caplog.text
    # It may have been short of memory: the next start tries again.
    next_library = Library()
    second = products(next_library, 1.0, 0.5, 0.6, 0.7)
    second.linear(x, weight)
    second.autotune()
    assert ran(second, next_library, x, weight) == [ALGORITHMS[0]]


def test_of_other_models_choices_nothing_is_asked() -> None:
    kept = GemmCache("a GPU")
    kept.save({Shape(4, out, 6): ALGORITHMS[0] for out in range(1, 100)})
    library, x, weight = Library(), aligned(4, 6), aligned(5, 6)
    ours = products(library)
    for _ in range(2):
        assert ran(ours, library, x, weight) == [ALGORITHMS[0]]
    assert library.checked == [Shape(4, 5, 6)]


def test_the_next_start_finds_the_choices() -> None:
    library, x, weight = Library(), aligned(4, 6), aligned(5, 6)
    first = products(library, 1.0, 0.7, 0.6, 0.5)
    first.linear(x, weight)
    first.autotune()
    second = products(library)  # a clock that would return nothing
    assert ran(second, library, x, weight) == [ALGORITHMS[2]]
    second.autotune()


def test_what_the_library_no_longer_knows_is_measured_again() -> None:
    x, weight = aligned(4, 6), aligned(5, 6)
    first = products(Library(), 1.0, 0.7, 0.6, 0.5)
    first.linear(x, weight)
    first.autotune()
    library = Library(unknown=[ALGORITHMS[2]])
    second = products(library, 1.0, 0.5, 0.6, 0.7)
    assert ran(second, library, x, weight) == []
    second.autotune()
    assert ran(second, library, x, weight) == [ALGORITHMS[0]]


@pytest.mark.parametrize("remembers", [None, 0, 1], ids=["none", "first", "second"])
@pytest.mark.parametrize("fastest", [0, 1, 3])
def test_ranks_take_the_first_ones_choice(remembers: int | None, fastest: int) -> None:
    """Whatever each has measured, or has from a start before. Until then all take torch's."""
    seconds = [0.5 if i == fastest else 1.0 for i in range(4)]
    chosen = ([], *([each] for each in ALGORITHMS))[fastest]

    def on_rank(mesh: ThreadMesh) -> tuple[list[bytes], list[bytes]]:
        agree = partial(first_of_stage, mesh, torch.device("cpu"))
        kept = GemmCache("rank", mesh.config.rank)
        if remembers == mesh.config.rank:
            # The second one's is another choice than what the first one measures.
            own = chosen[0] if chosen else None
            kept.save({Shape(4, 5, 6): ALGORITHMS[1] if remembers else own})
        times = seconds if mesh.config.rank == 0 else seconds[::-1]
        library, x, weight = Library(), aligned(4, 6), aligned(5, 6)
        ours = AutotunedGemm(library, SIZES, kept, lambda ran: list(times), agree)
        before = ran(ours, library, x, weight)
        ours.autotune()
        return before, ran(ours, library, x, weight)

    assert on_ranks(2, on_rank) == [([], chosen)] * 2


def test_ranks_agree_of_a_product_whose_bias_one_of_them_has() -> None:
    """As of a layer that is divided by its inputs: a rank that skipped it would miss the call."""

    def on_rank(mesh: ThreadMesh) -> list[bytes]:
        agree = partial(first_of_stage, mesh, torch.device("cpu"))
        library, x, weight = Library(), aligned(4, 6), aligned(5, 6)
        kept = GemmCache("rank", mesh.config.rank)
        ours = AutotunedGemm(library, SIZES, kept, lambda ran: [1.0, 0.5, 0.6, 0.7], agree)
        bias = aligned(5) if mesh.config.rank == 0 else None
        for _ in range(2):
            assert torch.equal(ours.linear(x, weight, bias), F.linear(x, weight, bias))
            ours.autotune()
        return library.ran

    assert on_ranks(2, on_rank) == [[], ALGORITHMS[:1]]


def test_a_rank_that_cannot_run_the_first_ones_choice_says_so() -> None:
    def on_rank(mesh: ThreadMesh) -> None:
        agree = partial(first_of_stage, mesh, torch.device("cpu"))
        library = Library(unknown=ALGORITHMS[:1] if mesh.config.rank else ())
        kept = GemmCache("rank", mesh.config.rank)
        ours = AutotunedGemm(library, SIZES, kept, lambda ran: [1.0, 0.5, 0.6, 0.7], agree)
        ours.linear(aligned(4, 6), aligned(5, 6))
        ours.autotune()

    with pytest.raises(RuntimeError, match="the first rank's algorithm cannot run on this one"):
        on_ranks(2, on_rank)


def test_choices_of_several_models_are_kept_in_one_file() -> None:
    one: Choices = {Shape(4, 5, 6): ALGORITHMS[0]}
    other: Choices = {Shape(4, 7, 6): None}
    GemmCache("a GPU").save(one)
    GemmCache("a GPU").save(other)
    assert GemmCache("a GPU").load() == one | other
    assert GemmCache("another GPU").load() == {}


SOMETHING_ELSE = {
    "empty": b"",
    "a list": b"[]",
    "cut": b"{",
    "two sizes": b'{"4 5": null}',
    "no sizes": b'{"4 5 x": null}',
    "sizes of nothing": b'{"4 5 0": null}',
    "sizes below nothing": b'{"4 5 -6": null}',
    "a number": b'{"4 5 6": 7}',
    "a list of one": b'{"4 5 6": [""]}',
    "no bytes": b'{"4 5 6": "x"}',
    "too few bytes": b'{"4 5 6": "%s"}' % (b"0" * (2 * ALGORITHM_BYTES - 2)),
    "too many bytes": b'{"4 5 6": "%s"}' % (b"0" * (2 * ALGORITHM_BYTES + 2)),
    "a deep one": b"[" * 100_000,
    "no text": b"\xff\x00\xfe",
    "a long one": b'{"4 5 6": null}' + b" " * MOST_BYTES,
}


@pytest.mark.parametrize("name", SOMETHING_ELSE)
def test_a_file_of_something_else_is_nothing(cache: Path, name: str) -> None:
    kept = GemmCache("a GPU")
    kept.save({Shape(4, 5, 6): None})
    (file,) = cache.glob("gemm-*.json")
    file.write_bytes(SOMETHING_ELSE[name])
    assert kept.load() == {}
    kept.save({Shape(4, 5, 6): ALGORITHMS[0]})
    assert kept.load() == {Shape(4, 5, 6): ALGORITHMS[0]}


def test_a_folder_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    library, x, weight = Library(), aligned(4, 6), aligned(5, 6)
    ours = products(library, 1.0, 0.5, 0.6, 0.7)
    ours.linear(x, weight)
    ours.autotune()
    assert ran(ours, library, x, weight) == [ALGORITHMS[0]]
