"""Offline batches: `LLM`."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from asyncllm import (
    LLM,
    BeamSearchParams,
    EngineDeadError,
    InvalidRequestError,
    LoRARequest,
    SamplingParams,
)
from tests.waiting import PATIENCE_SECONDS

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", num_gpu_blocks_override=200, max_num_seqs=4, swap_space=0.01) as llm:
        yield llm


def test_batches_keep_their_order(llm: LLM) -> None:
    prompts = [f"What is {i} + 1?" for i in range(12)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert all(len(o.outputs[0].token_ids) == 8 and o.finished for o in outputs)
    again = llm.generate(iter(prompts), GREEDY, use_tqdm=False)
    assert [o.outputs[0].text for o in again] == [o.outputs[0].text for o in outputs]
    llm.engine.check_idle()


def test_one_prompt_in_any_form(llm: LLM) -> None:
    ids = llm.engine.tokenizer.encode("hello")
    answers = {
        tuple(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in ("hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids})
    }
    assert len(answers) == 1
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_the_bar_tells_tokens_per_second(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = llm.generate(["Once", "Twice upon"], GREEDY)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "generating: 100%" in last
    found = re.search(r"(\d+) prompt \+ (\d+) output tokens/s", last)
    assert found is not None
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert int(found[2]) / int(found[1]) == pytest.approx(num_output / num_prompt, rel=0.5)


def test_params_one_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 5)]
    outputs = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [2, 5]
    with pytest.raises(ValueError, match="sampling_params: 2 given for 3 prompts"):
        llm.generate(["a", "b", "c"], params, use_tqdm=False)


def test_chat_applies_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    one = llm.chat(messages, GREEDY, use_tqdm=False)
    many = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert len(one) == 1 and len(many) == 2
    assert "What is 2 + 2?" in (one[0].prompt or "")
    assert one[0].outputs[0].token_ids == many[1].outputs[0].token_ids
    template = "{{ messages[0].content }}!"
    (other,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
    assert other.prompt == "What is 2 + 2?!"


def test_an_adapter_goes_with_each_call(llm: LLM) -> None:
    adapter = LoRARequest("one", 1, "/nowhere")
    messages = [{"role": "user", "content": "hello"}]
    for call in (
        lambda: llm.generate("hello", GREEDY, use_tqdm=False, lora_request=adapter),
        lambda: llm.chat(messages, GREEDY, use_tqdm=False, lora_request=adapter),
        lambda: llm.beam_search("hello", BeamSearchParams(2, 4), lora_request=adapter),
    ):
        with pytest.raises(InvalidRequestError, match="started without enable_lora"):
            call()


def test_a_refused_prompt_ends_the_call_and_nothing_else(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", [10**9]], GREEDY, use_tqdm=False)
    assert llm.generate("fine", GREEDY, use_tqdm=False)[0].finished
    llm.engine.check_idle()


def test_what_is_no_sampling_params_says_so(llm: LLM) -> None:
    wrong: Any = {"max_tokens": 2}
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, got dict"):
        llm.generate("a", wrong, use_tqdm=False)
    with pytest.raises(TypeError, match="got dict"):
        llm.engine.generate("a", wrong)


def test_a_closed_llm_says_so() -> None:
    llm = LLM("tiny", num_gpu_blocks_override=8, swap_space=0)
    llm.close()
    with pytest.raises(EngineDeadError, match="this LLM is closed"):
        llm.generate("a")


def test_works_where_a_loop_is_running_already(llm: LLM) -> None:
    async def notebook_cell() -> int:
        return len(llm.generate("hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids)

    assert asyncio.run(notebook_cell()) == 8


def test_the_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b", "c"], GREEDY)
    assert "3/3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_that_never_closes_ends_quietly() -> None:
    code = (
        "from asyncllm import LLM\n"
        "llm = LLM('tiny', num_gpu_blocks_override=64, swap_space=0)\n"
        "print(len(llm.generate('a', use_tqdm=False)))"
    )
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (end.stdout, end.stderr) == ("1\n", "")


@pytest.mark.slow
def test_a_collected_llm_leaves_no_thread() -> None:
    llm = LLM("tiny", num_gpu_blocks_override=64, swap_space=0)
    thread = llm._thread
    del llm
    gc.collect()
    thread.join(PATIENCE_SECONDS)
    assert not thread.is_alive()
