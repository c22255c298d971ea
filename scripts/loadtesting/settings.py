"""The load test's settings: one frozen record, each field a flag of the same name.

A flag given beside `--workload` wins over what that workload sets. Whatever contradicts itself is
refused in `Settings.__post_init__`, before anything is sent.
"""

from __future__ import annotations

import argparse
import math
from argparse import BooleanOptionalAction
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtesting.record import LoadTestError

ARRIVALS = ("closed", "constant", "poisson", "gamma", "ramp", "replay")
DATASETS = ("random", "schema", "tools", "sharegpt")
SLO_METRICS = ("ttft", "tpot", "itl", "e2e")


def above(low: int, number: type[int] | type[float] = int) -> Callable[[str], float]:
    def parse(text: str) -> float:
        if not (value := number(text)) > low:
            raise argparse.ArgumentTypeError(f"{value} is not above {low}")
        return value

    return parse


def share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{value} is not from 0 to 1")
    return value


def id_range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not (colon and low.isdigit() and high.isdigit()):
        raise argparse.ArgumentTypeError(f"{text} is not LO:HI, two token ids")
    return int(low), int(high)


def slo_list(text: str) -> dict[str, float]:
    """ttft:200,tpot:20 in milliseconds."""
    slos = {}
    for name, _, ms in (part.partition(":") for part in text.split(",")):
        if name not in SLO_METRICS:
            known = ", ".join(SLO_METRICS)
            raise argparse.ArgumentTypeError(f"no objective for {name}, only for {known}")
        try:
            slos[name] = float(ms)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{name} needs milliseconds: {name}:200") from None
    return slos


def flag(default: Any, help: str, **how_to_parse: Any) -> Any:
    return field(default=default, metadata={"help": f"{help} ({default})", **how_to_parse})


WORKLOADS: dict[str, dict[str, Any]] = {
    "lat1": {"input_len": 128, "output_len": 256, "max_concurrency": 1, "num_prompts": 16},
    "lat8": {"input_len": 128, "output_len": 256, "max_concurrency": 8, "num_prompts": 64},
    "tput": {"input_len": 512, "output_len": 256, "max_concurrency": 256, "num_prompts": 768},
    "rate8": {"input_len": 1024, "output_len": 128, "request_rate": 8.0, "num_prompts": 320},
    "rate16": {"input_len": 1024, "output_len": 128, "request_rate": 16.0, "num_prompts": 640},
    "prefix": {"input_len": 128, "output_len": 64, "max_concurrency": 64, "num_prompts": 512}
    | {"prefix_len": 2048, "num_prefixes": 8},
    "long": {"input_len": 7000, "output_len": 64, "max_concurrency": 8, "num_prompts": 64},
    "turns": {"input_len": 64, "output_len": 128, "max_concurrency": 32, "num_prompts": 512}
    | {"num_turns": 8, "prefix_len": 512, "num_prefixes": 1},
}


@dataclass(frozen=True)
class Settings:
    base_url: str = flag("http://127.0.0.1:8000", "the server, without /v1")
    model: str | None = flag(None, "None: the first of /v1/models")
    endpoint: str = flag("completions", "chat sends text", choices=("completions", "chat"))
    workload: str | None = flag(None, "sets lengths and load; flags given win", choices=WORKLOADS)
    num_prompts: int = flag(100, "requests in all", type=above(0))
    # When
    arrival: str | None = flag(None, "None: by the flags below", choices=ARRIVALS)
    max_concurrency: int | None = flag(None, "without a rate: a closed loop", type=above(0))
    request_rate: float = flag(math.inf, "per second; inf: all at once", type=above(0, float))
    ramp_to_rate: float | None = flag(None, "ramp: from request-rate to it", type=above(0, float))
    burstiness: float = flag(1.0, "gamma shape; 1: Poisson, less: bursts", type=above(0, float))
    trace: str | None = flag(None, "replay: a Mooncake JSONL or Azure CSV file of times, lengths")
    # What
    dataset: str = flag("random", "kind of requests; all but random are chats", choices=DATASETS)
    dataset_path: str | None = flag(None, "the ShareGPT JSON file")
    input_len: int = flag(128, "a prompt's own tokens, after its shared prefix", type=above(0))
    output_len: int = flag(128, "max_tokens", type=above(0))
    length_dist: str = flag("fixed", "of both", choices=("fixed", "uniform", "lognormal"))
    length_spread: float = flag(0.5, "uniform: +- share; lognormal: sigma", type=above(0, float))
    prefix_len: int = flag(0, "tokens of a shared prefix", type=above(-1))
    num_prefixes: int = flag(1, "shared prefixes", type=above(0))
    num_turns: int = flag(1, "requests of one conversation (chat)", type=above(0))
    think_s: float = flag(0.0, "between an answer and the next turn", type=above(-1, float))
    cancel_share: float = flag(0.0, "of requests, broken off at a random chunk", type=share)
    slow_share: float = flag(0.0, "of requests, read slowly", type=share)
    slow_bytes_per_s: float = flag(4096.0, "of a slow reader", type=above(0, float))
    ignore_eos: bool = flag(True, "and check the token count", action=BooleanOptionalAction)
    temperature: float = flag(0.0, "of sampling", type=above(-1, float))
    token_range: tuple[int, int] = flag((1000, 30000), "LO:HI, to draw ids from", type=id_range)
    vocab_size: int | None = flag(
        None, "clips token-range; None: found by trial where ids are refused", type=above(0)
    )
    text: bool = flag(False, "send words instead of token ids", action=BooleanOptionalAction)
    seed: int = flag(0, "of prompts and arrivals", type=above(-1))
    # How it is measured
    num_warmups: int = flag(8, "requests before, with other prompts", type=above(-1))
    token_counts: bool = flag(
        False, "ask for a token count in each chunk (ITL per token)", action=BooleanOptionalAction
    )
    slo: Mapping[str, float] | None = flag(None, "ttft:200,tpot:20 in ms: goodput", type=slo_list)
    check_outputs: int = flag(0, "answers compared with those of an idle server", type=above(-1))
    reference_url: str | None = flag(None, "who gives those; None: the same server")
    processes: int = flag(1, "that send", type=above(0))
    max_client_lag_ms: float = flag(10.0, "p99 above it: an invalid run", type=above(0, float))
    timeout_s: float = flag(600.0, "of one request in all", type=above(0, float))

    def __post_init__(self) -> None:
        needs = {
            "--arrival closed needs --max-concurrency": self.arrival == "closed"
            and self.max_concurrency is None,
            f"--arrival {self.arrival} needs --request-rate": math.isinf(self.request_rate)
            and self.arrival in ("constant", "poisson", "gamma", "ramp"),
            "--arrival ramp needs --ramp-to-rate": self.arrival == "ramp"
            and self.ramp_to_rate is None,
            "--arrival replay and --trace need each other": (self.arrival == "replay")
            != (self.trace is not None),
            "--dataset sharegpt and --dataset-path need each other": (self.dataset == "sharegpt")
            != (self.dataset_path is not None),
            "--trace and --num-turns exclude each other": self.trace is not None
            and self.num_turns > 1,
            "--check-outputs needs --temperature 0": self.check_outputs > 0
            and self.temperature != 0,
            "--check-outputs compares requests that need no answer before them": (
                self.check_outputs > 0 and self.num_turns > 1
            ),
        }
        for message in (message for message, missing in needs.items() if missing):
            raise LoadTestError(message)

    @property
    def closed_loop(self) -> bool:
        if self.arrival is not None:
            return self.arrival == "closed"
        return math.isinf(self.request_rate) and self.max_concurrency is not None

    @property
    def chats(self) -> bool:
        return self.endpoint == "chat" or self.dataset != "random" or self.num_turns > 1

    @property
    def sends_text(self) -> bool:
        return self.text or self.chats

    @property
    def counts_tokens(self) -> bool:
        """Every answer has exactly max_tokens tokens, and another count is a failure."""
        return self.ignore_eos and self.dataset not in ("schema", "tools")

    @property
    def path(self) -> str:
        return "chat/completions" if self.chats else "completions"
