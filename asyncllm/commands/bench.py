"""`asyncllm bench latency|throughput|startup`: the engine alone, without HTTP.

Random token ids, `ignore_eos`, greedy: lengths are exact and answers mean nothing. Each iteration
has prompts of its own, so nothing comes from the prefix cache. In a pipe it ends with one line of
JSON, conditions included. The flags have vLLM's names; `scripts/loadtest.py` measures a server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncllm.child_process import child_command, child_environment
from asyncllm.commands import bench_summary
from asyncllm.commands.bench_summary import Result
from asyncllm.config import EngineArgs
from asyncllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from asyncllm.engine.async_engine import AsyncLLMEngine
    from asyncllm.outputs import RequestOutput

HELP = "measure the engine without HTTP: latency, throughput, startup"
PERCENTILES = (10, 50, 90, 99)
STARTUP_TIMEOUT_SECONDS = 3600.0  # kernels may be compiled in it
FIRST_TOKEN_ID = 3  # below are, usually, the special tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=tuple(_KINDS), metavar="|".join(_KINDS))
    for flag, default, about in (
        ("--input-len", 32, "tokens per prompt"),
        ("--output-len", 128, "tokens per answer"),
        ("--batch-size", 8, "latency: requests at a time"),
        ("--num-iters", 10, "latency, startup: repetitions"),
        ("--num-iters-warmup", 3, "latency: not counted"),
        ("--num-prompts", 256, "throughput: all at once"),
    ):
        about += " (default: %(default)s)"
        parser.add_argument(flag, type=int, metavar="N", default=default, help=about)
    parser.add_argument("--output-json", metavar="FILE", help="the result as one line of JSON")


def run(engine_args: EngineArgs, options: argparse.Namespace) -> int:
    ones = ("input_len", "output_len", "batch_size", "num_iters", "num_prompts")
    for name, least in (*((name, 1) for name in ones), ("num_iters_warmup", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(options, name)}")
    if options.output_json is not None:
        _check_writable(Path(options.output_json))
    result = _KINDS[options.what](engine_args, options)
    bench_summary.show(result, engine_args.model, options.output_json)
    return 0


def _check_writable(file: Path) -> None:
    """Raises `OSError`, which else would come when all is measured."""
    is_new = not file.exists()
    file.open("a").close()
    if is_new:
        file.unlink()


# --- what is measured -------------------------------------------------------------------------


def _latency(engine_args: EngineArgs, options: argparse.Namespace) -> Result:
    """Seconds until the last of `batch_size` requests, sent together, is answered."""

    async def measure(engine: AsyncLLMEngine) -> Result:
        prompts = _Prompts(engine, options.input_len)
        seconds, ttfts, tpots = [], [], []
        for iteration in _bar(options.num_iters_warmup + options.num_iters, "iterations"):
            start = time.perf_counter()
            outputs = await _answer(engine, prompts.make(options.batch_size), options.output_len)
            if iteration >= options.num_iters_warmup:
                seconds.append(time.perf_counter() - start)
                ttfts += [ttft_ms(output) for output in outputs]
                tpots += [tpot_ms(output) for output in outputs]
        return {
            "latency_s": _spread(seconds),
            "ttft_ms": _spread(ttfts),
            "tpot_ms": _spread(tpots),
            "output_tokens_per_s": options.batch_size * options.output_len / _mean(seconds),
        }

    return _with_engine(engine_args, options, measure)


def _throughput(engine_args: EngineArgs, options: argparse.Namespace) -> Result:
    """`num_prompts` requests at once, after one that warms up."""

    async def measure(engine: AsyncLLMEngine) -> Result:
        prompts = _Prompts(engine, options.input_len)
        await _answer(engine, prompts.make(1), options.output_len)
        start = time.perf_counter()
        batch = prompts.make(options.num_prompts)
        outputs = await _answer(engine, batch, options.output_len, "requests")
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "requests_per_s": len(outputs) / seconds,
            "output_tokens_per_s": len(outputs) * options.output_len / seconds,
            "total_tokens_per_s": len(outputs) * (options.input_len + options.output_len) / seconds,
            "ttft_ms": _spread([ttft_ms(output) for output in outputs]),
            "tpot_ms": _spread([tpot_ms(output) for output in outputs]),
        }

    return _with_engine(engine_args, options, measure)


def _startup(engine_args: EngineArgs, options: argparse.Namespace) -> Result:
    """Seconds from a new process to its first token; the first may find caches empty."""
    command = child_command("asyncllm.commands.startup_probe")
    given = json.dumps(asdict(engine_args))
    runs: list[Result] = []
    for _ in _bar(options.num_iters, "starts"):
        start = time.perf_counter()
        child = subprocess.run(
            command, input=given, capture_output=True, text=True, env=child_environment(),
            timeout=STARTUP_TIMEOUT_SECONDS,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        if child.returncode:
            raise ValueError(f"a start failed: {child.stderr.strip().splitlines()[-1]}")
        runs.append({"seconds": seconds, **json.loads(child.stdout.splitlines()[-1])})
    first_token = [run["to_first_token_s"] for run in runs]
    phases = {name: _mean([run["phases"][name] for run in runs]) for name in runs[0]["phases"]}
    return {
        "bench": "startup",
        "first_start_s": first_token[0],
        "to_first_token_s": _spread(first_token),
        "process_s": _spread([run["seconds"] for run in runs]),
        "phases_s": phases,
        "conditions": runs[0]["conditions"],
    }


_KINDS = {"latency": _latency, "throughput": _throughput, "startup": _startup}


# --- with an engine ---------------------------------------------------------------------------


def _with_engine(engine_args: EngineArgs, options: argparse.Namespace, measure: Any) -> Result:
    import uvloop

    from asyncllm.engine.async_engine import AsyncLLMEngine

    async def work() -> Result:
        engine = AsyncLLMEngine.from_engine_args(engine_args)
        engine.show_progress = True
        async with engine:
            lengths = options.input_len + options.output_len
            if lengths > engine.max_model_len:
                raise ValueError(f"{lengths} tokens exceed the window of {engine.max_model_len}")
            measured = await measure(engine)
            return {"bench": options.what, **measured, "conditions": _conditions(engine, options)}

    return uvloop.run(work())


class _Prompts:
    """Random token ids of one length, from a fixed seed, never the same twice."""

    def __init__(self, engine: AsyncLLMEngine, length: int) -> None:
        self._vocab_size = engine.config.model.vocab_size
        self._length = length
        self._random = random.Random(0)

    def make(self, count: int) -> list[list[int]]:
        ids = range(min(FIRST_TOKEN_ID, self._vocab_size - 1), self._vocab_size)
        return [self._random.choices(ids, k=self._length) for _ in range(count)]


async def _answer(
    engine: AsyncLLMEngine, prompts: list[list[int]], length: int, bar: str | None = None
) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0, ignore_eos=True, max_tokens=length, output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=engine.config.tokenizer_path is not None,
    )  # fmt: skip
    progress = _bar(len(prompts), bar) if bar is not None else None

    async def one(prompt: list[int]) -> RequestOutput:
        output = await engine.generate(prompt, params)
        if progress is not None:
            progress.update()
        return output

    outputs = list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
    if progress is not None:
        progress.close()
    return outputs


def _conditions(engine: AsyncLLMEngine, options: argparse.Namespace) -> Result:
    import torch

    from asyncllm import __version__

    cuda = engine.config.device == "cuda"
    sizes = {k: v for k, v in vars(options).items() if isinstance(v, int) and k != "what"}
    return {
        **engine.startup,
        **sizes,
        "load_format": engine.config.load_format,
        "asyncllm": __version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if cuda else None,
    }


# --- numbers ----------------------------------------------------------------------------------


def ttft_ms(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None
    return (metrics.first_token_time - metrics.arrival_time) * 1e3


def tpot_ms(output: RequestOutput) -> float:
    """Per token after the first; 0 where there is only one."""
    metrics, count = output.metrics, len(output.outputs[0].token_ids) - 1
    assert metrics is not None and metrics.first_token_time is not None
    assert metrics.finished_time is not None
    return (metrics.finished_time - metrics.first_token_time) * 1e3 / count if count else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles (nearest rank)."""
    ordered = sorted(values)
    ranks = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in PERCENTILES}
    return {"mean": _mean(ordered), **ranks}


def _bar(total: int, unit: str | None) -> Any:
    from asyncllm.models.loader import DELAY_S, ProgressBar

    return ProgressBar(range(total), desc=unit, leave=False, delay=DELAY_S)
