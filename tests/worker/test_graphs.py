"""Captured steps against eager ones, on the CPU: graphs are recordings (recorded_graph.py)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from asyncllm import (
    LLM,
    RequestFailedError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from asyncllm.attention.base import AttendRows, AttentionLayer, DecodeRows, PrefillRows
from asyncllm.attention.torch_native import TorchAttention
from asyncllm.config import EngineArgs
from asyncllm.engine import engine_steps
from asyncllm.graphs.decode_graphs import DecodeGraphs
from asyncllm.graphs.mixed_graphs import MixedGraphs
from asyncllm.graphs.pool import GraphPool, Outputs, Recorded
from asyncllm.graphs.sized_graphs import SizedGraphs
from asyncllm.models.layers.embedding import Embedding
from asyncllm.step_plan import StepKind, StepShape
from asyncllm.types import PADDING_SLOT
from asyncllm.worker import kernels, static_inputs, step_captures, worker
from asyncllm.worker.device_state import fill_decodes_torch
from asyncllm.worker.packed_step import PackedStep, SlotChanges
from tests.engine.builders import finish, make_request, make_scheduler
from tests.worker.recorded_graph import ForgetfulGraph, ForgetfulPool, RecordedGraph

ARGS: dict[str, Any] = {
    "num_gpu_blocks_override": 200,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 20,
    "max_model_len": 160,
    "swap_space": 0.01,
}
GRAPHED: dict[str, Any] = ARGS | {
    "prefill_graph_sizes": [4, 8, 16],  # steps of more are eager
    "cuda_graph_sizes": [4],
}
LONG = "What is the capital of France? " * 7  # several chunks
PROMPTS = ["Hi.", "What is 2 + 3?", LONG, f"{LONG} And of Japan?"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
FILTERED = SamplingParams(temperature=0.8, seed=5, top_k=20, top_p=0.9, max_tokens=6)
PENALISED = replace(FILTERED, frequency_penalty=0.8, presence_penalty=0.5, repetition_penalty=1.2)
FULL = SamplingParams(
    temperature=0.8, seed=5, top_k=20, repetition_penalty=1.3, logit_bias={101: 4.0}, max_tokens=6
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Recordings are of many small operations, which threads only slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on the CPU, of decodes as well."""
    monkeypatch.setattr(TorchAttention, "supports_graphs", True)
    monkeypatch.setattr(step_captures, "GraphPool", ForgetfulPool)


Replay = tuple[bool, StepShape]  # by a full graph, or by pieces


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """The graphs of steps with prefills that run, in order."""
    graphs: list[Replay] = []
    replay = MixedGraphs.replay

    def counted(self: MixedGraphs, shape: StepShape, *args: Any) -> None:
        graphs.append((self.is_full, shape))
        replay(self, shape, *args)

    monkeypatch.setattr(MixedGraphs, "replay", counted)
    return graphs


class TokenAttention:
    """A `StepAttention` in torch: each token is a row of its own, as a decode is.

    What a row reads is in tensors, and empty rows attend to the padding page.
    """

    max_decodes, max_prefills, max_pages = 3, 4, 100

    def __init__(self, attention: TorchAttention, max_tokens: int) -> None:
        self._attention = attention
        self._tables = torch.zeros(
            max_tokens, 10, dtype=torch.int32
        )  # as wide as the engine has them
        self._positions = torch.zeros(max_tokens, dtype=torch.int32)

    def prepare(self, num_decodes: int, prefills: PrefillRows) -> None:
        assert num_decodes <= self.max_decodes and len(prefills.kv_lens) <= self.max_prefills
        self._tables.zero_()
        self._positions.zero_()
        for row, kv_len in enumerate(prefills.kv_lens.tolist()):
            start, end = (prefills.query_indptr[row : row + 2] + num_decodes).tolist()
            pages = prefills.pages[0, slice(*prefills.page_indptr[row : row + 2].tolist())]
            self._tables[start:end, : len(pages)] = torch.from_numpy(pages)
            self._positions[start:end] = torch.arange(kv_len - (end - start), kv_len)

    def bind(self, decodes: DecodeRows | None, q: torch.Tensor, out: torch.Tensor) -> AttendRows:
        tables, positions = self._tables[: len(q)].clone(), self._positions[: len(q)].clone()
        if decodes is not None:
            rows, is_one = slice(len(decodes.positions)), decodes.positions >= 0
            tables[rows] = torch.where(is_one.unsqueeze(1), decodes.block_tables[0], tables[rows])
            positions[rows] = torch.where(is_one, decodes.positions, positions[rows])

        def attend(layer: AttentionLayer) -> None:
            each = DecodeRows((tables,), positions)
            self._attention.attend_decodes(each)(layer, q, out)

        return attend


@pytest.fixture
def whole(recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps are captured attention and all."""
    monkeypatch.setattr(
        TorchAttention, "step_attention", lambda self, most: TokenAttention(self, most)
    )


def answers(params: SamplingParams, **args: Any) -> list[RequestOutput]:
    """To all at once, then to each alone, with most of its prompt in the prefix cache."""
    with LLM("tiny", **args) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        for prompt in PROMPTS:
            outputs += llm.generate(prompt, params, use_tqdm=False)
        llm.engine.check_idle()
        return outputs


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [
        entry[token].logprob
        for output in outputs
        if output.prompt_logprobs is not None
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        if entry is not None
    ]


@pytest.mark.parametrize("kind", ["recorded", "whole"])
@pytest.mark.parametrize(
    "params",
    [GREEDY, FILTERED, PENALISED, FULL, SCORED],
    ids=["greedy", "filtered", "penalised", "full", "scored"],
)
def test_graphed_equals_eager(
    kind: str, params: SamplingParams, request: pytest.FixtureRequest, replayed: list[Replay]
) -> None:
    request.getfixturevalue(kind)
    ours = answers(params, **GRAPHED)
    kinds = {shape.kind for _, shape in replayed}
    assert len({shape.size for _, shape in replayed}) == 3
    # A request of one token never decodes.
    assert kinds == {StepKind.PREFILL} if params is SCORED else {StepKind.PREFILL, StepKind.MIXED}
    assert {is_full for is_full, _ in replayed} == {kind == "whole"}
    eager = answers(params, **ARGS, enforce_eager=True)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in eager]
    assert logprobs(ours) == pytest.approx(logprobs(eager), abs=1e-3)


MASKED = SamplingParams(
    temperature=0.8,
    seed=5,
    max_tokens=12,
    structured_outputs=StructuredOutputsParams(regex="[a-z ]{3,9}(one|two) [0-9]+"),
)


@pytest.mark.parametrize(
    ("params", "is_captured"),
    [
        (MASKED, True),
        (replace(MASKED, top_k=3), True),
        (replace(MASKED, logprobs=1), False),  # of tokens that eager sampling gives
        (replace(MASKED, presence_penalty=1.0), True),
        (GREEDY, False),
    ],
    ids=["drawn", "filtered", "logprobs", "penalised", "free"],
)
def test_masks_on_captured_steps_equal_eager(
    params: SamplingParams, is_captured: bool, recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counted(self: Recorded, replay: Any = Recorded.replay) -> Outputs:
        if len(self.outputs) == 1:  # tokens alone: those of decode steps come with logits
            sizes.append(len(self.outputs[0]))
        return replay(self)

    monkeypatch.setattr(Recorded, "replay", counted)
    ours = answers(params, **GRAPHED)
    assert bool(sizes) == is_captured and set(sizes) <= {4}  # of one row and of four
    eager = answers(params, **ARGS, enforce_eager=True)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in eager]


@pytest.mark.slow
def test_a_size_without_a_graph_for_masks_is_sampled_eagerly(
    recorded: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a capture for which there was no memory."""

    class Uncaptured(SizedGraphs[Recorded]):
        def add(self, size: int, captured: Recorded) -> None:
            return

    monkeypatch.setattr(step_captures, "SizedGraphs", Uncaptured)
    ours, eager = answers(MASKED, **GRAPHED), answers(MASKED, **ARGS, enforce_eager=True)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in eager]


@pytest.mark.slow
def test_some_rows_of_a_captured_step_are_masked(recorded: None) -> None:
    """Beside rows that are free, and the padding behind them."""
    params = [MASKED, replace(FILTERED, max_tokens=12), replace(MASKED, seed=6)]
    results = []
    for args in (GRAPHED, ARGS | {"enforce_eager": True}):
        with LLM("tiny", **args) as llm:
            outputs = llm.generate(PROMPTS[:3], params, use_tqdm=False)
            results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1]


@pytest.mark.parametrize(("records", "entries"), [(1, 6), (1, 2)])
@pytest.mark.parametrize("kind", ["eager", "recorded", "whole"])
def test_more_changes_of_slots_than_one_step_brings(
    kind: str,
    records: int,
    entries: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come in pieces, to the same end."""
    if kind != "eager":
        request.getfixturevalue(kind)
    expected = answers(FILTERED, **GRAPHED)
    monkeypatch.setattr(static_inputs, "MAX_RECORDS", records)
    monkeypatch.setattr(static_inputs, "MAX_ENTRIES", entries)
    split = SlotChanges.split
    pieces: list[int] = []

    def noted(self: SlotChanges, *limits: int) -> list[SlotChanges]:
        pieces.append(len(split(self, *limits)))
        return split(self, *limits)

    monkeypatch.setattr(SlotChanges, "split", noted)
    ours = answers(FILTERED, **GRAPHED)
    assert max(pieces) > 1
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.usefixtures("recorded")
def test_a_poisoned_prompt_spoils_no_other_by_its_padding(
    monkeypatch: pytest.MonkeyPatch, replayed: list[Replay]
) -> None:
    """A token without a finite embedding stays in the buffers that pad a shorter prompt."""
    poison, healthy = 77, list(range(11, 20))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    embed = Embedding.__call__

    def poisoned(self: Embedding, token_ids: torch.Tensor) -> torch.Tensor:
        return embed(self, token_ids).masked_fill((token_ids == poison).unsqueeze(1), torch.nan)

    monkeypatch.setattr(Embedding, "__call__", poisoned)

    def ask(llm: LLM, token_ids: list[int]) -> list[int]:
        prompt = {"prompt_token_ids": token_ids}
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids

    with LLM("tiny", **GRAPHED, enable_prefix_caching=False) as llm:
        expected = ask(llm, healthy)
        with pytest.raises(RequestFailedError, match="finite"):
            ask(llm, [*range(20, 35), poison])
        assert ask(llm, healthy) == expected
    assert replayed == [(False, StepShape(StepKind.PREFILL, 16))] * 3


@pytest.fixture
def graphed() -> Iterator[worker.Worker]:
    ours = worker.Worker(EngineArgs("tiny", **GRAPHED).create_engine_config())
    yield ours
    ours.close()


def test_a_start_reads_decodes_from_tables_as_wide_as_those_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outside of graphs the first step to do so would wait for the compiler."""
    widths: list[int] = []

    def fill(state: Any, *args: Any) -> DecodeRows:
        widths.append(state.block_tables.shape[2])
        return fill_decodes_torch(state, *args)

    monkeypatch.setattr(kernels, "fill_decodes_torch", fill)
    worker.Worker(EngineArgs("tiny", **ARGS, enforce_eager=True).create_engine_config()).close()
    assert widths == [10]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "recorded", "whole"])
def test_a_closed_worker_gives_its_memory_back(kind: str, request: pytest.FixtureRequest) -> None:
    """At once: a server's collector comes rarely."""
    if kind != "eager":
        request.getfixturevalue(kind)
    ours = worker.Worker(EngineArgs("tiny", **GRAPHED).create_engine_config())
    pages = [weakref.ref(layer) for layer in ours.runner._cache.layers]
    gc.collect()
    gc.disable()
    try:
        ours.close()
        assert [layer() for layer in pages] == [None] * len(pages)
    finally:
        gc.enable()


def run_rows(ours: worker.Worker, page: int, start: int, *lens: int) -> torch.Tensor:
    """Hidden states of prompts of so many tokens on `page` and the next, computed from `start`."""
    num_tokens = sum(lens)
    ends, num_rows = np.cumsum([0, *lens], dtype=np.int32), len(lens)
    pages = np.arange(page, page + num_rows, dtype=np.int32)
    positions = np.concatenate([np.arange(start, start + n) for n in lens])
    slots = pages.repeat(lens) * 16 + positions
    ids = np.arange(start + 1, start + num_tokens + 1)
    nothing = np.zeros(0, np.int32)
    step = PackedStep(
        decode_slots=nothing,
        decode_positions=nothing,
        sampled_slots=nothing,
        tokens=np.stack((ids, positions, np.full(num_tokens, 9), slots)).astype(np.int32),
        samples=np.zeros((3, 0), np.int32),
        prefills=PrefillRows(
            ends,
            np.array(lens, np.int32) + start,
            np.arange(num_rows + 1, dtype=np.int32),
            pages[None],
        ),
    )
    mixed = ours.runner.mixed
    return mixed.forward(step, mixed.graph_shape(step))[:num_tokens].clone()


@pytest.mark.usefixtures("whole")
@torch.inference_mode()
def test_a_step_that_attention_does_not_take_is_eager(
    graphed: worker.Worker, replayed: list[Replay]
) -> None:
    run_rows(graphed, 3, 0, 1, 1, 1, 2)
    assert replayed == [(True, StepShape(StepKind.PREFILL, 8))]
    run_rows(graphed, 3, 0, 1, 1, 1, 1, 1)  # a row too many
    run_rows(graphed, 3, 0, 9, 8)  # a token too many
    assert len(replayed) == 1


class Launched(TorchDispatchMode):
    """torch's operations, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("whole")
@torch.inference_mode()
def test_a_captured_step_with_prompts_is_one_copy_and_two_replays(
    graphed: worker.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences take slots, one goes on to a new page; what attention prepares is not counted."""
    runner = graphed.runner
    scheduler = make_scheduler(100, 16, max_num_seqs=4, max_num_batched_tokens=16)
    launched = Launched()
    monkeypatch.setattr(TokenAttention, "prepare", lambda *args: None)
    monkeypatch.setattr(ForgetfulGraph, "replay", lambda self: launched.names.append("replay"))
    for number, prompt in enumerate((range(11, 27), range(5, 8))):
        scheduler.add(make_request(number, prompt, max_tokens=9))
        plan = scheduler.plan()
        assert plan is not None
        inputs = runner.packer.pack(plan)
        assert inputs.has_prompts
        graph = runner.mixed.graph_shape(inputs)
        assert graph is not None
        launched.names.clear()
        with launched:
            runner._sampling.run(inputs, plan, runner._forward(inputs, graph))
        # The last is the CPU's way to fetch the tokens.
        assert launched.names == ["aten.copy_.default", "replay", "replay", "aten.slice.Tensor"]
        finish(scheduler, plan)
    assert plan.slot_inits and plan.page_appends and plan.decodes


@pytest.mark.usefixtures("whole")
@torch.inference_mode()
def test_captured_decodes_are_told_what_changed(
    graphed: worker.Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing; who decodes; new pages, too."""
    runner, launched = graphed.runner, Launched()
    scheduler = make_scheduler(100, 16, max_num_seqs=4, max_num_batched_tokens=16)
    monkeypatch.setattr(ForgetfulGraph, "replay", lambda self: launched.names.append("replay"))
    for number, prompt in enumerate((range(11, 18), range(5, 8))):
        scheduler.add(make_request(number, prompt, max_tokens=20))
    found = []
    while plan := scheduler.plan():
        inputs = runner.packer.pack(plan)
        launched.names.clear()
        if not inputs.has_prompts:
            with launched:
                runner._sampling.run(inputs, plan, runner._forward(inputs, None))
            assert launched.names.pop() == "aten.slice.Tensor"
            found.append((len(plan.decodes), len(plan.page_appends), tuple(launched.names)))
        finish(scheduler, plan)
    copy, replay = "aten.copy_.default", "replay"
    assert set(found) == {
        (2, 0, (copy, replay)),
        (2, 0, (replay,)),
        (2, 1, (copy, replay, replay)),
    }
    assert found.count((2, 0, (copy, replay))) == 1


@pytest.mark.parametrize("captured", ["decodes", "prefills", "samples"])
@pytest.mark.parametrize("kind", ["recorded", "whole"])
def test_a_later_capture_writes_to_no_page_that_was_used(
    kind: str, captured: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory that the last step read is another's, or nobody's, when the engine is idle."""
    request.getfixturevalue(kind)
    monkeypatch.setattr(engine_steps, "QUIET_SECONDS", 600.0)  # the capture is ours
    args = ARGS | {"cuda_graph_sizes": [2, 3, 4], "prefill_graph_sizes": [4, 12, 20]}
    prompts: Any = [{"prompt_token_ids": list(range(11, n))} for n in (60, 30)]
    params = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True)
    with LLM("tiny", **args) as llm:
        ours = llm.engine._running().worker
        runner = ours.runner
        outputs = llm.generate(prompts, params, use_tqdm=False)
        pages = [layer[1:].clone() for layer in runner._cache.layers]
        graphs: Any = {
            "decodes": runner.graphs,
            "prefills": runner.mixed.graphs,
        }
        with torch.inference_mode():
            if captured == "samples":
                runner.mixed.capture_sampling(3, ours._captures._pool)
            else:
                graphs[captured].capture({"prefills": 12}.get(captured, 3))
        for layer, before in zip(runner._cache.layers, pages, strict=True):
            assert torch.equal(layer[1:], before)
        again = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]


@pytest.mark.usefixtures("recorded")
@torch.inference_mode()
def test_padding_is_written_to_the_padding_page(graphed: worker.Worker) -> None:
    run_rows(graphed, 3, 0, 8)
    run_rows(graphed, 7, 1, 5)
    inputs = graphed.runner.inputs
    assert inputs.write_slots[0, :8].tolist() == [113, 114, 115, 116, 117, 0, 0, 0]
    assert inputs.slots[:8].tolist() == [9, 9, 9, 9, 9, *[PADDING_SLOT] * 3]


@pytest.mark.usefixtures("recorded")
@torch.inference_mode()
def test_what_is_measured_takes_experts_as_sequences_do(graphed: worker.Worker) -> None:
    """Padding takes none where engines share them."""
    graphed.runner.run_padding(5)
    assert (graphed.runner.mixed.token_slots[:5] != PADDING_SLOT).all()


def test_a_capture_that_fails_is_ended_and_may_be_repeated() -> None:
    calls = 0

    def step(slots: torch.Tensor) -> tuple[torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == 2:  # the first warms up
            raise MemoryError
        return (slots + 1,)

    slots = torch.zeros(4, dtype=torch.int32)
    graphs = DecodeGraphs(step, slots, GraphPool(RecordedGraph, clear=slots.zero_))
    with pytest.raises(MemoryError):
        graphs.capture(4)
    assert RecordedGraph.open == 0 and gc.isenabled()
    assert graphs.fitting(1) is None
    graphs.capture(4)
    slots[0] = 5
    assert graphs.fitting(1) == 4
    assert graphs[4].replay()[0].tolist() == [6, 1, 1, 1]
