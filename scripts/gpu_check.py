#!/usr/bin/env python3
"""Checks and times asyncllm on one CUDA device, in one call, and prints Markdown for docs/log.

    scripts/gpu_check.py                         the correctness checks, on the built-in model
    scripts/gpu_check.py --model DIR [DIR ...]   and the workloads on these, with made-up weights
    ... --http                                   the workloads over HTTP too, by scripts/loadtest.py

The checks are in gpu_oracles.py, the workloads in gpu_timing.py. Exit status 1 if a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import torch
from gpu_oracles import CHECKS
from gpu_timing import WORKLOADS, time_engine, time_http


def run_checks() -> int:
    """Print a table of all checks; how many failed."""
    rows = []
    for name, check in CHECKS:
        try:
            ok, detail = asyncio.run(check())
        except Exception as error:  # whatever one check raises, the others must still run
            ok, detail = False, f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        rows.append((name, "ok" if ok else "FAILED", detail))
        print(f"{'ok  ' if ok else 'FAIL'} {name}: {detail}", file=sys.stderr, flush=True)
    print("| check | result | detail |\n| --- | --- | --- |")
    for row in rows:
        print("| {} | {} | {} |".format(*row))
    return sum(result != "ok" for _, result, _ in rows)


def time_model(model: str, http_workloads: list[str], out: Path | None) -> None:
    """Print a JSON line per workload: through the engine alone, then over HTTP."""
    print(f"\n{Path(model).name}, engine alone, dummy weights:\n", flush=True)
    for row in asyncio.run(time_engine(model, WORKLOADS)):
        print(json.dumps(row), flush=True)
    if http_workloads:
        print(f"\n{Path(model).name}, over HTTP:\n", flush=True)
        for row in time_http(model, http_workloads, out):
            print(json.dumps(row)[:1500], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="*", default=[], help="folders to time")
    parser.add_argument("--http", action="store_true", help="time over HTTP as well")
    parser.add_argument("--http-workloads", default="lat1,lat8,tput")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for full results")
    args = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    print(f"\n{properties.name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    failed = 0 if args.no_checks else run_checks()
    for model in args.model:
        time_model(model, args.http_workloads.split(",") if args.http else [], args.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
