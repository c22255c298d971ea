"""Stand-ins of fake_cuda.py: a graph, a stream, a thread, FlashInfer's modules."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from fake_triton import Seen


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    seen: Seen

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.seen.is_capturing = True

    def capture_end(self) -> None:
        self.seen.is_capturing = False

    def replay(self) -> None:
        self.seen.launches[self.seen.phase, "a graph"] += 1

    def pool(self) -> int:
        return 0


class Stream:
    """A stream or an event, which is always done."""

    cuda_stream, device = 0, torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Of any device."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        """It was nobody's."""

    def _nothing(self, *_: Any) -> None:
        """It is done."""

    synchronize = wait = wait_stream = wait_event = record = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Stream) -> float:
        return 1.0


class Inline:
    """In place of a thread, which would not know the device."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Of any number of threads."""

    def submit(self, work: Callable[..., Any], *args: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **named))
        except BaseException as error:  # whatever it is, it is the caller's
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True) -> None:
        """There is none."""


def flashinfer_modules() -> dict[str, ModuleType]:
    """What we import of it, which does nothing."""
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
