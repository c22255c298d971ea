"""`truncation: auto`: of a conversation that is too long the oldest turns are left out.

A turn begins with what the user says. What the system says first stays, and the last turn stays: if
that alone is too long, the engine says so.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from asyncllm.server.message_call import num_tokens, prompt_of
from asyncllm.server.protocol import ChatRequest
from asyncllm.server.service import Service


async def drop_oldest_turns(request: ChatRequest, service: Service) -> None:
    """Until the prompt leaves room for the answer: at most log2(turns) + 1 prompts are made."""
    room = service.engine.max_model_len - (request.max_completion_tokens or 1)
    messages = request.messages
    starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
    system = messages[:1] if messages[0]["role"] == "system" else []

    async def fits(num_dropped: int) -> bool:
        request.messages = _without(messages, starts, system, num_dropped)
        prompt = await service.off_loop.read(partial(prompt_of, request, service))
        return await num_tokens(prompt, service) <= room

    if not starts or await fits(0):
        return
    low, high = 1, max(len(starts) - 1, 0)  # the answer, if any drop is one, is between them
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    request.messages = _without(messages, starts, system, high)


def _without(
    messages: list[dict[str, Any]],
    starts: list[int],
    system: list[dict[str, Any]],
    num_dropped: int,
) -> list[dict[str, Any]]:
    return system + messages[starts[num_dropped] :] if num_dropped else messages
