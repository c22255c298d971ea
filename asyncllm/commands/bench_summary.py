"""The output of `asyncllm bench`: a screen for people, and one line of JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Result = dict[str, Any]
LABELS = {
    "latency_s": "latency, s",
    "ttft_ms": "time to first token, ms",
    "tpot_ms": "time per token after it, ms",
    "to_first_token_s": "start to first token, s",
    "process_s": "whole process, s",
    "first_start_s": "the first start, s",
    "seconds": "seconds",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "total_tokens_per_s": "prompt + output tokens/s",
}
WIDTH = 30


def show(result: Result, model: str, file: str | None) -> None:
    """The JSON goes to `file`, and to stdout where that is no terminal. model: as it was named."""
    line = json.dumps(result, default=str)
    print("\n".join(summary(result, model)))
    if file is not None:
        Path(file).write_text(f"{line}\n")
    if not sys.stdout.isatty():
        print(line, flush=True)


def summary(result: Result, model: str) -> Iterator[str]:
    conditions = result["conditions"]
    yield from _heading(result["bench"], model, conditions)
    yield ""
    spreads = {name: value for name, value in result.items() if "mean" in _items(value)}
    columns = list(next(iter(spreads.values()))) if spreads else []
    yield " " * WIDTH + "".join(f"{column:>11}" for column in columns)
    for name, value in spreads.items():
        yield f"{LABELS[name]:{WIDTH}}" + "".join(f"{value[each]:>11.4g}" for each in columns)
    yield ""
    for name, value in result.items():
        if isinstance(value, float):
            yield f"{LABELS[name]:{WIDTH}}{value:>11,.5g}"
    for phases in (result.get("phases_s"), conditions.get("seconds")):
        if phases:
            parts = [f"{_words(name)} {seconds:.3g}" for name, seconds in phases.items() if seconds]
            yield f"{'seconds of the start':{WIDTH}}{', '.join(parts)}"


def _heading(bench: str, model: str, conditions: Result) -> Iterator[str]:
    where = conditions.get("gpu") or conditions["device"]
    weights = " dummy weights," if conditions.get("load_format") == "dummy" else ""
    yield (
        f"{bench} of {model} ({conditions['architecture']}),{weights} {conditions['dtype']} on "
        f"{where}, {conditions['attention_backend']} attention"
    )
    if "input_len" not in conditions:
        return
    count = {
        "latency": "{batch_size} at a time, {num_iters} times after {num_iters_warmup} to warm up",
        "throughput": "{num_prompts} at once",
    }[bench].format(**conditions)
    lengths = "{input_len} + {output_len}".format(**conditions)
    versions = "asyncllm {asyncllm}, torch {torch}".format(**conditions)
    yield f"requests of {lengths} tokens, {count}; {versions}"


def _items(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _words(name: str) -> str:
    return name.replace("_", " ")
