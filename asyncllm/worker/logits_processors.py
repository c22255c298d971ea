"""Python that changes logits: per request (callables), and per engine (classes, made at start).

A request's own, in `SamplingParams.logits_processors`, are called with its output tokens and its
row of logits, or with its prompt before them, by the number of their positional parameters; they
return the row. The engine's are subclasses of `LogitsProcessor` and see all rows that need them at
once. Both run on the device's stream in the sampling of host rows, before every other edit: what a
grammar, bad words or min_tokens forbid stays forbidden. What raises ends its own requests only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from asyncllm.config import EngineConfig
from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_limits import num_positional
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class ProcessorRow:
    """One row of a step, for the engine's processors. `key`: its sequence's, in all steps."""

    key: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # before the token that is to be sampled


class LogitsProcessor(ABC):
    """Subclass it, and name the class in `EngineArgs.logits_processors`. Made once, at start."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    @abstractmethod
    def is_needed(self, params: SamplingParams) -> bool:
        """Whether a new request needs it (`params.extra_args` has what is not ours).

        A `ValueError` refuses the request. Rows that need no processor never wait for the host.
        """

    def update(self, added: Sequence[ProcessorRow], removed: Sequence[int]) -> None:
        """Before `apply`, where the rows are not those of the last call: who came, whose keys left.

        A preempted sequence leaves, and comes again with the tokens that it has by then.
        """
        return

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        """The new logits, float32 [rows, V] on the device, from those of `rows`; may be in place.

        Must not wait for the device (`.item()`, `.tolist()`): that would end the overlap.
        """


class LogitsProcessors:
    """The engine's processors, and how a step's rows go through them and through their own."""

    def __init__(
        self, classes: Sequence[type[LogitsProcessor]], config: EngineConfig, device: torch.device
    ) -> None:
        """Raises what a class raises."""
        self._processors = [made(config, device) for made in classes]
        self._keys: list[set[int]] = [set() for _ in self._processors]

    def needed_by(self, params: SamplingParams) -> tuple[int, ...]:
        """The places of those that a request needs. Raises `InvalidRequestError` where one refuses
        it."""
        try:
            found = tuple(i for i, made in enumerate(self._processors) if made.is_needed(params))
        except ValueError as error:
            raise InvalidRequestError(
                f"a logits processor: {error}", "logits_processors"
            ) from error
        if found and params.use_beam_search:  # its scores are those of the model
            raise InvalidRequestError(
                "this server's logits processors do not work with beam search", "use_beam_search"
            )
        return found

    def apply(self, logits: torch.Tensor, rows: Sequence[TokenSequence]) -> dict[int, Exception]:
        """Change logits f32 [rows, V] in place. Returns what was raised, by row."""
        failures: dict[int, Exception] = {}
        for place, processor in enumerate(self._processors):
            needing = [i for i, seq in enumerate(rows) if place in seq.request.batch_processors]
            if needing:
                try:
                    self._apply_to(place, processor, logits, rows, needing)
                except Exception as error:  # theirs, not ours: it ends who asked for it
                    failures |= dict.fromkeys(needing, error)
        for i, seq in enumerate(rows):
            for own in seq.request.sampling_params.logits_processors or ():
                try:
                    _apply_own(own, seq, logits[i])
                except Exception as error:
                    failures[i] = error
                    break
        return failures

    def _apply_to(
        self,
        place: int,
        processor: LogitsProcessor,
        logits: torch.Tensor,
        rows: Sequence[TokenSequence],
        needing: list[int],
    ) -> None:
        given = [_row(rows[i]) for i in needing]
        keys, before = {row.key for row in given}, self._keys[place]
        if keys != before:
            self._keys[place] = keys
            processor.update([r for r in given if r.key not in before], sorted(before - keys))
        index = torch.tensor(needing).to(logits.device, non_blocking=True)
        part = logits.index_select(0, index)
        logits.index_copy_(0, index, _checked(processor.apply(part, given), part.shape).float())


def _apply_own(processor: Callable[..., object], seq: TokenSequence, logits: torch.Tensor) -> None:
    prompt = seq.request.prompt_token_ids
    outputs = seq.token_ids[len(prompt) :]
    tokens = (outputs,) if num_positional(processor) == 2 else (list(prompt), outputs)
    logits.copy_(_checked(processor(*tokens, logits.clone()), logits.shape))


def _row(seq: TokenSequence) -> ProcessorRow:
    prompt = seq.request.prompt_token_ids
    return ProcessorRow(
        seq.seq_id, seq.request.sampling_params, prompt, seq.token_ids[len(prompt) :]
    )


def _checked(logits: object, shape: torch.Size) -> torch.Tensor:
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"it must return a tensor, not {type(logits).__name__}")
    if logits.shape != shape:
        raise ValueError(f"it must return logits {list(shape)}, not {list(logits.shape)}")
    return logits
