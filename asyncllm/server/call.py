"""One HTTP call for text: what it asks of the engine, and the names that its answer carries."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncllm import __version__
from asyncllm.engine.text.prompt import PromptInput
from asyncllm.formats.events import AnswerParser
from asyncllm.sampling_params import SamplingParams

SYSTEM_FINGERPRINT = f"asyncllm-{__version__}"


@dataclass(slots=True, frozen=True)
class Call:
    """Choice i of prompt p has index p * n + i in the answer.

    new_parser      makes a choice's parser; None where all of a choice is content
    wants_outputs   each delta comes as an output, with its token ids, never as text alone
    shows_cached    its usage says how many prompt tokens the prefix cache had
    client_name     what the client calls a field of the engine's: some errors come late
    """

    id: str
    model: str
    prompts: list[PromptInput]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    new_parser: Callable[[], AnswerParser] | None = None
    return_token_ids: bool = False
    wants_outputs: bool = False
    shows_cached: bool = True
    client_name: Callable[[str | None], str | None] = lambda name: name
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def request_ids(self) -> list[str]:
        """Of the engine's requests, one per prompt."""
        return [self.request_id(index) for index in range(len(self.prompts))]

    def request_id(self, index: int) -> str:
        return f"{self.id}-{index}"

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def num_sequences(self) -> int:
        """Answers that are generated: the choices are among them."""
        return len(self.prompts) * self.params.num_sequences


def new_id(prefix: str) -> str:
    """Never a client's own id: it names a request inside the engine."""
    return f"{prefix}-{os.urandom(16).hex()}"
