#!/usr/bin/env python3
"""Checks and times models of published shapes, with made-up weights, on one CUDA device.

    scripts/gpu_shapes.py                       lists the shapes
    scripts/gpu_shapes.py check [NAME ...]      fast paths against slow ones, on a few layers
    scripts/gpu_shapes.py time [NAME ...]       lat1, lat8 and a short tput of all layers, by the
        engine without HTTP, with the share of the bytes that a decode step must read; --profile:
        and the kernels of a step
    scripts/gpu_shapes.py memory [NAME ...]     KV pages that 24 GiB leave, at a start without load
    scripts/gpu_shapes.py http NAME ...         lat1, lat8, tput over HTTP

Each shape is a process with a time limit of its own: a crash, a hang or a lack of memory costs that
shape alone, and its last lines are printed. Of checks several run at once; the others run one at a
time, while the next ones import what they need. What does not begin within `--within` is left out.
The last line is JSON. Exit status 1 if a check, or a shape, failed.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from model_shapes import CASES

SECONDS = {"check": 150.0, "time": 90.0, "memory": 60.0, "http": 200.0}  # of a shape
CHECKS_AT_ONCE = 4
AHEAD = 2  # processes that are imported while others have the device
STACKS_S = 5.0  # to print stacks
LAST_LINES = 30  # of what fails
GO = "go\n"
IMPORTED = "asyncllm.worker.worker", "triton", "transformers.models.auto"  # slow, without a device


class Shapes:
    """Runs the shapes, each in a process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._deadline = time.monotonic() + options.within
        self._device = threading.Semaphore(options.at_once)
        self._printing = threading.Lock()
        self.results: dict[str, dict[str, Any]] = {}

    def run(self) -> None:
        num_threads = self._options.at_once + AHEAD
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(self._run_one, self._options.names))

    def _run_one(self, name: str) -> None:
        with tempfile.TemporaryFile("w+") as output:
            command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, text=True,
                start_new_session=True,
            )  # fmt: skip
            begun = time.monotonic()
            with self._device:
                begun = time.monotonic()
                status = self._wait(process)
            seconds = round(time.monotonic() - begun, 1)
            output.seek(0)
            self._report(name, status, seconds, output.read())

    def _wait(self, process: subprocess.Popen[str]) -> str:
        """Wait for a shape and return its status. Ends all processes that it started."""
        left = self._deadline - time.monotonic()
        status = "left out"
        try:
            if left > 0:
                process.communicate(GO, timeout=min(left, self._options.seconds))
                status = "ok" if process.returncode == 0 else f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            status = "out of time"
            process.send_signal(signal.SIGABRT)  # it prints its stacks
            with suppress(subprocess.TimeoutExpired):
                process.wait(STACKS_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return status

    def _report(self, name: str, status: str, seconds: float, output: str) -> None:
        lines = output.splitlines()
        is_whole = bool(lines) and lines[-1].startswith("{")
        result = json.loads(lines.pop()) if is_whole else {}
        self.results[name] = {"status": status, "seconds": seconds} | result
        with self._printing:
            print(f"{'ok  ' if status == 'ok' else 'FAIL'} {name}: {status}, {seconds} s")
            shown = [line for line in lines if line.startswith(("ok  ", "FAIL", "     "))]
            print("\n".join(shown if status == "ok" else lines[-LAST_LINES:]), flush=True)


def run_child(options: argparse.Namespace) -> int:
    """Run one shape, as soon as the device is free for this process."""
    import shape_checks
    import shape_times

    from asyncllm.child_process import end_with

    end_with(os.getppid())  # also if this script is killed
    faulthandler.enable()
    name = options.only
    for module in IMPORTED:
        importlib.import_module(module)
    if sys.stdin.readline() != GO:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        given = name, CASES[name], Path(folder)
        if options.what == "check":
            result = asyncio.run(shape_checks.check(*given))
        elif options.what == "time":
            result = asyncio.run(shape_times.measure(*given, options))
        elif options.what == "memory":
            result = asyncio.run(shape_times.measure_memory(*given))
        else:
            result = shape_times.measure_http(*given, options)
    print(json.dumps(result), flush=True)
    return 1 if "FAIL" in str(result.get("checks")) else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=[*SECONDS])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all where none is given")
    parser.add_argument("--profile", action="store_true", help="time: and a step's kernels")
    parser.add_argument("--workloads", default="lat1,lat8,tput", help="http: of loadtest.py")
    parser.add_argument("--tokenizer", help="http: a folder's")
    parser.add_argument("--tb-per-s", type=float, default=3.05, help="what the device can read")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds for all shapes")
    parser.add_argument("--seconds", type=float, help="for one shape")
    parser.add_argument("--at-once", type=int, help=f"shapes; of checks {CHECKS_AT_ONCE}, else 1")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what is None:
        print("\n".join(CASES))
        return 0
    if unknown := {*options.names} - {*CASES}:
        parser.error(f"no such shape: {', '.join(sorted(unknown))}")
    if options.what == "http" and not options.tokenizer:
        parser.error("http needs --tokenizer: a shape has none")
    options.names = options.names or [*CASES]
    options.seconds = options.seconds or SECONDS[options.what]
    options.at_once = options.at_once or (CHECKS_AT_ONCE if options.what == "check" else 1)
    if options.only:
        return run_child(options)
    shapes = Shapes(options)
    shapes.run()
    print(json.dumps({options.what: shapes.results}))
    return 1 if any(result["status"] != "ok" for result in shapes.results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
