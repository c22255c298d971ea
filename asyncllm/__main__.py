"""The `asyncllm` command as a process: `python -m asyncllm`, or the installed script.

After `main` nothing is open any more, but Python would spend 0.85 s of CPU on deleting the objects
of torch and transformers. So the process exits right after its exit handlers, which run as usual,
after the last thread has ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

from asyncllm.cli import main


def run() -> int:
    """Run `main`. Exceptions, including `SystemExit`, end the process as usual."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # handlers run in reverse order, so this one is the last
    codes.append(main())
    return codes[0]


def _leave(codes: list[int]) -> None:
    if not codes:
        return
    logging.shutdown()  # its own handler was registered earlier, so it would not run
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it may be closed
            stream.flush()
    os._exit(codes[0])


if __name__ == "__main__":
    sys.exit(run())
