"""The `asyncllm` command as a process: `python -m asyncllm`, or the installed script.

Behind `main` nothing is open any more, but Python would take apart all that torch and transformers
made, object by object: 0.85 s of CPU for which whoever waits for the process waits too. So it ends
at the end of its exit handlers, which run as usual, after the last thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

from asyncllm.cli import main


def run() -> int:
    """Run `main`: what it raises, `SystemExit` too, ends the process as usual."""
    codes: list[int] = []
    atexit.register(_leave, codes)  # handlers run in reverse order: this one after all later ones
    codes.append(main())
    return codes[0]


def _leave(codes: list[int]) -> None:
    if not codes:
        return
    logging.shutdown()  # registered earlier, when it was imported
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(codes[0])


if __name__ == "__main__":
    sys.exit(run())
