#!/usr/bin/env python3
"""Checks and times models on several CUDA devices of one host.

    scripts/gpu_ranks.py --sums               sums over ranks: right, and us by rows and kind
    scripts/gpu_ranks.py --checks [WORDS]     ranks against one rank, on the built-in model; those
                                              whose name has one of the words
    scripts/gpu_ranks.py --http lat1,tput --model DIR --layout tp2 [--layout tp4 ...]
                                              the workloads over HTTP, by gpu_timing.py
    scripts/gpu_ranks.py --steps --model DIR --layout tp2 ...
                                              step times, for the simulations

A check or a layout runs in a process of its own, on as many devices as it needs; several run beside
each other where there are devices. Exit status 1 if something failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_timing import figures, time_http
from rank_checks import LAYOUTS, named_checks
from rank_steps import measure as measure_steps
from rank_sums import run_sums

from asyncllm.kernels.all_reduce import RANKS

CHECK_SECONDS = 120
HTTP_SECONDS = 400


def num_devices(layout: str) -> int:
    sizes = [size for name, size in LAYOUTS[layout].items() if name.endswith("_size")]
    product = 1
    for size in sizes:
        product *= size
    return product


# --- jobs on devices ----------------------------------------------------------------------------


@dataclass
class Job:
    name: str
    num_devices: int
    arguments: list[str]
    seconds: float


class Devices:
    """Those that this process may use and that are free, as CUDA_VISIBLE_DEVICES names them."""

    def __init__(self) -> None:
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.free = set(named.split(",") if named else map(str, range(torch.cuda.device_count())))
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


def run_job(job: Job, devices: list[str]) -> bool:
    visible = ",".join(devices)
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
    for layout in args.layout if args.steps else ():
        for model in args.model:
            run = ["--steps-of", layout, "--model", model]
            jobs.append(Job(f"steps of {layout}", num_devices(layout), run, HTTP_SECONDS))
    for layout in args.layout if args.http else ():
        for model in args.model:
            run = ["--http", args.http, "--model", model, "--run-layout", layout]
            name = f"{Path(model).name} {layout}"
            jobs.append(Job(name, num_devices(layout), run, HTTP_SECONDS))
    return [job for job in jobs if job.num_devices <= torch.cuda.device_count()]


def run_layout(args: argparse.Namespace) -> int:
    flags = {"gpu_memory_utilization": args.memory, **LAYOUTS[args.run_layout]}
    for row in time_http(args.model[0], args.http.split(","), None, flags):
        print(json.dumps(figures(row)), flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sums", action="store_true")
    parser.add_argument("--checks", nargs="*", metavar="WORD")
    parser.add_argument("--http", help="workloads of loadtest.py, by commas")
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--layout", action="append", default=[], choices=LAYOUTS)
    parser.add_argument("--memory", type=float, default=0.85, help="gpu_memory_utilization")
    parser.add_argument("--steps", action="store_true")
    for name in ("--check", "--sums-of", "--run-layout", "--steps-of"):
        parser.add_argument(name, help=argparse.SUPPRESS)  # a job's own process
    args = parser.parse_args()
    if args.check:
        ok, detail = asyncio.run(named_checks()[args.check][1]())
        print(f"ok {detail}" if ok else detail, flush=True)
        return 0 if ok else 1
    if args.sums_of:
        return run_sums(int(args.sums_of))
    if args.steps_of:
        asyncio.run(measure_steps(args.model[0], args.steps_of))
        return 0
    if args.run_layout:
        return run_layout(args)
    devices = Devices()
    jobs = jobs_of(args)
    if not jobs:
        parser.error("nothing to do with these words and devices")
    with ThreadPoolExecutor(max(len(devices.free), 1)) as threads:
        done = list(threads.map(devices.run, jobs))
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
