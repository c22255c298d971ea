"""Beams equal those of transformers' generate, tokens and scores, however the engine pages them.

Random checkpoints, float32 on the CPU: with memory to spare, and with so little that beams of one
request cannot all run at once.
"""

from __future__ import annotations

import asyncio
import random
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from asyncllm import (
    LLM,
    AsyncLLMEngine,
    BeamSearchParams,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
)
from asyncllm.engine import beam_search
from asyncllm.engine.beam_search import BeamSearchClient
from tests.models.tiny_checkpoints import CONFIGS, VOCAB_SIZE, random_reference
from tests.waiting import PATIENCE_SECONDS

NAME = "llama"
NUM_TOKENS = 14
STOPS = [3, 11, 40, 41, 42]  # many, so that beams end early
SCORE_TOLERANCE = 1e-3
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 400, "block_size": 4, "swap_space": 0.001}
# A prompt of 23 and 14 tokens take 10 pages: fewer than two beams that share nothing at the end.
TIGHT: dict[str, Any] = ROOMY | {"num_gpu_blocks_override": 14}
REGIMES: dict[str, dict[str, Any]] = {
    "roomy": ROOMY,
    "synchronous": ROOMY | {"async_scheduling": False},
    "few-slots": ROOMY | {"max_num_seqs": 2, "max_num_batched_tokens": 7},
    "no-prefix-cache": ROOMY | {"enable_prefix_caching": False},
    "swap": TIGHT | {"preemption_mode": "swap"},
    "recompute": TIGHT | {"preemption_mode": "recompute"},
    "swap-synchronous": TIGHT | {"preemption_mode": "swap", "async_scheduling": False},
}
SEARCHES: dict[str, dict[str, Any]] = {
    "plain": {"n": 3},
    "wide": {"n": 2, "best_of": 12},
    "long": {"n": 4, "length_penalty": 2.0},
    "long-never": {"n": 4, "length_penalty": 2.0, "early_stopping": "never"},
    "short-never": {"n": 4, "length_penalty": -1.0, "early_stopping": "never"},
    "unscaled": {"n": 4, "length_penalty": 0.0},
    "first-four": {"n": 4, "early_stopping": True},
    "one": {"n": 1},
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(17)]
    return [shared + [rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 6)] + [[7]]


class Reference:
    """A checkpoint, and transformers' beams for each prompt and search."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prompts = make_prompts()
        with torch.inference_mode():
            self._model = random_reference(CONFIGS[NAME])
            self._model.save_pretrained(folder)
        self.beams = cache(self._beams)

    def _beams(self, search: str, max_tokens: int) -> list[list[tuple[list[int], float]]]:
        """Per prompt the best first: tokens (the stop token too) and score."""
        return [self._generate(prompt, SEARCHES[search], max_tokens) for prompt in self.prompts]

    @torch.inference_mode()
    def _generate(
        self, prompt: list[int], search: dict[str, Any], max_tokens: int
    ) -> list[tuple[list[int], float]]:
        padding = VOCAB_SIZE - 1
        output = self._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=search.get("best_of", search["n"]),
            num_return_sequences=search["n"],
            length_penalty=search.get("length_penalty", 1.0),
            early_stopping=search.get("early_stopping", False),
            max_new_tokens=max_tokens,
            eos_token_id=STOPS,
            pad_token_id=padding,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        if search.get("best_of", search["n"]) == 1:  # transformers calls that greedy: no scores
            steps = [scores[0].log_softmax(0).max().item() for scores in output.scores]
            tokens = output.sequences[0, len(prompt) :].tolist()
            return [(tokens, sum(steps) / len(tokens))]
        beams = []
        for row, score in zip(output.sequences, output.sequences_scores.tolist(), strict=True):
            tokens = row[len(prompt) :].tolist()
            ends = [i + 1 for i, token in enumerate(tokens) if token in STOPS]
            beams.append((tokens[: ends[0]] if ends else tokens, score))
        return beams


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    torch.set_num_threads(1)
    return Reference(tmp_path_factory.mktemp(NAME))


def params_of(search: str, **more: Any) -> SamplingParams:
    return SamplingParams(
        **SEARCHES[search] | {"max_tokens": NUM_TOKENS} | more,
        use_beam_search=True,
        stop_token_ids=STOPS,
        detokenize=False,
    )


def check(output: RequestOutput, search: str, expected: list[tuple[list[int], float]]) -> None:
    assert [answer.token_ids for answer in output.outputs] == [tokens for tokens, _ in expected]
    penalty = SEARCHES[search].get("length_penalty", 1.0)
    for answer, (tokens, score) in zip(output.outputs, expected, strict=True):
        assert answer.cumulative_logprob is not None
        ours = answer.cumulative_logprob / len(tokens) ** penalty
        assert ours == pytest.approx(score, abs=SCORE_TOLERANCE * len(tokens) ** -min(penalty, 0))
        assert answer.finish_reason == ("stop" if tokens[-1] in STOPS else "length")
        assert answer.stop_reason == (tokens[-1] if tokens[-1] in STOPS else None)


async def run_engine(reference: Reference, regime: dict[str, Any], searches: list[str]) -> Any:
    """All searches of all prompts at once, beside greedy answers; outputs and final stats."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False)
    engine = AsyncLLMEngine(str(reference.folder), skip_tokenizer_init=True, **regime)
    async with engine:
        alone = [await engine.generate(prompt, greedy) for prompt in reference.prompts]
        outputs = await asyncio.gather(
            *(engine.generate(prompt, greedy) for prompt in reference.prompts),
            *(
                engine.generate(prompt, params_of(search))
                for search in searches
                for prompt in reference.prompts
            ),
        )
        for output, expected in zip(outputs, alone, strict=False):
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        engine.check_integrity()
        engine.check_idle()
        return outputs[len(alone) :], engine.stats()


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_beams_equal(regime: str, reference: Reference) -> None:
    searches = list(SEARCHES) if regime == "roomy" else ["plain", "long-never"]
    outputs, stats = asyncio.run(run_engine(reference, REGIMES[regime], searches))
    expected = [(s, beams) for s in searches for beams in reference.beams(s, NUM_TOKENS)]
    for output, (search, beams) in zip(outputs, expected, strict=True):
        check(output, search, beams)
    if "swap" in regime:
        assert stats.num_preemptions_swap > 0
    if "recompute" in regime:
        assert stats.num_preemptions_recompute > 0


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_the_shortest_searches(max_tokens: int, reference: Reference) -> None:
    async def work() -> None:
        engine = AsyncLLMEngine(str(reference.folder), skip_tokenizer_init=True, **ROOMY)
        async with engine:
            for search in ("plain", "first-four", "long-never"):
                expected = reference.beams(search, max_tokens)
                for prompt, beams in zip(reference.prompts, expected, strict=True):
                    params = params_of(search, max_tokens=max_tokens)
                    check(await engine.generate(prompt, params), search, beams)
            engine.check_idle()

    asyncio.run(work())


def test_logprobs_of_beams_are_those_of_their_tokens(reference: Reference) -> None:
    async def work() -> None:
        engine = AsyncLLMEngine(str(reference.folder), skip_tokenizer_init=True, **ROOMY)
        async with engine:
            params = params_of("plain", logprobs=2, prompt_logprobs=1)
            output = await engine.generate(reference.prompts[1], params)
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(reference.prompts[1])
            for answer in output.outputs:
                rescored = await engine.generate(
                    reference.prompts[1] + answer.token_ids,
                    SamplingParams(prompt_logprobs=2, max_tokens=1, detokenize=False),
                )
                assert rescored.prompt_logprobs is not None and answer.logprobs is not None
                expected = rescored.prompt_logprobs[len(reference.prompts[1]) :]
                for ours, theirs in zip(answer.logprobs, expected, strict=True):
                    assert theirs is not None and list(ours) == list(theirs)
                    for token_id, logprob in ours.items():
                        right = pytest.approx(theirs[token_id].logprob, abs=SCORE_TOLERANCE)
                        assert logprob.logprob == right
                        assert logprob.rank == theirs[token_id].rank

    asyncio.run(work())


def test_an_abort_frees_all_beams_at_once(reference: Reference) -> None:
    async def work() -> None:
        engine = AsyncLLMEngine(str(reference.folder), skip_tokenizer_init=True, **ROOMY)
        async with engine:
            params = params_of("wide", max_tokens=30)
            searching = asyncio.ensure_future(engine.generate([1, 2, 3], params, "searching"))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while engine.stats().num_running != 12:  # noqa: ASYNC110 (it is so for a while)
                    await asyncio.sleep(0)
            engine.abort("searching")
            engine.check_idle()
            output = await searching
            assert [answer.finish_reason for answer in output.outputs] == ["abort", "abort"]

    asyncio.run(work())


@pytest.mark.parametrize("num_turns", [0, 1, 3, 4])
def test_an_abort_while_the_answers_are_delivered(
    num_turns: int, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first of them, or after some turns of the loop; the task of it just ends."""
    deliveries: list[asyncio.Task[None]] = []
    monkeypatch.setattr(beam_search, "TOKENS_PER_TURN", 2)

    async def work() -> None:
        engine = AsyncLLMEngine(str(reference.folder), skip_tokenizer_init=True, **ROOMY)
        deliver = BeamSearchClient._deliver

        async def noted(self: BeamSearchClient) -> None:
            deliveries.append(cast(asyncio.Task[None], asyncio.current_task()))
            if num_turns == 0:
                engine.abort("searching")
            else:
                later(num_turns)
            await deliver(self)

        def later(turns: int) -> None:
            again = partial(later, turns - 1) if turns > 1 else partial(engine.abort, "searching")
            asyncio.get_running_loop().call_soon(again)

        monkeypatch.setattr(BeamSearchClient, "_deliver", noted)
        async with engine:
            params = params_of("wide", max_tokens=7)
            output = await engine.generate([1, 2, 3], params, "searching")
            assert "abort" in {answer.finish_reason for answer in output.outputs}
            (delivery,) = deliveries
            async with asyncio.timeout(PATIENCE_SECONDS):
                await delivery  # raises nothing
            engine.check_idle()

    asyncio.run(work())


def test_offline_as_in_vllm() -> None:
    with LLM("tiny", num_gpu_blocks_override=300) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=8, temperature=0.0)
        text, ids = llm.beam_search(["Once upon a", [5, 6, 7]], params)
        again = llm.beam_search("Once upon a", BeamSearchParams(beam_width=1, max_tokens=8))
        greedy = llm.generate("Once upon a", SamplingParams(temperature=0, max_tokens=8))
    best = text.sequences[0]
    assert len(text.sequences) == len(ids.sequences) == 3
    assert best.text.startswith("Once upon a") and len(best.text) > len("Once upon a")
    assert ids.sequences[0].tokens[:3] == [5, 6, 7]
    scores = [beam.score for beam in text.sequences]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
    num_new = len(best.tokens) - len(greedy[0].prompt_token_ids)
    assert best.score == pytest.approx(best.cum_logprob / num_new)
    assert again[0].sequences[0].text == "Once upon a" + greedy[0].outputs[0].text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"n": 2, "stop": "x"}, "stop"),
        ({"n": 2, "logit_bias": {1: 1.0}}, "logit_bias"),
        ({"n": 2, "min_tokens": 2}, "min_tokens"),
        ({"n": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"n": 2, "early_stopping": "always"}, "early_stopping"),
        ({"n": 2, "early_stopping": 1}, "early_stopping"),
        ({"n": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"n": 2, "length_penalty": 10.5}, "length_penalty"),
        ({"n": 129}, "n"),
        ({"n": 2, "best_of": 129}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 2, "use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_cannot_be_searched_is_refused(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{"use_beam_search": True} | given)
    assert caught.value.param == param


def test_limits_are_met() -> None:
    SamplingParams(n=128, use_beam_search=True, length_penalty=-10.0, early_stopping="never")
    SamplingParams(n=1, best_of=128)
    with pytest.raises(InvalidRequestError, match="beam_width"):
        BeamSearchParams(beam_width=0, max_tokens=1).sampling_params()


def test_a_search_wider_than_the_vocabulary_is_refused(reference: Reference) -> None:
    async def work() -> None:
        engine = AsyncLLMEngine(str(reference.folder), skip_tokenizer_init=True, **ROOMY)
        async with engine:
            widest = VOCAB_SIZE - len(STOPS)
            params = params_of("one", n=widest, max_tokens=2)
            assert len((await engine.generate([1], params)).outputs) == widest
            with pytest.raises(InvalidRequestError) as caught:
                await engine.generate([1], params_of("one", n=widest + 1))
            assert caught.value.param == "n"
            engine.check_idle()

    asyncio.run(work())
