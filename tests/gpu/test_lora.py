"""LoRA's kernels in chains of launches that begin early, captured, against torch's products.

Their own tests, tests/models/test_lora.py, run on a GPU as well where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncllm.graphs.pool import GraphPool
from asyncllm.models.layers.lora_ops import TORCH_LORA
from tests.script_module import import_script

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
NUM_ADAPTERS, NUM_LAYERS, REPLAYS = 5, 4, 20
ROWS = [1, 2, 8, 33, 64, 300]  # by GEMV, by the skinny GEMM, by cuBLAS; few rows, and many
TOLERANCE = 4e-2  # bfloat16, over four layers; an adapter adds 12 % to each product


@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_captured_chain_equals_torch(num_rows: int, rank: int) -> None:
    """In each replay the rows have other adapters, or none, and what was captured follows them."""
    from asyncllm.models.layers.cuda_ops import CudaOps

    bench = import_script(SCRIPTS / "bench_lora_kernels.py")
    torch.manual_seed(0)
    device = torch.device("cuda")
    sizes = bench.Sizes(hidden=1024, kv=256, intermediate=2816)
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        layers = bench.Layers(sizes, NUM_LAYERS, NUM_ADAPTERS, rank, device, CudaOps(device))
        for linear in layers.layers[0].linears + layers.layers[1].linears:
            linear.weights["weight"].normal_(std=0.03)
        layers.fill_slots(0.03)
        layers.lora.slots[2, ::3] = 0  # one adapter leaves some layers as they are
        where = {linear._lora.behind is None for linear in layers.layers[0].linears}
        assert where == {True, False}  # some `a` lie behind their base's weight
        slots = torch.zeros(num_rows, dtype=torch.int32, device=device)
        run: Callable[[], torch.Tensor] = layers.forward(num_rows, slots)
        recorded = GraphPool().record(lambda: (run(),))
        for _ in range(REPLAYS):
            slots.copy_(torch.randint(NUM_ADAPTERS + 1, (num_rows,)))
            (made,) = recorded.replay()
            made = made.clone()
            ops, layers.lora.ops = layers.lora.ops, TORCH_LORA
            wanted = run().float()
            layers.lora.ops = ops
            error = (made.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
            assert error.max().item() < TOLERANCE, (slots.tolist(), error.tolist())
