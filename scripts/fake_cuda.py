"""A fake CUDA device: its tensors have shapes and no contents, and every Triton kernel that is
launched on it is compiled for sm_90 (fake_triton.py).

Under `fake_cuda` an engine starts and serves as on an H100, on a machine without a GPU. It finds
kernels that do not compile, spill or need too much shared memory, grids that are too large, waits
for the device within a step, and errors in code that only runs on CUDA. It does not find wrong
results: no kernel runs, and all sampled tokens are 0.

Tensors on the CPU are real. FlashInfer, the CUDA C++ kernels and CUDA graphs are stubs that do
nothing.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from cuda_stubs import Graph, Inline, Stream, flashinfer_modules
from fake_triton import CAPABILITY, Seen, compiling
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

NUM_SMS, MEMORY_BYTES = 132, 79 << 30  # of an H100
PEAK_BYTES = 1 << 30  # of a profiled step
CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
# The host waits for their result, or for its shape.
WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default,
    aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip


class Device(TorchDispatchMode):
    """Operations on CUDA tensors return fake tensors; all others run."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.pinned: set[int] = set()  # addresses of storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        to_cuda = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        if not to_cuda and not any(isinstance(x, FakeTensor) for x in leaves):
            return self._on_cpu(func, args, kwargs)
        if _is_composite(func.name()):  # inference mode does not decompose them
            # The CPU's device guard, in place of CUDA's, needs a device with a number.
            args, kwargs = tree_map_only(torch.device, _numbered, (args, kwargs))
            with self:
                return func.decompose(*args, **kwargs)
        if func in WAITING:
            self._seen.wait(func)
            return self._waited(func, args)
        if func is aten.copy_.default:
            return self._copy(*args)
        if func is aten._to_copy.default:
            if not isinstance(args[0], FakeTensor):
                return self._upload(args[0], kwargs)
            if getattr(kwargs.get("device"), "type", None) == "cpu":
                return self._download(args[0], kwargs)
        kwargs.pop("pin_memory", None)
        with self._fake:
            return func(*args, **kwargs)

    def _on_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            made, is_pinned = args[0].clone(), True
        else:
            made = func(*args, **kwargs)
            if is_pinned:
                made.zero_()
        if is_pinned:
            self.pinned.add(made.untyped_storage().data_ptr())
        return made

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def _upload(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        self._check_upload(source, kwargs.get("non_blocking", False))
        with self._fake:
            dtype = kwargs.get("dtype") or source.dtype
            return torch.empty(source.shape, dtype=dtype, device=CUDA)

    def _check_upload(self, source: torch.Tensor, non_blocking: bool) -> None:
        """The host waits for copies of unpinned memory. A number becomes a kernel's argument."""
        if source.dim() and not (non_blocking and self._is_pinned(source)):
            self._seen.wait("copy to the device")

    def _download(self, source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        if not kwargs.get("non_blocking", False):
            self._seen.wait("copy to the host")
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if isinstance(target, FakeTensor):
            if not isinstance(source, FakeTensor):
                self._check_upload(source, non_blocking)
            with self._fake:
                return aten.copy_.default(target, source)
        if not (non_blocking and self._is_pinned(target)):
            self._seen.wait("copy to the host")
        return target

    def _waited(self, func: Any, args: tuple[Any, ...]) -> Any:
        if func is aten._local_scalar_dense.default:
            return (
                False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
            )
        if func is aten.equal.default:
            return True
        raise NotImplementedError(f"{func} on the fake device")


@cache
def _is_composite(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def _numbered(device: torch.device) -> torch.device:
    return CUDA if device.type == "cuda" else device


def _guard_like_cpu() -> None:
    """Indexing needs a device guard, and a CPU build of torch has none for CUDA."""
    if torch.backends.cuda.is_built():
        torch._C._ensureCUDADeviceGuardSet()
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[0]  # by DeviceType: CPU, CUDA


def _of_torch(seen: Seen, device: Device) -> Iterator[Any]:
    def register(address: int, *_: Any) -> int:
        device.pinned.add(address)
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda *_: 0)
    properties = SimpleNamespace(multi_processor_count=NUM_SMS, total_memory=MEMORY_BYTES)
    values: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_sync_debug_mode": 0,
        "get_device_capability": CAPABILITY, "get_device_properties": properties,
        "get_device_name": "no GPU", "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": 0, "max_memory_allocated": PEAK_BYTES, "cudart": cudart,
        "current_stream": Stream(), "stream": nullcontext(), "_lazy_init": None,
        "reset_peak_memory_stats": None, "empty_cache": None, "synchronize": None,
        "set_sync_debug_mode": None,
    }  # fmt: skip
    for name, value in values.items():
        yield mock.patch.object(torch.cuda, name, lambda *_, value=value: value)
    Graph.seen = seen
    for name, made in {"Stream": Stream, "Event": Stream, "CUDAGraph": Graph}.items():
        yield mock.patch.object(torch.cuda, name, made)
    yield mock.patch.object(torch, "Event", Stream)
    make = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, device: Any = None, **others: Any) -> Any:
        """torch would look for CUDA's allocator before the dispatch mode is called."""
        made = make(*args, **others)
        made = made if device is None else made.to(_numbered(torch.device(device)))
        return made.pin_memory() if pin_memory else made

    yield mock.patch.object(torch, "tensor", tensor)


def _of_asyncllm() -> Iterator[Any]:
    from asyncllm.engine import core_loader
    from asyncllm.graphs import mixed_graphs, pool
    from asyncllm.kernels import registry
    from asyncllm.kernels.declaration import CudaKernel
    from asyncllm.models import loader
    from asyncllm.worker import kernel_prewarm

    def begin_loading(self: Any, device: Any, definitions: Any = ()) -> Callable[[], Any]:
        launch = None if definitions is None else lambda *_: 0
        return lambda: launch

    def begin(self: Any, launch: Callable[[], object], stream: Any = None) -> None:
        with torch.inference_mode():
            launch()

    init, prewarm = pool.GraphPool.__init__, kernel_prewarm.KernelPrewarm
    # Its default argument was made before `torch.cuda.CUDAGraph` was patched.
    made = lambda self, make_graph=Graph, **others: init(self, make_graph, **others)  # noqa: E731
    yield mock.patch.object(pool.GraphPool, "__init__", made)
    for module in (pool, mixed_graphs):
        yield mock.patch.object(module, "weak_alias", lambda tensor: tensor)
    yield mock.patch.object(CudaKernel, "begin_loading", begin_loading)
    yield mock.patch.object(core_loader, "ThreadPoolExecutor", Inline)
    yield mock.patch.object(registry, "libraries", lambda start: [])
    yield mock.patch.object(kernel_prewarm, "hash_compiler", lambda: None)
    yield mock.patch.object(prewarm, "begin", begin)
    yield mock.patch.object(prewarm, "begin_last", begin)
    yield mock.patch.object(loader, "_fill_dummy", lambda loads, seed: None)


@contextmanager
def fake_cuda(*, compiles: bool = True) -> Iterator[Seen]:
    """Install the fake device in this thread, and run an engine's threads' work in it as well.

    compiles: False only records which variants of kernels are launched.
    """
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    _guard_like_cpu()
    seen = Seen()
    device = Device(seen)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, flashinfer_modules()))
        for patch in (*_of_torch(seen, device), *compiling(seen, compiles=compiles)):
            stack.enter_context(patch)
        for patch in _of_asyncllm():
            stack.enter_context(patch)
        stack.enter_context(device)
        yield seen
