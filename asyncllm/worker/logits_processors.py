"""Logits processors in Python: callables of a request, and classes of the engine.

A request's callables (`SamplingParams.logits_processors`) take (output tokens, a row of logits) or
(prompt, output tokens, a row of logits), by the number of their positional parameters, and return
the row. The engine's are subclasses of `LogitsProcessor`, made at start, and get all rows that need
them at once. Both run on the device's stream when host rows are sampled, before all other changes:
tokens that a grammar, bad words or min_tokens forbid stay forbidden. If one raises, only its own
requests end.
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
    """A row of a step, for the engine's processors. key: identifies the sequence in all steps."""

    key: int
    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # before the token to sample


class LogitsProcessor(ABC):
    """Base class for `EngineArgs.logits_processors`. Instantiated once, at start."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self.config, self.device = config, device

    @abstractmethod
    def is_needed(self, params: SamplingParams) -> bool:
        """Whether a new request needs it, for example by `params.extra_args`.

        A `ValueError` refuses the request. Rows that need no processor do not wait for the host.
        """

    def update(self, added: Sequence[ProcessorRow], removed: Sequence[int]) -> None:
        """Called before `apply` if the rows have changed: added rows, and keys of removed ones.

        A preempted sequence is removed, and later added with its tokens so far.
        """
        return

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessorRow]) -> torch.Tensor:
        """Return new logits, float32 [rows, V] on the device, for `rows`; may work in place.

        It must not wait for the device (`.item()`, `.tolist()`).
        """


class LogitsProcessors:
    """Applies the engine's and the requests' processors to a step's rows."""

    def __init__(
        self, classes: Sequence[type[LogitsProcessor]], config: EngineConfig, device: torch.device
    ) -> None:
        """Raises whatever a class raises."""
        self._processors = [made(config, device) for made in classes]
        self._keys: list[set[int]] = [set() for _ in self._processors]

    def needed_by(self, params: SamplingParams) -> tuple[int, ...]:
        """Indices of the processors that a request needs. Raises `InvalidRequestError` if one
        refuses it."""
        try:
            found = tuple(i for i, made in enumerate(self._processors) if made.is_needed(params))
        except ValueError as error:
            raise InvalidRequestError(
                f"a logits processor: {error}", "logits_processors"
            ) from error
        if found and params.use_beam_search:  # its scores are the model's
            raise InvalidRequestError(
                "this server's logits processors do not work with beam search", "use_beam_search"
            )
        return found

    def apply(
        self, logits: torch.Tensor, rows: Sequence[TokenSequence]
    ) -> dict[int, BaseException]:
        """Change logits f32 [rows, V] in place. Returns errors by row."""
        failures: dict[int, BaseException] = {}
        for place, processor in enumerate(self._processors):
            needing = [i for i, seq in enumerate(rows) if place in seq.request.batch_processors]
            if needing:
                try:
                    self._apply_to(place, processor, logits, rows, needing)
                except (Exception, SystemExit) as error:  # ends the requests that need it
                    failures |= dict.fromkeys(needing, error)
        for i, seq in enumerate(rows):
            for own in seq.request.sampling_params.logits_processors or ():
                try:
                    _apply_own(own, seq, logits[i])
                except (Exception, SystemExit) as error:
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
