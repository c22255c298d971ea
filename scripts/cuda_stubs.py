"""Stubs for fake_cuda.py: a CUDA graph, a stream, a thread pool, FlashInfer's modules."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from fake_triton import Seen


class Graph:
    """Replaces `torch.cuda.CUDAGraph`; a replay is counted and does nothing."""

    seen: Seen

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.seen.is_capturing = True

    def capture_end(self) -> None:
        self.seen.is_capturing = False

    def replay(self) -> None:
        self.seen.launches[self.seen.phase, "a graph"] += 1

    def pool(self) -> int:
        return 0

    def reset(self) -> None:
        """There is nothing to destroy."""


class Stream:
    """Replaces streams and events. Its work is always done."""

    cuda_stream, device = 0, torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        """The device and the flags do not matter."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        """The stream before it is the same."""

    def _nothing(self, *_: Any) -> None:
        """The work is done already."""

    synchronize = wait = wait_stream = wait_event = record = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Stream) -> float:
        return 1.0


class Inline:
    """Replaces a thread pool: the dispatch mode of the fake device is of this thread."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """The number of threads does not matter."""

    def submit(self, work: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **named))
        except BaseException as error:  # raised by the future's `result`
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True) -> None:
        """There is no thread to end."""


def flashinfer_modules() -> dict[str, ModuleType]:
    """The parts of FlashInfer that asyncllm imports. They do nothing."""
    module = SimpleNamespace(plan=lambda *_: [0], paged_run=lambda *_: None)
    spec = type("JitSpec", (), {"build": None, "is_compiled": True})
    found: dict[str, dict[str, Any]] = {
        "": {"__version__": "0.6.12"},
        ".prefill": {
            "BatchPrefillWithPagedKVCacheWrapper": object,
            "get_batch_prefill_module": lambda *_: module,
        },
        ".jit": {"env": SimpleNamespace(), "gen_batch_prefill_module": None},
        ".jit.core": {"JitSpec": spec, "jit_spec_registry": None},
    }
    modules = {}
    for suffix, names in found.items():
        made = ModuleType(f"flashinfer{suffix}")
        made.__spec__ = ModuleSpec(made.__name__, None)
        vars(made).update(names)
        modules[made.__name__] = made
    return modules
