"""`Ops` by CUDA kernels: of one row and of few ours, else cuBLAS with ours between its products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from asyncllm.kernels.gemm.gemm_autotune import AutotunedGemm
from asyncllm.kernels.gemv.kernel import gemv, gemv_add_norm
from asyncllm.kernels.rms_norm.kernel import add_rms_norm, rms_norm, swiglu
from asyncllm.kernels.skinny_gemm import SkinnyGemm
from asyncllm.models.layers.ops import Norm, Normed


class CudaOps:
    """In half precision. `gemm`: of many rows; None: torch's."""

    def __init__(self, device: torch.device, gemm: AutotunedGemm | None = None) -> None:
        self._skinny_gemm = SkinnyGemm(device)
        self._gemm = gemm
        self._linear = F.linear if gemm is None else gemm.linear

    def before_capture(self) -> None:
        if self._gemm is not None:
            self._gemm.autotune()

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return rms_norm(x, norm)

    def linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.values.shape[0] == 1:
            return gemv(x, weight, bias)
        if self._skinny_gemm.takes(x, weight):
            return self._skinny_gemm.linear(x, weight, bias)
        return self._linear(x.whole(), weight, bias)

    def gated_linear(
        self, x: Normed, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.values.shape[0] == 1:
            return gemv(x, weight, bias, gated=True)
        if self._skinny_gemm.takes(x, weight):
            return self._skinny_gemm.linear(x, weight, bias, gated=True)
        return swiglu(self._linear(x.whole(), weight, bias))

    def add_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        norm: Norm,
    ) -> Normed:
        if x.shape[0] == 1:
            return gemv_add_norm(x, weight, bias, residual, norm)
        if self._skinny_gemm.takes_sum(x, weight):
            return self._skinny_gemm.add_linear(x, weight, bias, residual, norm)
        y = self._linear(x, weight, bias)
        add_rms_norm(y, residual, norm)
        return Normed(y)
