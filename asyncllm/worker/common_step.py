"""The step that engines run together, if they share experts.

A mixture layer makes calls to the other engines with as many rows as the step has. So all engines
run a step of the same shape, by the same graph (which NCCL requires) or eagerly. The shape is the
smallest that holds the needs of all engines. Each engine pads its own step to it: with rows of slot
0, or with prompts on page 0, each as long as a sequence may be. All engines compute the same from
the same needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from asyncllm.attention.base import PrefillRows
from asyncllm.step_plan import CommonStep, StepKind, StepNeed, StepPlan, StepShape
from asyncllm.types import PADDING_SLOT
from asyncllm.worker.model_runner import ModelRunner
from asyncllm.worker.packed_step import PackedStep


class CommonSteps:
    """Packs and pads one engine's plans to steps of all engines. max_prompt_tokens: as for
    `padded`."""

    def __init__(self, runner: ModelRunner, max_prompt_tokens: int) -> None:
        self._runner, self._max_prompt_tokens = runner, max_prompt_tokens

    def pack(self, plan: StepPlan) -> PackedStep:
        """To be called right after planning: sequences may end while the engines agree."""
        return self._runner.packer.pack(plan)

    def need(self, step: PackedStep) -> StepNeed:
        graphs, prefills = self._runner.mixed.graphs, step.prefills
        num_decodes = len(step.decode_slots)
        # If the step has no prompt, it may get one of padding.
        num_prefills, num_pages = len(prefills.kv_lens) or 1, int(prefills.page_indptr[-1]) or 1
        fits = graphs is None or graphs.takes(num_decodes, num_prefills, num_pages)
        return StepNeed(num_decodes, prefills.num_tokens, step.adapters, fits)

    def pad(self, step: PackedStep, needs: Sequence[StepNeed]) -> PackedStep:
        """needs: of all engines, including this one's."""
        common = common_step(needs, self._graph_size)
        return padded(step, common, self._runner.padding_prompt, self._max_prompt_tokens)

    def _graph_size(self, shape: StepShape) -> int | None:
        runner, mixed = self._runner, self._runner.mixed.graphs
        if shape.kind is not StepKind.DECODE:
            return None if mixed is None else mixed.fitting_size(shape)
        graphs = runner.adapter_graphs if shape.adapters else runner.graphs
        return None if graphs is None else graphs.fitting(shape.size)


def common_step(
    needs: Sequence[StepNeed], graph_size: Callable[[StepShape], int | None]
) -> CommonStep:
    """The smallest step for all needs, of which at least one has tokens. graph_size: the size of
    the smallest graph for a shape, or None; the same on all engines."""
    most_decodes = max(need.num_decodes for need in needs)
    adapters = any(need.adapters for need in needs)
    if any(need.num_prompt_tokens for need in needs):
        kind = StepKind.MIXED if most_decodes else StepKind.PREFILL
        # An engine without a prompt gets one of padding.
        size = max(need.num_decodes + max(need.num_prompt_tokens, 1) for need in needs)
        may_fit = all(need.fits_graph for need in needs)
    else:
        kind, size, may_fit = StepKind.DECODE, most_decodes, True
    assert size, "no engine needs a step"
    shape = StepShape(kind, size, adapters)
    found = graph_size(shape) if may_fit else None
    return CommonStep(shape if found is None else shape._replace(size=found), found is not None)


def padded(
    step: PackedStep,
    common: CommonStep,
    padding_prompt: Callable[[int], PackedStep],
    max_prompt_tokens: int,
) -> PackedStep:
    """One engine's step, padded to be of the kind of `common`, and of its size if it is eager: a
    graph pads by itself. padding_prompt: makes a prompt of a number of tokens, which may be at most
    `max_prompt_tokens`: there are no rotations of later positions."""
    step = step._replace(common=common, adapters=common.shape.adapters)
    num_tokens = len(step.decode_slots) + step.prefills.num_tokens
    num_missing = 0 if common.in_graph else common.shape.size - num_tokens
    if common.shape.kind is StepKind.DECODE:
        num_missing = num_missing or int(not num_tokens)
        return _with_rows(step, num_missing) if num_missing else step
    num_missing = num_missing or int(not step.has_prompts)
    for start in range(0, num_missing, max_prompt_tokens):
        num_tokens = min(num_missing - start, max_prompt_tokens)
        step = _with_prompt(step, padding_prompt(num_tokens))
    return step


def _with_rows(step: PackedStep, num_rows: int) -> PackedStep:
    slots = np.full(num_rows, PADDING_SLOT, np.int32)
    return step._replace(
        decode_slots=np.concatenate((step.decode_slots, slots)),
        decode_positions=np.concatenate((step.decode_positions, np.zeros_like(slots))),
        num_padding=num_rows,
    )


def _with_prompt(step: PackedStep, padding: PackedStep) -> PackedStep:
    """Append a prompt. If the step had none, only its decodes sample."""
    slots, positions = step.decode_slots, step.decode_positions
    tokens, prefills, samples = padding.tokens, padding.prefills, step.samples
    if step.has_prompts:
        tokens = np.concatenate((step.tokens, tokens), axis=1)
        prefills = _joined(step.prefills, prefills)
    else:
        samples = np.stack((np.arange(len(slots), dtype=np.int32), slots, positions + 1))
    num_padding = step.num_padding + padding.tokens.shape[1]
    return step._replace(tokens=tokens, samples=samples, prefills=prefills, num_padding=num_padding)


def _joined(rows: PrefillRows, more: PrefillRows) -> PrefillRows:
    def ends(of_rows: np.ndarray, of_more: np.ndarray) -> np.ndarray:
        return np.concatenate((of_rows, of_rows[-1] + of_more[1:]))

    return PrefillRows(
        ends(rows.query_indptr, more.query_indptr),
        np.concatenate((rows.kv_lens, more.kv_lens)),
        ends(rows.page_indptr, more.page_indptr),
        np.concatenate((rows.pages, more.pages), axis=1),
        np.concatenate((rows.slots, more.slots)),
        rows.saves,
    )
