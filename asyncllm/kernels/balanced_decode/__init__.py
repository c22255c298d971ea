"""Decode attention whose warps all read equally much, in one CUDA kernel.

A step of many rows reads its keys and values and does little else, so what counts is how much is on
its way from memory at any time, and that nobody is left with more than others. The kernel,
balanced_decode.cu, takes the tiles of all rows as one list and splits it evenly; it finds the
splits from the positions on the device, so there is no plan, and a captured graph replays as it is.

It takes rotated heads, or all from the projection on. Then it does what rope_kv_write would before
it, and asks for the keys of earlier tokens before the projection has ended.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from asyncllm.kernels.declaration import CudaKernel, Definitions, Launch, Start, current_stream
from asyncllm.kernels.records import AttendProjected, AttendRows, AttentionLayer, Rotation

HEAD_DIMS = (64, 128)
MAX_GROUP = 8  # query heads of one KV head
MAX_ROWS = 2048
TILE = 16  # tokens

_pointer, _int64, _int32, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Args(ctypes.Structure):
    """The kernel's, field by field."""

    _fields_ = (
        *((name, _pointer) for name in ("q", "cache", "tables", "positions", "out")),
        *((name, _pointer) for name in ("parts", "counts")),
        *((name, _pointer) for name in ("angles", "cos_sin", "q_weight", "k_weight")),
        *((name, _int64) for name in ("page_stride", "kv_stride")),
        *((name, _int32) for name in ("rows", "kv_heads", "table_stride")),
        *((name, _float) for name in ("eps", "scale")),
        ("starts_early", _int32),
    )


def definitions(
    layers: Sequence[AttentionLayer], dtype: torch.dtype, block_size: int
) -> Definitions | None:
    """To compile the source with, for such layers and pages of so many tokens; None where it does
    not support them all, or there are none."""
    if not layers or any(limit(layer, dtype, block_size) is not None for layer in layers):
        return None
    return shape_definitions(layers[0], block_size)


def limit(layer: AttentionLayer, dtype: torch.dtype, block_size: int) -> str | None:
    """The first of these that it does not support, in words."""
    group, norm = layer.num_heads // layer.num_kv_heads, layer.head_norm
    limits = (
        (dtype is torch.bfloat16, str(dtype)),
        (layer.window is None, f"a window of {layer.window}"),
        (layer.soft_cap is None, f"a soft cap of {layer.soft_cap}"),
        (layer.sinks is None, "sinks"),
        (layer.slopes is None, "slopes (ALiBi)"),
        (norm is None or norm.q_weight.dtype is dtype, "norms of heads in float32"),
        (layer.head_dim in HEAD_DIMS, f"head_dim {layer.head_dim}"),
        (group <= MAX_GROUP, f"{group} query heads of one KV head"),
        (block_size % TILE == 0, f"block_size {block_size}"),
    )
    return next((words for is_met, words in limits if not is_met), None)


def shape_definitions(layer: AttentionLayer, block_size: int) -> Definitions:
    group = layer.num_heads // layer.num_kv_heads
    sizes = {"HEAD_DIM": layer.head_dim, "GROUP_SIZE": group, "BLOCK_SIZE": block_size}
    return tuple(f"-D{name}={size}" for name, size in sizes.items())


def _definitions_for(start: Start) -> Definitions | None:
    if start.attention_backend != "flashinfer" or start.kv_dtype is not start.dtype:
        return None
    return definitions(start.layers, start.dtype, start.block_size)


KERNEL = CudaKernel(
    name="balanced_decode",
    falls_back_to="paged_decode",
    source=Path(__file__).with_name("balanced_decode.cu"),
    structs=(Args,),
    capabilities=((9, 0), (10, 0)),  # with 227 KiB of shared memory for a block
    definitions_for=_definitions_for,
)


class BalancedDecode:
    """For steps of at most MAX_ROWS rows, on layers of one shape that have `definitions`."""

    def __init__(
        self,
        pages: Sequence[torch.Tensor],
        layer: AttentionLayer,
        launch: Launch,
        num_blocks: int,
    ) -> None:
        """`pages`: of each layer, [pages, 2, block_size, kv_heads, head_dim]. `num_blocks`: one for
        each SM."""
        self._pages = pages
        self._page_shape = pages[layer.index]
        self._launch = launch
        self._num_blocks = num_blocks
        device = pages[0].device
        kv_heads = layer.num_kv_heads
        # A block leaves two at most: of the rows in which its tiles begin and end. Beside the sums,
        # the greatest score and the sum of the weights.
        parts = (num_blocks, 2, layer.num_heads // kv_heads, layer.head_dim + 4)
        self._parts = torch.empty(parts, dtype=torch.float32, device=device)
        self._counts = torch.zeros((MAX_ROWS, kv_heads), dtype=torch.int32, device=device)

    def decode(self, block_tables: torch.Tensor, positions: torch.Tensor) -> AttendProjected:
        """From the projection on, of rows as `bind` has them. Capturable.

        Reads rows and rotation before the projection has ended, which itself may start early: they
        must have been there before some kernel that started when all before it had ended.
        """
        args = self._args(block_tables, positions)

        def attend(layer: AttentionLayer, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            cos_sin, norm = rotation.cos_sin, layer.head_norm
            assert qkv.is_contiguous() and len(qkv) == len(positions)
            assert rotation.rows.is_contiguous() and cos_sin.is_contiguous()
            assert rotation.rows.dtype is torch.int32 and cos_sin.dtype is torch.float32
            out = qkv.new_empty((len(positions), layer.num_heads * layer.head_dim))
            args.q, args.out = qkv.data_ptr(), out.data_ptr()
            args.angles, args.cos_sin = rotation.rows.data_ptr(), cos_sin.data_ptr()
            args.q_weight = None if norm is None else norm.q_weight.data_ptr()
            args.k_weight = None if norm is None else norm.k_weight.data_ptr()
            args.eps = 0 if norm is None else norm.eps
            self._run(layer, args, current_stream(qkv))
            return out

        return attend

    def bind(
        self,
        q: torch.Tensor,
        block_tables: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        *,
        starts_early: bool = True,
    ) -> AttendRows:
        """q, rotated, and out [rows, heads, head_dim], contiguous; positions int32 [rows], of
        padding rows, behind the others, -1. Their keys and values are written. Capturable.
        The result keeps what it was given, and belongs to the current stream.

        starts_early: with what the kernel before leaves of the device, before that has ended. It
        reads tables and positions then, as `decode` does.
        """
        assert q.is_contiguous() and out.is_contiguous() and len(q) == len(positions)
        args = self._args(block_tables, positions)
        args.q, args.out, args.starts_early = q.data_ptr(), out.data_ptr(), starts_early
        stream = current_stream(q)

        # Only their addresses are used, and whose memory was let go of is somebody else's.
        kept = (q, block_tables, positions, out)

        def call(layer: AttentionLayer, _kept: object = kept) -> None:
            self._run(layer, args, stream)

        return call

    def _args(self, block_tables: torch.Tensor, positions: torch.Tensor) -> Args:
        assert len(positions) <= len(self._counts)
        assert positions.dtype is torch.int32 and positions.is_contiguous()
        assert block_tables.dtype is torch.int32 and block_tables.stride(1) == 1
        pages = self._page_shape
        return Args(
            tables=block_tables.data_ptr(),
            positions=positions.data_ptr(),
            parts=self._parts.data_ptr(),
            counts=self._counts.data_ptr(),
            page_stride=pages.stride(0),
            kv_stride=pages.stride(1),
            rows=len(positions),
            kv_heads=pages.shape[3],
            table_stride=block_tables.stride(0),
            starts_early=True,
        )

    def _run(self, layer: AttentionLayer, args: Args, stream: int) -> None:
        args.cache = self._pages[layer.index].data_ptr()
        args.scale = layer.scale
        KERNEL.launch(self._launch, args, self._num_blocks, stream)
