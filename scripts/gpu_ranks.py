#!/usr/bin/env python3
"""Checks and times models on several CUDA devices of one host.

    scripts/gpu_ranks.py --sums               sums over ranks: right, and us by rows and kind
    scripts/gpu_ranks.py --checks [WORDS]     ranks against one rank, on the built-in model; those
                                              whose name has one of the words
    scripts/gpu_ranks.py --http lat1,tput --model DIR --layout tp2 [--layout tp4 ...]
                                              the workloads over HTTP, by gpu_timing.py

A check or a layout runs in a process of its own, on as many devices as it needs; several run beside
each other where there are devices. Exit status 1 if something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_oracles import Answers, ask, equal
from gpu_questions import GREEDY, HOSTED, QUESTIONS, ROOMY, SAMPLED, TIGHT, Args
from gpu_timing import time_http

from asyncllm import AsyncLLMEngine, SamplingParams
from asyncllm.graphs.pool import GraphPool
from asyncllm.kernels.all_reduce import RANKS
from asyncllm.kernels.records import Norm
from asyncllm.mesh_config import MeshConfig
from asyncllm.models.parallel.collectives import CollectiveMesh, find_store, open_store

LAYOUTS: dict[str, Args] = {
    "one": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp4": {"tensor_parallel_size": 4},
    "tp8": {"tensor_parallel_size": 8},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2, "data_parallel_backend": "mp"},
    "dp4": {"data_parallel_size": 4, "data_parallel_backend": "mp"},
}
KINDS = {"greedy": GREEDY, "sampled": SAMPLED, "with rows that need the host": HOSTED}
ENGINES: dict[str, Args] = {  # beside ROOMY, for all kinds but where pages are few
    "graph": {},
    "synchronous": {"async_scheduling": False},
    "eager": {"enforce_eager": True},
    "swap": TIGHT | {"preemption_mode": "swap"},
    "recompute": TIGHT | {"preemption_mode": "recompute"},
}
CHECK_SECONDS = 120
HTTP_SECONDS = 400
SUM_SIZE = 4096
SUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
SUM_CALLS = 64  # of a captured graph: as many as an 8B model's decode step has
REPLAYS = 20


def num_devices(layout: str) -> int:
    sizes = [size for name, size in LAYOUTS[layout].items() if name.endswith("_size")]
    product = 1
    for size in sizes:
        product *= size
    return product


# --- checks, each in a process of its own ---------------------------------------------------------


async def ranks_as_one(layout: str, engine: str) -> tuple[bool, str]:
    """Every kind of sampling, each by one engine of both."""
    args = ROOMY | LAYOUTS[layout] | ENGINES[engine]
    is_tight = "preemption_mode" in args
    kinds = {"greedy": GREEDY} if is_tight else KINDS
    ours, oracle = await answers(args, kinds), await answers(ROOMY, kinds)
    results = {kind: equal(ours[kind], oracle[kind]) for kind in kinds}
    stats = ours["greedy"].stats
    preempted = stats.num_preemptions_swap + stats.num_preemptions_recompute
    ok = all(found for found, _ in results.values()) and (preempted > 0 or not is_tight)
    details = [f"{kind}: {detail}" for kind, (_, detail) in results.items()]
    return ok, "; ".join((*details, f"{preempted} preemptions"))


async def answers(args: Args, kinds: dict[str, list[SamplingParams]]) -> dict[str, Answers]:
    found = {}
    async with AsyncLLMEngine("tiny", **args) as engine:
        for kind, params in kinds.items():
            found[kind] = Answers(await ask(engine, QUESTIONS, params), engine.stats())
        engine.check_idle()
    return found


async def killed_rank(layout: str) -> tuple[bool, str]:
    """Its requests end with an error, and the engine serves again."""
    async with AsyncLLMEngine("tiny", **ROOMY | LAYOUTS[layout]) as engine:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        begun = asyncio.Event()
        stream = asyncio.ensure_future(collect(engine, params, begun))
        await begun.wait()
        os.kill(children()[-1], signal.SIGKILL)
        killed = time.perf_counter()
        try:
            await asyncio.wait_for(stream, 30)
            return False, "the stream went on"
        except Exception as error:
            said = f"{type(error).__name__} after {time.perf_counter() - killed:.2f} s"
        while True:
            try:
                output = await engine.generate("Once", SamplingParams(temperature=0, max_tokens=4))
                break
            except Exception:
                if time.perf_counter() - killed > 60:
                    raise
                await asyncio.sleep(0.5)
        took = time.perf_counter() - killed
    return not children(), f"{said}; serves again after {took:.1f} s: {output.outputs[0].text!r}"


async def collect(engine: AsyncLLMEngine, params: SamplingParams, begun: asyncio.Event) -> None:
    async for _ in engine.generate("Once upon a time", params):
        begun.set()


def children() -> list[int]:
    """The processes of ranks that this one has started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = status.with_name("cmdline").read_bytes()
            if parent == os.getpid() and b"follower" in command:
                found.append(int(status.parent.name))
    return sorted(found)


def named_checks() -> dict[str, tuple[str, Any]]:
    """Name -> layout and a coroutine function."""
    checks: dict[str, tuple[str, Any]] = {}
    for layout in LAYOUTS:
        for engine in ENGINES if layout in ("tp2", "pp2") else ("graph",):
            name = f"{layout} = one, {engine}"
            checks[name] = layout, lambda a=layout, e=engine: ranks_as_one(a, e)
    checks["tp2, killed rank"] = "tp2", lambda: killed_rank("tp2")
    return checks


# --- sums ----------------------------------------------------------------------------------------


def sums_of_rank(rank: int, num_ranks: int, port: int) -> None:
    """In a process: compare and time; rank 0 prints. Ours also beyond the rows that it is for."""
    from asyncllm.kernels import all_reduce

    device = torch.device("cuda")
    if rank == 0:
        store = open_store(num_ranks, socket.create_server(("127.0.0.1", port)))
    else:
        store = wait_for_store(num_ranks, port)
    most = [
        sizes[num_ranks] for sizes in (all_reduce.MOST_IN_ONE_SHOT, all_reduce.MOST_IN_TWO_SHOTS)
    ]
    all_reduce.MOST_IN_ONE_SHOT[num_ranks] = all_reduce.MOST_IN_TWO_SHOTS[num_ranks] = 2 << 20
    mesh = CollectiveMesh(MeshConfig(tp=num_ranks, rank=rank), store, "127.0.0.1", device, SUM_SIZE)
    assert mesh.sums is not None, "the ranks do not reach each other's memory"
    if rank == 0:
        print(f"{torch.cuda.get_device_name()}; bf16 rows of {SUM_SIZE}; at most {most} bytes")
        print("| rows | NCCL, us | and norm | one shot | and norm | two shots | and norm |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        for rows in SUM_ROWS:
            us = sums_of_rows(mesh, num_ranks, rank, rows)
            if rank == 0:
                print(f"| {rows} | {' | '.join(us)} |", flush=True)
    mesh.close()
    os._exit(0)


def sums_of_rows(mesh: CollectiveMesh, num_ranks: int, rank: int, rows: int) -> list[str]:
    from asyncllm.kernels.all_reduce.kernel import all_reduce
    from asyncllm.kernels.rms_norm.kernel import add_rms_norm

    torch.manual_seed(rows)
    every = torch.randn(num_ranks, rows, SUM_SIZE, device="cuda", dtype=torch.bfloat16)
    norm = Norm(torch.ones(SUM_SIZE, dtype=torch.bfloat16, device="cuda"), 1e-5)
    x, residual = every[rank].clone(), torch.zeros_like(every[0])

    def by_nccl() -> torch.Tensor:
        own, mesh.sums = mesh.sums, None
        try:
            return mesh.reduce(x)
        finally:
            mesh.sums = own

    us = [captured_us(by_nccl), captured_us(lambda: add_rms_norm(by_nccl(), residual, norm))]
    assert mesh.sums is not None
    for max_rows, sums in mesh.sums.forms:
        if rows > max_rows:
            continue
        for _ in range(5):
            found = every[rank].clone()
            all_reduce(found, sums)
            assert (found.float() - every.float().sum(0)).abs().max() < 0.06, (rank, rows)
        us.append(captured_us(lambda form=sums: all_reduce(x, form)))
        us.append(captured_us(lambda form=sums: add_rms_norm(x, residual, norm, form)))
    return [f"{each:.1f}" for each in us]


def captured_us(run: Any) -> float:
    def many() -> tuple[()]:
        for _ in range(SUM_CALLS):
            run()
        return ()

    recorded = GraphPool().record(many)
    recorded.replay()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        recorded.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS / SUM_CALLS


def wait_for_store(num_ranks: int, port: int) -> Any:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return find_store(num_ranks, "127.0.0.1", port)
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("rank 0 does not listen")


# --- jobs on devices ----------------------------------------------------------------------------


@dataclass
class Job:
    name: str
    num_devices: int
    arguments: list[str]
    seconds: float


class Devices:
    """Which of the host's are free."""

    def __init__(self) -> None:
        self.free = set(range(torch.cuda.device_count()))
        self._changed = threading.Condition()

    def run(self, job: Job) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: len(self.free) >= job.num_devices)
            taken = sorted(self.free)[: job.num_devices]
            self.free.difference_update(taken)
        try:
            return run_job(job, taken)
        finally:
            with self._changed:
                self.free.update(taken)
                self._changed.notify_all()


def run_job(job: Job, devices: list[int]) -> bool:
    visible = ",".join(map(str, devices))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible, "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, __file__, *job.arguments]
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=job.seconds)
        failure = "" if process.returncode == 0 else f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)  # shows where its threads are
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        failure = f"not done within {job.seconds:g} s"
    took = time.perf_counter() - start
    lines = output.strip().splitlines()
    if failure:
        print(f"FAIL {job.name} ({took:.0f} s): {failure}", *lines[-40:], sep="\n    ", flush=True)
    else:
        results = [line for line in lines if re.match(r"[|{]|ok ", line)] or lines[-1:]
        print(f"ok   {job.name} ({took:.0f} s)", *results, sep="\n    ", flush=True)
    return not failure


def jobs_of(args: argparse.Namespace) -> list[Job]:
    jobs = []
    if args.sums:
        for num_ranks in RANKS:
            if num_ranks <= torch.cuda.device_count():
                name = f"sums of {num_ranks} ranks"
                jobs.append(Job(name, num_ranks, ["--sums-of", str(num_ranks)], CHECK_SECONDS))
    if args.checks is not None:
        for name, (layout, _) in named_checks().items():
            if not args.checks or any(word in name for word in args.checks):
                jobs.append(Job(name, num_devices(layout), ["--check", name], CHECK_SECONDS))
    for layout in args.layout if args.http else ():
        for model in args.model:
            run = ["--http", args.http, "--model", model, "--run-layout", layout]
            name = f"{Path(model).name} {layout}"
            jobs.append(Job(name, num_devices(layout), run, HTTP_SECONDS))
    return [job for job in jobs if job.num_devices <= torch.cuda.device_count()]


def run_sums(num_ranks: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    ranks = []
    for rank in range(num_ranks):
        order = [named[rank], *(each for place, each in enumerate(named) if place != rank)]
        own = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(order)}
        command = [sys.executable, __file__, "--sums-rank", f"{rank},{num_ranks},{port}"]
        ranks.append(subprocess.Popen(command, env=own))
    return max(abs(each.wait()) for each in ranks)


def run_layout(args: argparse.Namespace) -> int:
    flags = {"gpu_memory_utilization": args.memory, **LAYOUTS[args.run_layout]}
    for row in time_http(args.model[0], args.http.split(","), None, flags):
        row["result"].pop("conditions", None)
        print(json.dumps(row), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sums", action="store_true")
    parser.add_argument("--checks", nargs="*", metavar="WORD")
    parser.add_argument("--http", help="workloads of loadtest.py, by commas")
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--layout", action="append", default=[], choices=LAYOUTS)
    parser.add_argument("--memory", type=float, default=0.85, help="gpu_memory_utilization")
    for name in ("--check", "--sums-of", "--sums-rank", "--run-layout"):
        parser.add_argument(name, help=argparse.SUPPRESS)  # a job's own process
    args = parser.parse_args()
    if args.check:
        ok, detail = asyncio.run(named_checks()[args.check][1]())
        print(f"ok {detail}" if ok else detail, flush=True)
        return 0 if ok else 1
    if args.sums_of:
        return run_sums(int(args.sums_of))
    if args.sums_rank:
        sums_of_rank(*map(int, args.sums_rank.split(",")))
    if args.run_layout:
        return run_layout(args)
    devices = Devices()
    with ThreadPoolExecutor(max(len(devices.free), 1)) as threads:
        done = list(threads.map(devices.run, jobs_of(args)))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
