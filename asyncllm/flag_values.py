"""Checks the values of the engine's flags, and resolves some of them."""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Sequence
from dataclasses import Field, field, fields
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from asyncllm.host import num_cores
from asyncllm.mesh_config import ClusterConfig, MeshConfig
from asyncllm.sampling_limits import shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from asyncllm.model_config import ModelConfig

MAX_RANKS = MAX_ENGINES = 64
MAX_SHARING_ENGINES = 16  # a socket between each two
ANY_ADDRESS = {"0.0.0.0", "::", ""}
# 272 and 528: half a chunk, or a chunk, of a large model, plus a few decodes.
PREFILL_GRAPH_SIZES = tuple(
    sorted({16, *range(32, 257, 32), *range(320, 1089, 64), *range(1152, 2049, 128), 272, 528})
)
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # torch's short names, as in vLLM
LIMITS = {
    "least": (operator.ge, "at least"),
    "most": (operator.le, "at most"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
}


def flag(default: Any, help: str, **limits: float) -> Any:
    """A dataclass field with its flag's help text, and `LIMITS` of its value."""
    metadata = {"help": help, "limits": limits}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_fields(args: DataclassInstance) -> None:
    """Check types and limits of all fields. Raises `ValueError` naming the field."""
    hints = get_type_hints(type(args))
    for given in fields(args):
        _check_field(given, hints[given.name], getattr(args, given.name))


def _check_field(given: Field[Any], hint: Any, value: Any) -> None:
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [arm for arm in arms if get_origin(arm) is Literal]
    if literals:
        choices = get_args(literals[0])
        if value not in choices and not (value is None and NoneType in arms):
            listed = ", ".join(choices)
            raise ValueError(f"{given.name} must be one of {listed}, got {shown(value)}")
    elif not _has_type(value, hint):
        raise ValueError(f"{given.name} must be of type {given.type}, got {shown(value)}")
    for kind, limit in given.metadata["limits"].items():
        holds, words = LIMITS[kind]
        if value is not None and not holds(value, limit):
            raise ValueError(f"{given.name} must be {words} {limit}, got {value}")


def _has_type(value: object, hint: Any) -> bool:
    """Whether a value has a field's type. A bool is not a number; a path counts as a str, a tuple
    as a list."""
    if get_origin(hint) is UnionType:
        return any(_has_type(value, arm) for arm in get_args(hint))
    if get_origin(hint) is list:
        (item,) = get_args(hint)
        return isinstance(value, list | tuple) and all(_has_type(each, item) for each in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, _ACCEPTED.get(hint, get_origin(hint) or hint))


_ACCEPTED: dict[Any, Any] = {int: Integral, float: Real, str: (str, PathLike)}


def resolve_classes(named: Sequence[str | type] | None) -> tuple[type, ...]:
    return tuple(map(_resolve_class, named or ()))


def _resolve_class(named: str | type) -> type:
    """A class, or the class that "module:Class" names. Raises `ValueError`."""
    if not isinstance(named, str):
        return named
    module, colon, name = named.partition(":")
    if not (module and colon and name):
        raise ValueError(f"logits_processors must be module:Class, got {named!r}")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"logits_processors {named}: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"logits_processors {named} is not a class")
    return found


def resolve_device(name: str) -> Literal["cpu", "cuda"]:
    if name == "cpu":
        return "cpu"
    import torch  # slow, so only if it is needed

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise ValueError("device cuda: torch finds no CUDA device")
    return "cpu"


def resolve_data_parallel_backend(
    name: str, size: int, device: str, *, shares_experts: bool
) -> str:
    """Engines of one process would share a CUDA context and the GIL, so CUDA needs processes."""
    if name == "uni" and device == "cuda" and size > 1:
        raise ValueError("data_parallel_backend uni is for engines on a CPU")
    if shares_experts and size > 1:
        if name == "uni":
            raise ValueError(
                "data_parallel_backend uni: engines that share experts (enable_expert_parallel) "
                "wait for each other, and need a process each: mp"
            )
        return "mp"
    if name != "auto":
        return name
    return "mp" if device == "cuda" or num_cores() > size else "uni"


def resolve_mesh(args: Any, device: str) -> MeshConfig:
    """args: `EngineArgs`."""
    tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
    dp = args.data_parallel_size if args.enable_expert_parallel else 1
    named = f"tensor_parallel_size {tp} times pipeline_parallel_size {pp}"
    if args.enable_expert_parallel and tp * dp == 1:
        raise ValueError(
            "enable_expert_parallel needs a tensor_parallel_size or data_parallel_size above 1: "
            "experts are divided over all ranks of all engines"
        )
    if dp > 1 and pp > 1:
        raise ValueError(
            f"pipeline_parallel_size {pp}: engines that share experts (enable_expert_parallel with "
            f"data_parallel_size {dp}) have no stages"
        )
    if dp > MAX_SHARING_ENGINES:
        raise ValueError(
            f"data_parallel_size {dp}: at most {MAX_SHARING_ENGINES} engines share experts "
            "(enable_expert_parallel)"
        )
    if (size := tp * pp) > MAX_RANKS:
        raise ValueError(f"{named} is over {MAX_RANKS}")
    if size % args.nnodes:
        raise ValueError(f"{named} is no multiple of nnodes {args.nnodes}")
    if device == "cuda" and size > 1 and args.distributed_executor_backend != "ray":
        import torch

        if size // args.nnodes > (found := torch.cuda.device_count()):
            raise ValueError(f"{named} is over the {found} CUDA devices of {args.nnodes} hosts")
    return MeshConfig(tp, by_expert=args.enable_expert_parallel, pp=pp, dp=dp)


def resolve_cluster(args: Any, mesh: MeshConfig) -> ClusterConfig:
    """args: `EngineArgs`."""
    backend, nnodes = args.distributed_executor_backend, args.nnodes
    if backend == "uni" and mesh.size > 1:
        raise ValueError(f"distributed_executor_backend uni is for one rank, not {mesh.size}")
    if backend == "ray" and nnodes > 1:
        raise ValueError(f"nnodes {nnodes}: distributed_executor_backend ray finds hosts itself")
    if (nnodes > 1 or backend == "ray") and args.data_parallel_size > 1:
        raise ValueError("data_parallel_size: engines whose ranks are on other hosts are served "
                         "by a server each")  # fmt: skip
    if backend == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("distributed_executor_backend ray: pip install 'asyncllm[ray]'")
    if args.master_addr in ANY_ADDRESS:
        raise ValueError(
            f"master_addr {args.master_addr!r} is no address by which other ranks reach this host"
        )
    return ClusterConfig(backend, nnodes, args.master_addr, args.master_port, args.join_secret_file)


def resolve_dtype(name: str, model: ModelConfig, device: str) -> str:
    dtype = DTYPE_NAMES.get(name, name)
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else model.dtype_name
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype} of {model.path} is not supported: pass --dtype")
    return dtype


def kernel_rank(max_lora_rank: int) -> int:
    """The rank rounded up to a power of two that kernels support."""
    return max(16, 1 << (max_lora_rank - 1).bit_length())


def decode_sizes(sizes: list[int] | None, max_num_seqs: int, num_stages: int) -> tuple[int, ...]:
    """Decode batch sizes to capture, ascending. By default the largest is max_num_seqs, or with
    pipeline stages a stage's share of it."""
    if sizes is None:
        most = min(-(-max_num_seqs // num_stages), 512)
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(288, 513, 32)]
        sizes = [size for size in sizes if size < most] + [most]
    if not sizes or any(size < 1 or size > max_num_seqs for size in sizes):
        raise ValueError(f"cuda_graph_sizes must be between 1 and max_num_seqs, got {sizes}")
    return tuple(sorted(set(sizes)))


def prefill_sizes(sizes: list[int] | None, max_tokens: int) -> tuple[int, ...]:
    """Token counts of mixed steps to capture, ascending. Larger steps take long enough to hide
    their launches."""
    if sizes is None:
        largest = min(max_tokens, PREFILL_GRAPH_SIZES[-1])
        sizes = [size for size in PREFILL_GRAPH_SIZES if size < largest] + [largest]
    if any(size < 0 or size > max_tokens for size in sizes):
        raise ValueError(
            f"prefill_graph_sizes must be between 0 and max_num_batched_tokens, got {sizes}"
        )
    return tuple(sorted(set(sizes) - {0}))
