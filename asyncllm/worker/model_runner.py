"""One step on the device: a `StepPlan` in, launched work out.

`launch` packs the plan on the host and submits `_run` to the executor, which enqueues, in order:
page moves, state changes, forward pass, sampling, the copies back. Nothing in `_run` waits for the
device. A step of decodes only is `decode_step`, eager or from a graph: the same function.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, DecodeRows, PrefillRows
from asyncllm.attention.kv_cache import KVCache
from asyncllm.graphs.decode_graphs import DecodeGraphs
from asyncllm.models.base import CausalLM
from asyncllm.types import PADDING_PAGE, StepPlan, StepResult, TokenLogprobs
from asyncllm.worker.device_state import DeviceState
from asyncllm.worker.executor import Collect, Executor, LaunchedStep
from asyncllm.worker.sampler import LogprobTensors, Sampler, gather_logprobs
from asyncllm.worker.slot_sampling import PLAIN, Arrays
from asyncllm.worker.staging import Staging
from asyncllm.worker.step_inputs import PromptLogprobs, StepBuilder, StepInputs
from asyncllm.worker.work_counts import WorkCounts

Tensors = dict[str, torch.Tensor]
PROMPT_LOGPROB_ROWS = 128  # rows of logits at once, for prompt logprobs


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step's forward pass and sampling gave, on the device."""

    tokens: torch.Tensor  # int32 [rows]
    logits: torch.Tensor  # [rows, V], raw


class ModelRunner:
    def __init__(
        self,
        *,
        model: CausalLM,
        cache: KVCache,
        attention: AttentionBackend,
        state: DeviceState,
        sampler: Sampler,
        executor: Executor,
        builder: StepBuilder,
        device: torch.device,
    ) -> None:
        self._model = model
        self._cache = cache
        self._attention = attention
        self._state = state
        self._sampler = sampler
        self._executor = executor
        self._builder = builder
        self._staging = Staging(device)
        self._pinned = device.type == "cuda"
        self.graphs: DecodeGraphs | None = None
        self.work = WorkCounts()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Give the step to the device. The plan's effects are as if it were done already."""
        inputs = self._builder.build(plan)
        return self._executor.submit(lambda: self._run(inputs))

    def warm_up(self, num_tokens: int) -> None:
        """A prefill of `num_tokens` on the padding page and slot, on the current stream.

        Kernels are compiled and loaded at first use: here, not under somebody's first request.
        """
        num_pages = -(-num_tokens // self._cache.block_size)
        prefills = PrefillRows(
            query_indptr=np.array([0, num_tokens], np.int32),
            kv_lens=np.array([num_tokens], np.int32),
            page_indptr=np.array([0, num_pages], np.int32),
            pages=np.full(num_pages, PADDING_PAGE, np.int32),
        )
        slots = torch.zeros(num_tokens, dtype=torch.int32, device=self._state.positions.device)
        hidden = self._model.forward(
            slots,
            torch.arange(num_tokens, dtype=torch.int32, device=slots.device),
            slots + num_tokens if self._model.uses_prompt_lens else None,
            self._attention.mixed(None, prefills, slots.long()),
        )
        logits = self._model.compute_logits(hidden[-1:])
        self._sampler.plain(logits, slots[:1], slots[:1])

    # --- on the stream -----------------------------------------------------------------------

    def _run(self, inputs: StepInputs) -> Collect:
        plan = inputs.plan
        self._cache.swap_out(plan.swap_out)
        self._cache.copy_pages(plan.page_copies)
        self._cache.swap_in(plan.swap_in)
        if inputs.prefills is not None:
            sampled, prompt_logprobs = self._mixed_step(inputs)
        elif plan.decodes:
            sampled, prompt_logprobs = self._decode_only(inputs), []
        else:  # swaps alone
            return lambda: StepResult([])
        return self._fetch(inputs, sampled, prompt_logprobs)

    def _decode_only(self, inputs: StepInputs) -> Sampled:
        graphs, num_rows = self.graphs, len(inputs.decode_slots)
        padded = graphs.padded_slots(inputs.decode_slots) if graphs is not None else None
        self.work.ran("decode", num_rows, None if padded is None else len(padded))
        if graphs is None or padded is None:
            tensors = self._upload({**inputs.arrays, "decode_slots": inputs.decode_slots})
            slots = tensors["decode_slots"]
            tokens, logits = self.decode_step(slots, inputs.max_decode_len)
        else:
            arrays = dict(inputs.arrays)
            if not graphs.holds(padded):
                arrays["decode_slots"] = padded
            tensors = self._upload(arrays)
            if "decode_slots" in tensors:
                graphs.set_slots(padded, tensors["decode_slots"])
            tokens, logits = (output[:num_rows] for output in graphs.replay(padded))
            slots = graphs.slots[:num_rows]
        if inputs.features & ~PLAIN:
            positions = self._state.positions[slots]  # decode_step moved them to the new tokens
            tokens = self._sample_full(inputs, tensors, logits, slots, positions)
        return Sampled(tokens, logits)

    def decode_step(
        self, slots: torch.Tensor, max_len: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each of `slots` int32 [rows], from and to the device state. Capturable.

        Returns plainly sampled tokens int32 [rows] and logits [rows, V]. `max_len`: the longest
        context, for backends that want it on the host; None under capture.
        """
        state = self._state
        positions = state.positions[slots]
        rows = DecodeRows(state.block_tables[slots], positions, max_len)
        prompt_lens = state.prompt_lens[slots] if self._model.uses_prompt_lens else None
        hidden = self._model.forward(
            state.last_tokens[slots], positions, prompt_lens, self._attention.decode(rows)
        )
        logits = self._model.compute_logits(hidden)
        tokens = self._sampler.plain(logits, slots, positions + 1)
        state.advance(slots, tokens, positions + 1)
        return tokens, logits

    def _mixed_step(self, inputs: StepInputs) -> tuple[Sampled, list[LogprobTensors]]:
        """Prefill chunks, and the decodes beside them, in one forward pass."""
        state, prefills = self._state, inputs.prefills
        assert prefills is not None
        self.work.ran("mixed", inputs.plan.num_tokens)
        tensors = self._upload(inputs.arrays)
        token_ids, positions = tensors["prefill_tokens"], tensors["prefill_positions"]
        prompt_lens = tensors["prefill_prompt_lens"]
        decodes = None
        if len(inputs.decode_slots):
            slots = tensors["decode_slots"]
            decodes = DecodeRows(
                state.block_tables[slots], state.positions[slots], inputs.max_decode_len
            )
            token_ids = torch.cat([state.last_tokens[slots], token_ids])
            positions = torch.cat([decodes.positions, positions])
            prompt_lens = torch.cat([state.prompt_lens[slots], prompt_lens])
        hidden = self._model.forward(
            token_ids,
            positions,
            prompt_lens if self._model.uses_prompt_lens else None,
            self._attention.mixed(decodes, prefills, tensors["write_slots"]),
        )
        prompt_logprobs = [
            logprobs
            for wanted in inputs.prompt_logprobs
            for logprobs in self._prompt_logprobs(hidden, wanted, tensors)
        ]
        logits = self._model.compute_logits(hidden[tensors["sample_tokens"]])
        slots, positions = tensors["sample_slots"], tensors["sample_positions"]
        if not len(logits):  # no prefill reached its last chunk
            return Sampled(slots, logits), prompt_logprobs
        if inputs.features & ~PLAIN:
            tokens = self._sample_full(inputs, tensors, logits, slots, positions)
        else:
            tokens = self._sampler.plain(logits, slots, positions)
            state.advance(slots, tokens, positions)
        return Sampled(tokens, logits), prompt_logprobs

    def _sample_full(
        self,
        inputs: StepInputs,
        tensors: Tensors,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        tokens = self._sampler.full(logits, slots, positions, inputs.features, tensors)
        self._state.advance(slots, tokens, positions)
        return tokens

    def _prompt_logprobs(
        self, hidden: torch.Tensor, wanted: PromptLogprobs, tensors: Tensors
    ) -> list[LogprobTensors]:
        """In pieces: logits of a whole prompt would not fit beside the KV cache."""
        targets = tensors[wanted.array_name]
        pieces = []
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            piece = targets[start : start + PROMPT_LOGPROB_ROWS]
            first = wanted.first_token + start
            logits = self._model.compute_logits(hidden[first : first + len(piece)])
            pieces.append(gather_logprobs(logits, piece, wanted.num_top))
        return pieces

    def _upload(self, arrays: Arrays) -> Tensors:
        tensors = self._staging.upload(arrays)
        self._state.apply(tensors)
        return tensors

    # --- back to the host --------------------------------------------------------------------

    def _fetch(
        self, inputs: StepInputs, sampled: Sampled, prompt_logprobs: list[LogprobTensors]
    ) -> Collect:
        """Enqueue the copies back; the returned function reads them after the step's end."""
        token_ids = self._to_host(sampled.tokens)
        logprobs = None
        if inputs.wants_logprobs:
            tensors = gather_logprobs(sampled.logits, sampled.tokens, inputs.num_logprobs)
            logprobs = self._logprobs_to_host(tensors)
        prompt = [self._logprobs_to_host(tensors) for tensors in prompt_logprobs]

        def collect() -> StepResult:
            return StepResult(
                token_ids.tolist(),
                _sample_logprobs(inputs, logprobs) if logprobs is not None else None,
                _split_prompt_logprobs(inputs, prompt),
            )

        return collect

    def _logprobs_to_host(self, tensors: LogprobTensors) -> LogprobTensors:
        return LogprobTensors(
            self._to_host(tensors.logprobs),
            self._to_host(tensors.ranks),
            self._to_host(tensors.top_ids),
            self._to_host(tensors.top_logprobs),
        )

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._pinned:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def _token_logprobs(tensors: LogprobTensors) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(*entry)
        for entry in zip(
            tensors.logprobs.tolist(),
            tensors.ranks.tolist(),
            tensors.top_ids.tolist(),
            tensors.top_logprobs.tolist(),
            strict=True,
        )
    ]


def _sample_logprobs(inputs: StepInputs, tensors: LogprobTensors) -> list[TokenLogprobs | None]:
    """Per sampled row, cut to the number that its request asked for."""
    entries = _token_logprobs(tensors)
    result: list[TokenLogprobs | None] = []
    for entry, num_top in zip(entries, inputs.wants_logprobs, strict=True):
        if num_top is None:
            result.append(None)
        else:
            top = entry.top_ids[:num_top], entry.top_logprobs[:num_top]
            result.append(TokenLogprobs(entry.logprob, entry.rank, *top))
    return result


def _split_prompt_logprobs(
    inputs: StepInputs, pieces: list[LogprobTensors]
) -> dict[int, list[TokenLogprobs]]:
    """seq_id -> entries, from the pieces of all rows in order."""
    entries = iter([entry for piece in pieces for entry in _token_logprobs(piece)])
    return {
        wanted.seq_id: [next(entries) for _ in range(wanted.num_targets)]
        for wanted in inputs.prompt_logprobs
    }
