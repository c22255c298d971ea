"""`LLM`: offline inference from synchronous code.

It runs an `AsyncLLMEngine` on an event loop in its own thread, so it works in scripts, in a REPL
and in notebooks, whose main thread runs a loop already. `close()` ends engine and thread.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from tqdm import tqdm

from asyncllm.engine.async_engine import AsyncLLMEngine
from asyncllm.engine.text.prompt import PromptInput
from asyncllm.errors import EngineDeadError
from asyncllm.lora import LoRARequest
from asyncllm.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from asyncllm.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    check_sampling_params,
)

T = TypeVar("T")
EXIT_TIMEOUT_SECONDS = 5.0
Message = dict[str, Any]


class LLM:
    """Offline generation: `LLM(model, **fields of EngineArgs).generate(prompts, params)`.

    Raises `ValueError` or `ModelLoadError` if the configuration cannot run.
    """

    def __init__(self, model: str = "tiny", **engine_args: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="asyncllm-llm", daemon=True
        )
        self._thread.start()
        try:
            # A batch may wait as long as it takes: there are no other clients.
            patient = {"max_queued_tokens": sys.maxsize, "max_queue_seconds": math.inf}
            self.engine = AsyncLLMEngine(model, **patient | engine_args)
            self.engine.show_progress = True
            self._call(self.engine.start())
        except BaseException:
            self._stop_loop()
            raise
        # Avoids asyncio's warnings if a script ends without `close`.
        self._finalizer = weakref.finalize(self, _abandon, self._loop, self._thread)

    def generate(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """The final outputs, in the order of the prompts. prompts: one or several, in any form.

        `sampling_params`, `priority` and `lora_request`: one for all prompts, or one for each.
        Raises `InvalidRequestError` (a `ValueError`) naming the field, at the first invalid prompt.
        """
        batch: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        work = self._generate(batch, sampling_params, priority, lora_request, use_tqdm)
        return self._call(work)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or a list of them, by a chat template."""
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if single else list(messages)
        tokenizer = self.engine.tokenizer
        prompts: list[PromptInput] = []
        for conversation in conversations:
            text = tokenizer.render_chat(
                list(conversation),
                tools,
                add_generation_prompt,
                continue_final_message,
                chat_template_kwargs,
                chat_template,
            )
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: PromptInput | Iterable[PromptInput],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best beams of each prompt. Arguments and errors as for `generate`."""
        outputs = self.generate(
            prompts, params.sampling_params(), use_tqdm=use_tqdm, lora_request=lora_request
        )
        return [self._beams(output, params) for output in outputs]

    def close(self) -> None:
        """Free all memory. Idempotent."""
        if self._finalizer.detach() is not None:
            try:
                self._call(self.engine.aclose())
            finally:
                self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- inside ------------------------------------------------------------------------------

    async def _generate(
        self,
        prompts: list[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        default = self.engine.input_processor.default_params({})
        every_params = _one_each("sampling_params", params or default, len(prompts))
        for given in every_params:
            check_sampling_params(given)
        every_priority = _one_each("priority", priority, len(prompts))
        every_lora = _one_each("lora_request", lora_request, len(prompts))
        done: dict[int, RequestOutput] = {}
        room = asyncio.Semaphore(self.engine.config.max_queued_requests)
        with _Bar(total=len(prompts), desc="generating", disable=not use_tqdm) as bar:

            async def run(index: int) -> None:
                final = replace(every_params[index], output_kind=RequestOutputKind.FINAL_ONLY)
                async with room:
                    done[index] = await self.engine.generate(
                        prompts[index],
                        final,
                        priority=every_priority[index],
                        lora_request=every_lora[index],
                    )
                bar.count(done[index])

            async with asyncio.TaskGroup() as tasks:
                for index in range(len(prompts)):
                    tasks.create_task(run(index))
        return [done[index] for index in range(len(prompts))]

    def _beams(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        """The beams with the prompt in front, as in vLLM."""
        prompt = output.prompt
        if prompt is None:
            prompt = self.engine.tokenizer.decode(output.prompt_token_ids, False)
        beams = []
        for beam in output.outputs:
            total = beam.cumulative_logprob
            assert total is not None, "a beam search has scores"
            beams.append(
                BeamSearchSequence(
                    tokens=output.prompt_token_ids + beam.token_ids,
                    cum_logprob=total,
                    text=prompt + beam.text,
                    finish_reason=beam.finish_reason,
                    stop_reason=beam.stop_reason,
                    score=total / len(beam.token_ids) ** params.length_penalty,
                )
            )
        return BeamSearchOutput(beams)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise EngineDeadError("this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()  # aborts the requests; the engine stays usable
            raise
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # callers expect the error itself

    def _stop_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop)
        self._thread.join()
        self._loop.close()


class _Bar(tqdm):
    """Counts finished requests, and shows their tokens per second."""

    num_prompt_tokens = num_output_tokens = 0

    def count(self, output: RequestOutput) -> None:
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.num_output_tokens += sum(len(each.token_ids) for each in output.outputs)
        if not self.disable:
            seconds = self.format_dict["elapsed"] or math.inf
            rates = self.num_prompt_tokens / seconds, self.num_output_tokens / seconds
            self.set_postfix_str("{:.0f} prompt + {:.0f} output tokens/s".format(*rates), False)
        self.update()


def _abandon(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the tasks and the thread of an LLM that was not closed."""
    asyncio.run_coroutine_threadsafe(_end_tasks(), loop)
    if threading.current_thread() is not thread:  # garbage collection may run in any thread
        thread.join(EXIT_TIMEOUT_SECONDS)


async def _end_tasks() -> None:
    """Cancel all other tasks, such as an interrupted start; then stop the loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    asyncio.get_running_loop().stop()


def _is_one_prompt(prompts: Any) -> bool:
    """Whether this is one text, dict, list of token ids or conversation, and not a list of them."""
    if isinstance(prompts, (str, dict)):
        return True
    first = prompts[0] if isinstance(prompts, Sequence) and prompts else None
    return isinstance(first, int) or (isinstance(first, dict) and "role" in first)


def _one_each(name: str, value: T | Sequence[T], count: int) -> list[T]:
    """A value for each of `count` prompts. Raises `ValueError` for a list of another length."""
    if isinstance(value, Sequence) and not isinstance(value, str):  # an invalid one, whole
        if len(value) != count:
            raise ValueError(f"{name}: {len(value)} given for {count} prompts")
        return list(value)
    return [value] * count
