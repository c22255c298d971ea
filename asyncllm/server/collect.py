"""The answer that is sent whole: engine deltas added up per choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncllm.engine.request_limits import MAX_PROMPT_LOGPROB_ENTRIES
from asyncllm.outputs import PromptLogprobs, RequestOutput, SampleLogprobs
from asyncllm.server.call import Call
from asyncllm.server.errors import ApiError, bad_request
from asyncllm.server.usage import Usage


@dataclass(slots=True)
class CollectedChoice:
    index: int
    parts: list[str] = field(default_factory=list)
    logprobs: SampleLogprobs = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)


@dataclass(slots=True)
class CollectedPrompt:
    text: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: PromptLogprobs | None = None


class CollectedAnswer:
    """A `Consumer` for one JSON body."""

    def __init__(self, call: Call) -> None:
        self.choices = [CollectedChoice(i) for i in range(call.num_choices)]
        self.prompts = [CollectedPrompt() for _ in call.prompts]
        self.usage = Usage(call.shows_cached)
        self._n = call.params.n
        self._params = call.params
        self._num_entries = 0  # of prompt_logprobs

    def feed(self, prompt_index: int, output: RequestOutput) -> None:
        self.usage.count(prompt_index, output)
        self._add_prompt(self.prompts[prompt_index], output)
        for completion in output.outputs:
            choice = self.choices[prompt_index * self._n + completion.index]
            choice.parts.append(completion.text)
            choice.logprobs.extend(completion.logprobs or ())
            choice.token_ids.extend(completion.token_ids)
            if completion.finish_reason is not None:
                choice.finish_reason = completion.finish_reason
                choice.stop_reason = completion.stop_reason

    def feed_text(self, prompt_index: int, text: str, num_tokens: int) -> None:
        self.usage.completion_tokens += num_tokens
        self.choices[prompt_index * self._n].parts.append(text)

    def finish(self) -> None:
        pass  # all is here already

    def fail(self, error: ApiError) -> None:
        pass  # `Generation.wait` raises it

    def prompt_of(self, choice: CollectedChoice) -> CollectedPrompt:
        return self.prompts[choice.index // self._n]

    def _add_prompt(self, prompt: CollectedPrompt, output: RequestOutput) -> None:
        prompt.text = output.prompt
        prompt.token_ids = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            prompt.logprobs = output.prompt_logprobs
            self._check_num_entries(len(output.prompt_logprobs))

    def _check_num_entries(self, num_positions: int) -> None:
        """Each prompt is within the engine's limit; each choice shows its prompt's again."""
        params = self._params
        assert params.prompt_logprobs is not None, "they were asked for"
        self._num_entries += num_positions * (1 + params.prompt_logprobs) * params.n
        if self._num_entries > MAX_PROMPT_LOGPROB_ENTRIES:
            what = f"prompt_logprobs of all choices are over {MAX_PROMPT_LOGPROB_ENTRIES} entries"
            raise bad_request(f"{what}: ask for fewer, or send less", "prompt_logprobs")
