"""A whole engine whose captured decode steps are run by the persistent kernel, on the CPU.

The kernel is emulated (emulator.h), graphs are recordings, and tests say what the autotune finds.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from asyncllm import LLM, RequestOutput, SamplingParams
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.graphs.pool import GraphPool
from asyncllm.kernels import persistent_decode
from asyncllm.kernels.declaration import CudaKernel, Definitions, Launch
from asyncllm.worker import step_captures
from tests.cuda.emulated import compile_for_cpu
from tests.worker.recorded_graph import RecordedGraph

NUM_BLOCKS = 3
FLAGS = ("-DHEAD_DIM=64", "-DGROUP_SIZE=2", "-DBLOCK_SIZE=16")
ARGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "num_gpu_blocks_override": 40,
    "max_model_len": 128,
    "max_num_seqs": 12,
    "swap_space": 0,
    "cuda_graph_sizes": [2, 12],
    "prefill_graph_sizes": [0],
}
PROMPTS: Any = [{"prompt_token_ids": list(range(3, n))} for n in (9, 40)]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, detokenize=False)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class RecordedLaunch:
    """The emulated kernel as an operation of torch, so that a recording has it."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._args: list[ctypes.Structure] = []  # of every launch; recordings repeat it
        self._library = torch.library.Library("asyncllm_emulated", "DEF")
        self._library.define("launch(int place) -> ()")
        self._library.impl("launch", self._run, "CompositeExplicitAutograd")
        self.num_launches = 0

    def __call__(self, args: Any, num_blocks: int, stream: int) -> int:
        assert num_blocks == NUM_BLOCKS
        self._args.append(type(args._obj).from_buffer_copy(args._obj))
        torch.ops.asyncllm_emulated.launch(len(self._args) - 1)
        return 0

    def _run(self, place: int) -> None:
        self.num_launches += 1
        self._launch(ctypes.byref(self._args[place]), NUM_BLOCKS, 0)

    def close(self) -> None:
        self._library._destroy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose greedy tokens have clear margins."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(18)
    config = Qwen3Config(
        vocab_size=264, hidden_size=256, intermediate_size=256, num_hidden_layers=1, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.2, dtype="bfloat16",
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("emulated") / "kernel.so"
    return compile_for_cpu(persistent_decode.KERNEL, FLAGS, made)


@pytest.fixture
def kernel(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedLaunch]:
    """The one that every start finds from now on for its model."""
    kernel = RecordedLaunch(compiled)

    def begin_loading(
        declared: CudaKernel, device: torch.device, definitions: Definitions | None
    ) -> Any:
        assert declared is persistent_decode.KERNEL and definitions in (None, FLAGS)
        return lambda: None if definitions is None else kernel

    monkeypatch.setattr(TorchAttention, "supports_graphs", True)
    monkeypatch.setattr(step_captures, "GraphPool", partial(GraphPool, RecordedGraph))
    monkeypatch.setattr(CudaKernel, "supports", lambda declared, device: True)
    monkeypatch.setattr(CudaKernel, "begin_loading", begin_loading)
    for module in (persistent_decode, step_captures):
        monkeypatch.setattr(module, "num_sms", lambda device: NUM_BLOCKS)
    yield kernel
    kernel.close()


def answers(folder: Path, **args: Any) -> tuple[list[RequestOutput], Any]:
    """To all prompts at once and to the first alone; and its decode kernels."""
    with LLM(str(folder), **ARGS | args) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        outputs += llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
        llm.engine.check_idle()
        return outputs, llm.engine.startup["decode_kernels"]


def margins(outputs: list[RequestOutput]) -> list[float]:
    """Each token's log-probability minus that of the next likely."""
    found = []
    for output in outputs:
        for entry in output.outputs[0].logprobs or []:
            best, second, *_ = sorted((e.logprob for e in entry.values()), reverse=True)
            found.append(best - second)
    return found


@pytest.mark.slow
def test_the_same_tokens_as_by_the_layers(kernel: RecordedLaunch, folder: Path) -> None:
    by_layers, kernels = answers(folder, attention_backend="torch")
    assert kernels == {"layers": [2, 12]}
    assert min(margins(by_layers)) > 0.3
    before = kernel.num_launches
    ours, kernels = answers(folder)
    assert kernels == {"persistent": [2], "layers": [12]}
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in by_layers]
    in_capture, of_each_call = 2, GREEDY.max_tokens - 1  # the first token is the prefill's
    assert kernel.num_launches - before >= in_capture + 2 * of_each_call


@pytest.mark.parametrize(
    "args",
    [{"attention_backend": "torch"}, {"enforce_eager": True}, {"cuda_graph_sizes": [9, 12]}],
    ids=["named", "eager", "many"],
)
def test_where_it_is_not_asked(kernel: RecordedLaunch, folder: Path, args: dict[str, Any]) -> None:
    _, kernels = answers(folder, **args)
    sizes = args.get("cuda_graph_sizes", ARGS["cuda_graph_sizes"])
    assert kernels == (None if "enforce_eager" in args else {"layers": sizes})
    assert kernel.num_launches == 0
