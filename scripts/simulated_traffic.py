"""Requests for simulations, and the conversations that send them to a cluster."""

from __future__ import annotations

import itertools
import math
import random
from array import array
from dataclasses import dataclass

import numpy as np

from asyncllm.outputs import RequestMetrics
from asyncllm.sampling_params import SamplingParams
from asyncllm.types import Request, Sequence


@dataclass(frozen=True)
class Traffic:
    """The load of one GPU. Lengths in tokens are log-normal with these medians; conversations
    arrive as a Poisson process."""

    conversations_per_s: float = 5.0
    mean_turns: float = 5.0  # geometric
    pause_s: float = 6.0  # mean, from an answer to the next message
    system_tokens: int = 1024
    systems_per_gpu: float = 2.0  # distinct system prompts, used with a Zipf distribution
    message_tokens: int = 160
    answer_tokens: int = 200
    most_tokens: int = 6000  # of a prompt; the conversation ends then


@dataclass(slots=True)
class Conversation:
    """It has its own random numbers, so its messages do not depend on other conversations."""

    rng: random.Random
    tokens: array[int]
    turns_left: int


class Population:
    """Draws conversations and their messages at random."""

    def __init__(self, traffic: Traffic, num_gpus: int, seed: int) -> None:
        self._traffic, self._seed = traffic, seed
        self._numbers = itertools.count()
        rng = random.Random(f"{seed} systems")
        count = max(round(traffic.systems_per_gpu * num_gpus), 1)
        self._systems = [_text(rng, traffic.system_tokens) for _ in range(count)]
        self._weights = [*itertools.accumulate(1 / (i + 1) for i in range(count))]  # Zipf's

    def conversation(self) -> Conversation:
        rng = random.Random(f"{self._seed} {next(self._numbers)}")
        turns = 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / self._traffic.mean_turns))
        (system,) = rng.choices(self._systems, cum_weights=self._weights)
        return Conversation(rng, system[:], turns)

    def say(self, conversation: Conversation) -> int:
        """Add a message. Returns the length of the answer."""
        conversation.tokens += _text(conversation.rng, self._traffic.message_tokens)
        return _length(conversation.rng, self._traffic.answer_tokens)


def _text(rng: random.Random, median: int) -> array[int]:
    """A text that no other text begins like, but for one in a billion."""
    start, length = rng.randrange(1 << 30), _length(rng, median)
    tokens = (start + 7919 * np.arange(length)) % (1 << 30)
    return array("i", tokens.astype(np.int32).tobytes())


def _length(rng: random.Random, median: int) -> int:
    return min(max(int(median * math.exp(rng.gauss(0, 0.6))), 8), 6 * median)


def make_request(number: int, prompt: list[int], output_len: int) -> Request:
    request = Request(
        request_id=str(number),
        prompt=None,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=output_len, ignore_eos=True),
        max_tokens=output_len,
        stop_token_ids=frozenset(),
        metrics=RequestMetrics(arrival_time=0.0),
    )
    request.sequences.append(Sequence(number, request, 0, number, list(prompt)))
    return request
