"""GEMMs by an algorithm of cuBLAS that is named, not by the first that its heuristic finds.

torch runs whatever stands first in the heuristic's list; cuBLASLt's C interface hands out the list,
and runs any of it. An algorithm is 64 bytes that mean something to one version of the library.
The library is the one that torch has loaded.

Row-major tensors are cuBLAS's column-major ones transposed, so y = x W^T is asked for as

    y^T [out, tokens] = (W^T)^T [out, in] times x^T [in, tokens]
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch

WORKSPACE_BYTES = 32 << 20  # what torch gives cuBLAS on Hopper
ALIGNMENT_BYTES = 256  # that the heuristic takes for granted
MOST_ALGORITHMS = 16  # it has found 8
ALGORITHM_BYTES = 64

# From cublasLt.h and library_types.h.
TYPES = {torch.bfloat16: 14, torch.float16: 2}
FLOAT32, COMPUTE_FLOAT32 = 0, 68
DESC_TRANSA, TRANSPOSED = 3, 1
PREF_MAX_WORKSPACE_BYTES = 1


class Shape(NamedTuple):
    """x [num_tokens, in_features] times weight [out_features, in_features] transposed."""

    num_tokens: int
    out_features: int
    in_features: int


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_byte * ALGORITHM_BYTES),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class CublasLt:
    """For tensors of `dtype` on one device, by one stream at a time: they share a workspace.

    Raises `OSError` where the library is not there, `KeyError` for a dtype not in TYPES.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._library = _library()
        self._type = TYPES[dtype]
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._handle = self._made("cublasLt")
        self._product = self._made("cublasLtMatmulDesc", COMPUTE_FLOAT32, FLOAT32)
        self._set("cublasLtMatmulDesc", self._product, DESC_TRANSA, TRANSPOSED, 4)
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._layouts: dict[Shape, tuple[ctypes.c_void_p, ...]] = {}

    @property
    def version(self) -> int:
        return int(self._library.cublasLtGetVersion())

    def algorithms(self, shape: Shape) -> list[bytes]:
        """Those that the heuristic knows, best first."""
        kind = "cublasLtMatmulPreference"
        preference = self._made(kind)
        self._set(kind, preference, PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES, 8)
        found, results = ctypes.c_int(), (_Heuristic * MOST_ALGORITHMS)()
        weight, x, y = self._layouts_of(shape)
        self._call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(self._handle, self._product, weight, x, y, y, preference),
            *(MOST_ALGORITHMS, results, ctypes.byref(found)),
        )
        return [bytes(each.algorithm) for each in results[: found.value] if each.status == 0]

    def can_run(self, shape: Shape, algorithm: bytes) -> bool:
        """Whether this library, on this device, knows it."""
        if len(algorithm) != ALGORITHM_BYTES:
            return False
        weight, x, y = self._layouts_of(shape)
        result = _Heuristic()
        status = self._library.cublasLtMatmulAlgoCheck(
            *(self._handle, self._product, weight, x, y, y, algorithm, ctypes.byref(result))
        )
        return status == 0 and result.workspace_bytes <= WORKSPACE_BYTES

    def linear(self, x: torch.Tensor, weight: torch.Tensor, algorithm: bytes) -> torch.Tensor:
        """x [tokens, in] times weight [out, in] transposed, a new tensor; both contiguous and
        aligned. Capturable. Raises `RuntimeError` where the algorithm does not take them."""
        shape = Shape(x.shape[0], *weight.shape)
        out = x.new_empty(shape.num_tokens, shape.out_features)
        weight_layout, x_layout, out_layout = self._layouts_of(shape)
        self._call(
            "cublasLtMatmul",
            *(self._handle, self._product, ctypes.byref(self._one)),
            *(_address(weight), weight_layout, _address(x), x_layout),
            *(ctypes.byref(self._zero), _address(out), out_layout, _address(out), out_layout),
            *(algorithm, _address(self._workspace), ctypes.c_size_t(WORKSPACE_BYTES)),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        return out

    def _layouts_of(self, shape: Shape) -> tuple[ctypes.c_void_p, ...]:
        """The layouts of weight, x and the result."""
        if shape not in self._layouts:
            tokens, out, size = shape
            self._layouts[shape] = tuple(
                self._made(
                    "cublasLtMatrixLayout",
                    *(self._type, ctypes.c_uint64(rows), ctypes.c_uint64(columns)),
                    ctypes.c_int64(rows),
                )
                for rows, columns in ((size, out), (size, tokens), (out, tokens))
            )
        return self._layouts[shape]

    def _made(self, kind: str, *args: Any) -> ctypes.c_void_p:
        """An object of the library's, which lives as long as what is returned."""
        made = ctypes.c_void_p()
        self._call(f"{kind}Create", ctypes.byref(made), *args)
        assert made.value is not None
        destroy = getattr(self._library, f"{kind}Destroy")
        end = weakref.finalize(made, destroy, ctypes.c_void_p(made.value))
        end.atexit = False  # a handle's end waits for the device, which may be why we exit
        return made

    def _set(self, kind: str, of: ctypes.c_void_p, name: int, value: int, size: int) -> None:
        value_at = ctypes.byref(ctypes.c_int64(value))
        self._call(f"{kind}SetAttribute", of, name, value_at, ctypes.c_size_t(size))

    def _call(self, function: str, *args: Any) -> None:
        status = getattr(self._library, function)(*args)
        if status:
            raise RuntimeError(f"{function}: cuBLAS status {status}")


def _address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@cache
def _library() -> ctypes.CDLL:
    """torch's own: named without a folder, what is loaded already is found first."""
    major = str(torch.version.cuda).split(".")[0]
    library = ctypes.CDLL(f"libcublasLt.so.{major}")
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library
