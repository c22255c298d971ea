#!/usr/bin/env python3
"""Checks and times asyncllm on one CUDA device, in one call, and prints Markdown for docs/log.

    scripts/gpu_check.py                         the correctness checks, on the built-in model
    scripts/gpu_check.py --model DIR [DIR ...]   and the workloads on these, with made-up weights,
                                                 over HTTP, by scripts/loadtest.py

The checks are in gpu_oracles.py, the workloads in gpu_timing.py. The engine without HTTP is timed
by `asyncllm bench`. Exit status 1 if a check failed.
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
from gpu_timing import figures, time_http


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="*", default=[], help="folders to time")
    parser.add_argument("--workloads", default="lat1,lat8,tput", help="of loadtest.py, by commas")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for full results")
    args = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    print(f"\n{properties.name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    failed = 0 if args.no_checks else run_checks()
    for model in args.model:
        print(f"\n{Path(model).name}, dummy weights:\n", flush=True)
        for row in time_http(model, args.workloads.split(","), args.out):
            print(json.dumps(figures(row)), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
