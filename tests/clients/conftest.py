"""Servers for clients that block.

`tiny` is the real engine with the built-in model, `scripted` the fake one, which says what it is
told.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from asyncllm import AsyncLLMEngine
from tests.server.fake_engine import FakeEngine
from tests.server.http_harness import Server
from tests.server.in_thread import in_thread
from tests.server.test_http_tools import TEMPLATE

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network when it is imported


@pytest.fixture(scope="session")
def tiny() -> Iterator[str]:
    """The base URL of a server with the built-in model."""
    engine = AsyncLLMEngine("tiny", max_model_len=1024, num_gpu_blocks_override=400, swap_space=0)
    with in_thread(engine) as server:
        yield f"{server.url}/v1"


class Scripted:
    def __init__(self, server: Server) -> None:
        self.url = f"{server.url}/v1"
        self.engine: FakeEngine = server.engine

    def say(self, text: str) -> None:
        self.engine.script = text


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """A server whose model says what it is told, in Hermes' format."""
    engine = FakeEngine()
    engine.tokenizer.chat_template = TEMPLATE
    with in_thread(engine) as server:
        yield Scripted(server)
