"""thinking_token_budget: where reasoning begins and ends by token ids, and what is forced when."""

from __future__ import annotations

import asyncio
import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from asyncllm import AsyncLLMEngine, InvalidRequestError, SamplingParams
from asyncllm.engine.thinking import ReasoningTokens, ThinkingBudget, reasoning_tokens
from asyncllm.structured_outputs import ReasoningMarkers, StructuredOutputsParams
from tests.formats.test_response_template import template
from tests.server.http_harness import CHAT, run, serving

START, END = (1,), (2,)
ONE = ReasoningTokens(START, END)
SEVERAL = ReasoningTokens((5, 6), (7, 7, 8))
ENGINE: dict[str, Any] = {
    "num_gpu_blocks_override": 160,
    "max_num_seqs": 8,
    "swap_space": 0.01,
    "device": "cpu",
}
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


# --- token by token ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "prompt", "expected"),
    [
        (ONE, [9, 9], None),
        (ONE, [9, 1], 0),
        (ONE, [9, 1, 9, 9], 2),
        (ONE, [1, 9, 2, 9], None),
        (ONE, [1, 9, 2, 1, 9], 1),
        (SEVERAL, [5, 6, 6], 1),
        (SEVERAL, [6, 5, 5], None),
        (SEVERAL, [5, 6, 9, 7, 8], 3),
        (SEVERAL, [5, 6, 9, 7, 7, 8], None),
        (ReasoningTokens(START, END, assumed=True), [9], 0),
        (ReasoningTokens(START, END, assumed=True), [9, 2, 9], None),
        (ReasoningTokens(START, END, assumed=True), [9, 2, 9, 9, 9], 0),
    ],
)
def test_what_a_prompt_leaves_open(
    tokens: ReasoningTokens, prompt: list[int], expected: int | None
) -> None:
    assert tokens.num_open(prompt) == expected


def test_markers_that_the_tokenizer_declares() -> None:
    """As the server parses reasoning: a model may describe it without a chat template that does."""
    tokenizer: Any = SimpleNamespace(
        chat_template=None,
        special_tokens={},
        response_template=template(None),
        encode=lambda text, add_special_tokens: list(text.encode()),
    )
    config: Any = SimpleNamespace(reasoning_parser="auto")
    found = ReasoningTokens(tuple(b"<think>"), tuple(b"</think>"))
    assert reasoning_tokens(config, tokenizer) == found


def answer(tokens: ReasoningTokens, budget: int, prompt: list[int], wishes: list[int]) -> list[int]:
    """The output where the model would say `wishes` one after the other."""
    forcer = ThinkingBudget(tokens, budget, len(prompt), tokens.num_open(prompt))
    said: list[int] = []
    todo = list(wishes)
    while todo:
        forced = forcer.next_token(prompt + said)
        assert forcer.next_token(prompt + said) == forced  # asked twice, the same
        said.append(todo.pop(0) if forced is None else forced)
    return said


@pytest.mark.parametrize(
    ("tokens", "budget", "prompt", "wishes", "expected"),
    [
        (ONE, 3, [9], [1, 30, 31, 32, 40, 41], [1, 30, 31, 32, 2, 40, 41]),
        (ONE, 0, [9], [1, 40], [1, 2, 40]),
        (ONE, 0, [9, 1], [40], [2, 40]),
        (ONE, 3, [9, 1, 30], [31, 32, 40], [31, 32, 2, 40]),
        (ONE, 1, [9, 1, 30, 31], [40], [2, 40]),
        (ONE, 3, [9, 1], [30, 2, 40, 41, 42], [30, 2, 40, 41, 42]),
        (ONE, 3, [9, 1], [30, 31, 32, 2], [30, 31, 32, 2, 2]),  # too late to end by itself
        (ONE, 2, [9], [40, 41, 42, 43], [40, 41, 42, 43]),  # no reasoning, no budget
        # Its parts share the budget.
        (ONE, 3, [9], [1, 30, 31, 2, 40, 1, 32, 41], [1, 30, 31, 2, 40, 1, 32, 2, 41]),
        (SEVERAL, 2, [9], [5, 6, 30, 31, 40], [5, 6, 30, 31, 7, 7, 8, 40]),
        # What it has written of the end is not written twice.
        (SEVERAL, 2, [9], [5, 6, 30, 7, 40], [5, 6, 30, 7, 7, 8, 40]),
        (SEVERAL, 3, [9], [5, 6, 7, 7, 7, 40], [5, 6, 7, 7, 7, 8, 40]),
        (SEVERAL, 9, [9], [5, 6, 7, 7, 7, 8, 40], [5, 6, 7, 7, 7, 8, 40]),
    ],
)
def test_the_end_is_forced_after_the_budget(
    tokens: ReasoningTokens,
    budget: int,
    prompt: list[int],
    wishes: list[int],
    expected: list[int],
) -> None:
    assert answer(tokens, budget, prompt, wishes)[: len(expected)] == expected


def test_never_more_than_the_budget_whatever_the_model_says() -> None:
    rng = random.Random(5)
    for _ in range(500):
        tokens = rng.choice([ONE, SEVERAL])
        budget = rng.randrange(6)
        said = answer(tokens, budget, [9], rng.choices(range(1, 10), k=30))
        num_thought, is_open, at = 0, False, 0
        while at < len(said):
            marker = tokens.end if is_open else tokens.start
            if tuple(said[at : at + len(marker)]) == marker:
                at, is_open = at + len(marker), not is_open
            else:
                at, num_thought = at + 1, num_thought + is_open
        assert num_thought <= budget


# --- in the engine -------------------------------------------------------------------------------


async def think(engine: AsyncLLMEngine, prompt: Any, budget: int | None, **fields: Any) -> Any:
    params = {"temperature": 0, "max_tokens": 28, "skip_special_tokens": False} | fields
    return await engine.generate(prompt, SamplingParams(thinking_token_budget=budget, **params))


def rendered(engine: AsyncLLMEngine) -> str:
    text: str = engine.tokenizer.render_chat(QUESTION, template_kwargs={"enable_thinking": True})
    return text


@pytest.mark.slow
@pytest.mark.parametrize("is_ahead", [True, False], ids=["ahead", "synchronous"])
def test_the_model_s_own_reasoning_is_cut_at_the_budget(is_ahead: bool) -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", **ENGINE, async_scheduling=is_ahead) as engine:
            start, end = (engine.tokenizer.encode(m, False)[0] for m in ("<think>", "</think>"))
            prompt = rendered(engine)
            free = (await think(engine, prompt, None)).outputs[0].token_ids
            assert free[0] == start, "the model does not think when it is asked to"
            natural = free.index(end) - 1
            assert natural > 3
            for budget in (0, 1, 3):
                cut = (await think(engine, prompt, budget)).outputs[0].token_ids
                assert cut[: budget + 1] == free[: budget + 1]
                assert cut[budget + 1] == end
                # The same where the prompt has opened the reasoning.
                ids = [*engine.tokenizer.encode(prompt, False), start]
                opened = (await think(engine, {"prompt_token_ids": ids}, budget)).outputs[0]
                assert opened.token_ids[: budget + 1] == [*free[1 : budget + 1], end]
            for budget in (natural, 1000, -1):
                assert (await think(engine, prompt, budget)).outputs[0].token_ids == free
            engine.check_idle()

    run(main())


def test_nothing_that_a_request_forbids_keeps_the_end_away() -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", **ENGINE) as engine:
            start, end = (engine.tokenizer.encode(m, False)[0] for m in ("<think>", "</think>"))
            ids = [*engine.tokenizer.encode(rendered(engine), False), start]
            cases: list[dict[str, Any]] = [
                {"allowed_token_ids": [300, 301]},
                {"logit_bias": {end: -100.0}},
                {"bad_words": ["</think>"]},
                {"temperature": 2.0, "seed": 1, "top_k": 1, "repetition_penalty": 5.0},
                {"logprobs": 2},
            ]
            for fields in cases:
                fields |= {"max_tokens": 6, "ignore_eos": True}
                output = await think(engine, {"prompt_token_ids": ids}, 2, **fields)
                assert output.outputs[0].token_ids[2] == end, fields
                assert output.outputs[0].finish_reason == "length"
            engine.check_idle()

    run(main())


def test_a_grammar_takes_over_where_the_reasoning_was_cut() -> None:
    async def main() -> None:
        async with AsyncLLMEngine("tiny", **ENGINE) as engine:
            after = ReasoningMarkers("</think>", begin="<think>")
            grammar = StructuredOutputsParams(regex="[0-9]{2}[.]", after=after)
            output = await think(engine, rendered(engine), 3, structured_outputs=grammar)
            text = output.outputs[0].text.removesuffix("<|im_end|>")
            reasoning, answer = text.split("</think>")
            num_tokens = len(engine.tokenizer.encode(reasoning.removeprefix("<think>"), False))
            assert reasoning.startswith("<think>") and num_tokens == 3
            assert re.fullmatch(r"\n{0,2}[0-9]{2}[.]", answer)
            assert output.outputs[0].finish_reason == "stop"
            engine.check_idle()

    run(main())


def test_a_grammar_without_reasoning_is_not_broken_by_its_end() -> None:
    """The prompt has opened reasoning, and the grammar holds from the first token on."""

    async def main() -> None:
        async with AsyncLLMEngine("tiny", **ENGINE) as engine:
            prompt = f"{rendered(engine)}<think>"
            grammar = StructuredOutputsParams(choice=["yes it is", "no it is not"])
            for budget in (0, 2):
                beside = think(engine, prompt, budget)
                held = think(engine, prompt, budget, structured_outputs=grammar)
                plain, output = await asyncio.gather(beside, held)
                assert output.outputs[0].text.removesuffix("<|im_end|>") in grammar.choice
                assert "</think>" in plain.outputs[0].text
            engine.check_idle()

    run(main())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_forked_and_beside_others_it_is_the_same(mode: str) -> None:
    async def main() -> None:
        tight = {"num_gpu_blocks_override": 12, "preemption_mode": mode, "max_model_len": 128}
        async with AsyncLLMEngine("tiny", **ENGINE | tight) as engine:
            end = engine.tokenizer.encode("</think>", False)[0]
            prompt = rendered(engine)
            fields: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 2, "ignore_eos": True}
            alone = (await think(engine, prompt, 4, **fields)).outputs
            for completion in alone:
                assert end in completion.token_ids[:6]
            plain = SamplingParams(seed=8, max_tokens=40, ignore_eos=True)
            plain_alone = (await engine.generate("Once upon", plain)).outputs

            async def neighbour() -> Any:
                return (await engine.generate("Once upon", plain)).outputs

            again, *others = await asyncio.gather(
                think(engine, prompt, 4, **fields), neighbour(), neighbour(), neighbour()
            )
            assert again.outputs == alone
            assert all(other == plain_alone for other in others)
            stats = engine.stats()
            assert stats.num_preemptions_swap + stats.num_preemptions_recompute > 0
            engine.check_idle()

    run(main())


def test_a_model_that_does_not_mark_its_reasoning_is_a_400() -> None:
    async def test() -> None:
        engine: Any = AsyncLLMEngine("tiny", **ENGINE, reasoning_parser="none")
        async with serving(engine) as server:
            body = {"messages": QUESTION, "thinking_token_budget": 5}
            status, answer = await server.post(CHAT, body)
            assert status == 400 and isinstance(answer, dict)
            assert answer["error"]["param"] == "thinking_token_budget"
            status, _ = await server.post(CHAT, body | {"thinking_token_budget": -1})
            assert status == 200

    run(test())


@pytest.mark.parametrize("budget", [-2, 1.5, True, "3", 2**64])
def test_bad_budgets_are_named(budget: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(thinking_token_budget=budget)
    assert caught.value.param == "thinking_token_budget"
