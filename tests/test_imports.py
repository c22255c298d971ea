"""A start does not import these: each costs time before the first word of help."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from tests.models.tiny_checkpoints import CONFIGS, random_reference
from tests.waiting import PATIENCE_SECONDS

HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "aiohttp", "triton"}
STARTING = (
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "sklearn", "scipy",
    "transformers.activations", "transformers.generation.utils", "transformers.modeling_utils",
    "transformers.models.auto.auto_factory",
)  # fmt: skip
FAMILIES = ("llama-yarn", "qwen2", "qwen3")


def modules_after(code: str) -> set[str]:
    """Names in sys.modules of a fresh interpreter that ran `code`."""
    program = f"{code}\nimport json, sys; print(); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import asyncllm",
        "import asyncllm.cli",
        "import asyncllm.cli\ntry: asyncllm.cli.main(['serve', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_help_needs_nothing_heavy(code: str) -> None:
    assert not modules_after(code) & HEAVY


def test_a_start_imports_no_compiler_and_no_model_classes() -> None:
    code = (
        "import asyncio\nfrom asyncllm import AsyncLLMEngine\nimport asyncllm.server.serve\n"
        "async def main():\n"
        "    async with AsyncLLMEngine('tiny', num_gpu_blocks_override=16) as engine: pass\n"
        "asyncio.run(main())"
    )
    assert not modules_after(code) & set(STARTING)


@pytest.mark.slow
def test_a_start_on_cuda_knows_what_to_compile_without_a_compiler(tmp_path: Path) -> None:
    """It builds a model without memory, and for common families knows what one row multiplies.
    Torch's meta device imports a compiler for an embedding."""
    code = (
        "import sys, torch\nfrom asyncllm import EngineArgs\n"
        "from asyncllm.attention.cache_spec import CacheLayout\n"
        "from asyncllm.attention.kv_cache import KVCache\n"
        "from asyncllm.models.registry import model_without_memory\n"
        "from asyncllm.worker import kernel_prewarm\n"
        "config, dtype = EngineArgs('tiny').create_engine_config(), torch.bfloat16\n"
        "with torch.inference_mode():\n"
        "    model = model_without_memory(config.model, dtype, 16)\n"
        "    layout = CacheLayout(model.attention_layers, 16, dtype)\n"
        "    KVCache(layout, 1, torch.device('meta'))\n"
        "kernel_prewarm.has_fast_ops = lambda device, dtype: True\n"
        f"for family in {FAMILIES}:\n"
        f"    args = EngineArgs(f'{tmp_path}/{{family}}', dtype='bfloat16', load_format='dummy',"
        " skip_tokenizer_init=True)\n"
        "    config = args.create_engine_config()\n"
        "    start = kernel_prewarm.early_start(config, torch.device('cpu'))\n"
        "    assert len(start.row_products) >= 3, family\n"
        f"    assert not sys.modules.keys() & {set(STARTING)}, family\n"
    )
    for family in FAMILIES:
        config = deepcopy(CONFIGS[family])
        config.architectures = [random_reference(config).__class__.__name__]
        config.save_pretrained(tmp_path / family)
    assert not modules_after(code) & set(STARTING)
