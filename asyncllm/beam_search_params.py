"""A beam search as vLLM's users ask for it; the engine knows it as `SamplingParams`."""

from __future__ import annotations

from dataclasses import dataclass

from asyncllm.param_checks import require, require_int
from asyncllm.sampling_limits import MAX_N
from asyncllm.sampling_params import EarlyStopping, SamplingParams


@dataclass(slots=True)
class BeamSearchParams:
    """A beam search, under vLLM's names; `sampling_params()` says the same to the engine.

    All `beam_width` beams are returned, the best first. `temperature` is accepted and without
    effect: a search draws nothing, and its log-probabilities are those of the model.
    Source: vllm.BeamSearchParams; `early_stopping` from transformers' GenerationConfig.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: EarlyStopping = False

    def sampling_params(self) -> SamplingParams:
        """Raises `InvalidRequestError`."""
        require_int("beam_width", self.beam_width)
        require(1 <= self.beam_width <= MAX_N, "beam_width", self.beam_width,
                 f"between 1 and {MAX_N}")  # fmt: skip
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            early_stopping=self.early_stopping,
        )
