"""A CUDA device that is not there: tensors on it have shapes and no contents, and every kernel that
Triton is asked for is compiled for it.

Under `fake_cuda` an engine starts and serves as on an H100, on a machine without one. It shows what
else only a GPU shows: kernels that do not compile, spill or take too much shared memory, grids that
no GPU takes, the host waiting for the device where it must not, code that only CUDA reaches. It
shows nothing of what kernels compute. Tokens are always 0.

Tensors on the CPU are real. FlashInfer, nvcc's kernels and graphs are stubs that do nothing.
"""

from __future__ import annotations

import ctypes
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CAPABILITY, NUM_SMS, SHARED_BYTES = (9, 0), 132, 232_448  # of an H100
MEMORY_BYTES = 79 << 30
MAX_GRID = (2**31 - 1, 65_535, 65_535)
aten = torch.ops.aten
# What the host waits for, or what has a shape that only the device knows.
WAITING = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default,
    aten.masked_select.default, aten._unique2.default, aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel as Triton has compiled it."""

    name: str
    constants: str
    regs: int
    spills: int
    shared: int
    num_warps: int


@dataclass
class Seen:
    """What has happened on the device, and when."""

    phase: str = "start"
    variants: dict[int, Variant] = field(default_factory=dict)  # by handle
    first: dict[int, str] = field(default_factory=dict)  # handle -> its first launch's phase
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)  # phase, name
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # phase, where
    errors: list[str] = field(default_factory=list)
    is_capturing: bool = False

    def wait(self, what: object) -> None:
        """The host waits for the device, here."""
        phase = "CAPTURE" if self.is_capturing else self.phase
        self.waits[phase, f"{what} at {_place()}"] += 1


def _place() -> str:
    """The innermost lines of ours on the stack."""
    ours = [
        f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_stack()
        if "site-packages" not in frame.filename and "fake_cuda" not in frame.filename
    ]
    return " < ".join(reversed(ours[-4:]))


class Device(TorchDispatchMode):
    """Operations on CUDA tensors yield fake ones, all others are done."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.pinned: set[int] = set()  # storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = dict(kwargs or {})
        leaves = tree_leaves((args, kwargs))
        to_cuda = any(isinstance(x, torch.device) and x.type == "cuda" for x in leaves)
        has_fake = any(isinstance(x, FakeTensor) for x in leaves)
        if not (to_cuda or has_fake):
            return self._on_cpu(func, args, kwargs)
        if _is_composite(func.name()):  # as inference mode leaves them
            # The CPU's guard, which stands for CUDA's, would take a device without a number for it.
            args, kwargs = tree_map_only(torch.device, _numbered, (args, kwargs))
            with self:
                return func.decompose(*args, **kwargs)
        if func in WAITING:
            self._seen.wait(func)
            return self._waited(func, args)
        if func is aten.copy_.default:
            return self._copy(*args)
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):
            self._check_upload(args[0], kwargs.get("non_blocking", False))
            with self._fake:
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.empty(args[0].shape, dtype=dtype, device="cuda:0")
        device = kwargs.get("device")
        if func is aten._to_copy.default and device is not None and device.type == "cpu":
            if not kwargs.get("non_blocking", False):
                self._seen.wait("copy to the host")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        kwargs.pop("pin_memory", None)
        with self._fake:
            return func(*args, **kwargs)

    def _on_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        if func is aten.is_pinned.default:
            return self._is_pinned(args[0])
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            made = args[0].clone()
            self.pinned.add(made.untyped_storage().data_ptr())
            return made
        made = func(*args, **kwargs)
        if is_pinned:
            made.zero_()
            self.pinned.add(made.untyped_storage().data_ptr())
        return made

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.pinned

    def _check_upload(self, source: torch.Tensor, non_blocking: bool) -> None:
        """Memory that is not pinned is copied while the host waits; a number is an argument."""
        if source.dim() and not (non_blocking and self._is_pinned(source)):
            self._seen.wait("copy to the device")

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
            return {torch.bool: False}.get(args[0].dtype, 0.0 if args[0].is_floating_point() else 0)
        if func is aten.equal.default:
            return True
        raise NotImplementedError(f"{func} on a device that is not there")


def _numbered(device: torch.device) -> torch.device:
    return torch.device("cuda", 0) if device.type == "cuda" else device


@cache
def _is_composite(name: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


class Launcher:
    """In place of Triton's: checks what a launch is given."""

    def __init__(self, seen: Seen, source: Any, metadata: Any) -> None:
        self._seen, self._name = seen, metadata.name

    def __call__(self, x: int, y: int, z: int, stream: Any, handle: int, *args: Any) -> None:
        seen = self._seen
        seen.launches[seen.phase, self._name] += 1
        seen.first.setdefault(handle, seen.phase)
        if any(size > most for size, most in zip((x, y, z), MAX_GRID, strict=True)):
            seen.errors.append(f"{self._name}: grid {(x, y, z)} at {_place()}")
        if any(isinstance(arg, torch.Tensor) and not arg.is_cuda for arg in args):
            seen.errors.append(f"{self._name}: a tensor on the CPU at {_place()}")


class Driver:
    """Of Triton, for a device that is not there."""

    def __init__(self, seen: Seen) -> None:
        from triton.backends.compiler import GPUTarget

        self._seen = seen
        self._target = GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)
        self.launcher_cls = lambda source, metadata: self._launcher(source, metadata)
        self.utils = SimpleNamespace(
            load_binary=self._load, get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES}
        )
        self._next: Any = None

    def _launcher(self, source: Any, metadata: Any) -> Launcher:
        self._next = source, metadata
        return Launcher(self._seen, source, metadata)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target

    def get_device_interface(self) -> Any:
        return torch.cuda

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        source, metadata = self._next
        usage = elf_usage(binary, name)
        handle = len(self._seen.variants) + 1
        names = source.fn.arg_names
        constants = {names[k[0]]: v for k, v in source.constants.items()}
        signature = ",".join(str(t) for t in source.signature.values() if t != "constexpr")
        text = f"{signature} {constants}"
        self._seen.variants[handle] = Variant(name, text, *usage, shared, metadata.num_warps)
        return object(), handle, usage[0], usage[1], 1024


def elf_usage(binary: bytes, name: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of its spills, by the disassembler that Triton brings."""
    import re
    import subprocess
    import tempfile

    from triton import knobs

    tool = Path(knobs.nvidia.cuobjdump.path)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    text = said.stdout + said.stderr
    regs = re.search(r"REG:(\d+)", text)
    stack = re.search(r"STACK:(\d+)", text)
    local = re.search(r"LOCAL:(\d+)", text)
    assert regs and stack and local, text
    return int(regs[1]), int(stack[1]) + int(local[1])


class Graph:
    """In place of `torch.cuda.CUDAGraph`."""

    seen: Seen

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.seen.is_capturing = True

    def capture_end(self) -> None:
        self.seen.is_capturing = False

    def replay(self) -> None:
        self.seen.launches[self.seen.phase, "GRAPH"] += 1

    def pool(self) -> int:
        return 0


class Stream:
    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0


def _flashinfer() -> dict[str, ModuleType]:
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


def _guard_like_cpu() -> None:
    """A CPU build of torch has no guard for CUDA devices, which indexing a tensor asks for."""
    if torch.backends.cuda.is_built():
        torch._C._ensureCUDADeviceGuardSet()
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[1] = guards[0]


class _Uncompiled:
    """In place of a compiled kernel, where only its variant is of interest."""

    def __init__(self, seen: Seen, function: Any, key: str) -> None:
        metadata = SimpleNamespace(name=function.fn.__name__)
        self.function = len(seen.variants) + 1
        self.packed_metadata = None
        seen.variants[self.function] = Variant(metadata.name, key, 0, 0, 0, 0)
        self.run = Launcher(seen, None, metadata)

    def launch_metadata(self, *_: Any) -> None: ...


def _note_only(seen: Seen) -> Any:
    from triton.runtime.jit import JITFunction

    def do_compile(self: Any, key: str, signature: Any, device: Any, *_: Any) -> Any:
        kernel = self.device_caches[device][0][key] = _Uncompiled(seen, self, key)
        return kernel

    return mock.patch.object(JITFunction, "_do_compile", do_compile)


@contextmanager
def fake_cuda(*, compiles: bool = True) -> Iterator[Seen]:
    """In this thread, and in those that the worker's prewarm would start, which are this one."""
    from triton.runtime.driver import driver

    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    seen = Seen()
    _guard_like_cpu()
    Graph.seen = seen
    device = Device(seen)
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, *_: device.pinned.add(address) or 0,
        cudaHostUnregister=lambda *_: 0,
    )
    properties = SimpleNamespace(
        multi_processor_count=NUM_SMS, total_memory=MEMORY_BYTES, name="fake H100"
    )
    of_cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: "fake H100",
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1 << 30,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "cudart": lambda: cudart,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: None,
        "set_device": lambda device: None,
    }
    with ExitStack() as stack:
        for name, value in of_cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Event", Event))
        stack.enter_context(mock.patch.object(torch, "tensor", _pinning(torch.tensor)))
        stack.enter_context(mock.patch.dict(sys.modules, _flashinfer()))
        stack.enter_context(mock.patch.object(driver, "_active", Driver(seen)))
        for patch in _of_asyncllm():
            stack.enter_context(patch)
        if not compiles:
            stack.enter_context(_note_only(seen))
        assert driver.active.get_current_target().arch == 90
        stack.enter_context(device)
        yield seen


def _pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor` looks for CUDA's allocator before anything can be in its way."""

    def tensor(
        *args: Any, pin_memory: bool = False, device: Any = None, **others: Any
    ) -> torch.Tensor:
        made = make(*args, **others)
        if device is not None:
            made = made.to(_numbered(torch.device(device)))
        return made.pin_memory() if pin_memory else made

    return tensor


def _of_asyncllm() -> Iterator[Any]:
    from asyncllm.graphs import pool
    from asyncllm.kernels.declaration import CudaKernel
    from asyncllm.models import loader
    from asyncllm.worker import kernel_prewarm

    def begin_loading(self: Any, device: Any, definitions: Any = ()) -> Callable[[], Any]:
        launch = None if definitions is None else lambda *_: 0
        return lambda: launch

    def begin(self: Any, launch: Callable[[], object], stream: Any = None) -> None:
        with torch.inference_mode():
            launch()

    prewarm = kernel_prewarm.KernelPrewarm
    yield mock.patch.object(pool, "weak_alias", lambda tensor: tensor)
    yield mock.patch.object(GraphPool := pool.GraphPool, "__init__", _pool_init(GraphPool))
    yield mock.patch.object(CudaKernel, "begin_loading", begin_loading)
    yield mock.patch.object(kernel_prewarm.registry, "libraries", lambda start: [])
    yield mock.patch.object(prewarm, "begin", begin)
    yield mock.patch.object(prewarm, "begin_last", lambda self, launch: begin(self, launch))
    yield mock.patch.object(kernel_prewarm, "hash_compiler", lambda: None)
    yield mock.patch.object(loader, "_fill_dummy", lambda loads, seed: None)


def _pool_init(pool: Any) -> Callable[..., None]:
    """Its default argument was made before `torch.cuda.CUDAGraph` was patched."""
    init = pool.__init__

    def patched(self: Any, make_graph: Any = Graph, **others: Any) -> None:
        init(self, make_graph, **others)

    return patched
