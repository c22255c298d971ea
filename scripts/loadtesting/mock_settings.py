"""What the mock server is told: where it listens, how fast it is, and how it fails."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from loadtesting.settings import above, flag


@dataclass(frozen=True)
class MockSettings:
    host: str = flag("127.0.0.1", "mock: to listen on")
    port: int = flag(8000, "mock: 0: any free one, it is printed", type=above(-1))
    mock_processes: int = flag(1, "mock: that serve", type=above(0))
    tokens_per_second: float = flag(math.inf, "mock: of each stream", type=above(0, float))
    max_running: int = flag(sys.maxsize, "mock: streams at once, others wait", type=above(0))
    tokens_per_chunk: int = flag(1, "mock: in each chunk", type=above(0))
    textless_tokens: int = flag(0, "mock: first tokens, sent as no chunk", type=above(-1))
    word: str = flag(" word", "mock: the text of a token")
    fail_every: int = flag(sys.maxsize, "mock: each so-many-th request fails", type=above(0))
    fail_with: str = flag("500", "mock: how", choices=("500", "event", "short", "cut"))
    refuse: str = flag("", "mock: answer 400 to requests with this field")
    stall_after: int = flag(sys.maxsize, "mock: the request that stops it once", type=above(0))
    stall_s: float = flag(1.0, "mock: for how long", type=above(0, float))
