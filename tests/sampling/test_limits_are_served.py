"""A value inside the limits never fails a step: the engine serves it, or refuses it by name."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, InvalidRequestError, RequestOutput, SamplingParams
from tests.sampling.test_validation import FIELDS
from tests.waiting import run

ENGINE: dict[str, Any] = {
    "max_logprobs": -1,
    "num_gpu_blocks_override": 100,
    "max_num_seqs": 256,
    "max_model_len": 64,
    "swap_space": 0.01,
    "device": "cpu",
}
EXTREMES = [(name, value) for name, (good, _) in FIELDS.items() for value in good]
TINY = {"temperature": 1e-5, "top_p": 1e-320, "min_p": 1e-320, "repetition_penalty": 0.01}
HUGE = {"top_k": 2**63 - 1, "temperature": 100, "repetition_penalty": 10, "presence_penalty": 2}


def params_of(fields: dict[str, Any]) -> SamplingParams:
    params = SamplingParams(**{"seed": 3, "max_tokens": 2} | fields)
    return replace(params, max_tokens=2) if params.max_tokens is None else params


async def serve(engine: AsyncLLMEngine, fields: dict[str, Any]) -> RequestOutput | None:
    """None where the field is refused; a step that fails raises."""
    try:
        return await engine.generate("Hi there", params_of(fields))
    except InvalidRequestError as error:
        assert error.param in fields, (fields, error)
        return None


@pytest.mark.slow
def test_every_limit_in_one_batch() -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", **ENGINE) as engine:
            cases = [{name: value} for name, value in EXTREMES] + [TINY, HUGE, TINY | HUGE]
            neighbour = {"temperature": 0, "max_tokens": 8}
            alone = await serve(engine, neighbour)
            outputs = await asyncio.gather(*(serve(engine, f) for f in [neighbour, *cases]))
            assert outputs[0] is not None and alone is not None
            assert outputs[0].outputs == alone.outputs
            refused = [f for f, output in zip(cases, outputs[1:], strict=True) if output is None]
            # What no window has room for, or this tokenizer's vocabulary not.
            assert {name for fields in refused for name in fields} <= {
                "max_tokens", "min_tokens", "logit_bias", "logprobs",
            }  # fmt: skip
            engine.check_idle()

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 2**63 - 1])
def test_a_top_k_beyond_every_vocabulary_keeps_all(top_k: int) -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", **ENGINE) as engine:
            everything = await serve(engine, {"max_tokens": 6})
            output = await serve(engine, {"max_tokens": 6, "top_k": top_k})
            assert output is not None and everything is not None
            assert output.outputs == everything.outputs

    run(main())
