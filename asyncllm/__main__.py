"""`python -m asyncllm` is the `asyncllm` command."""

from __future__ import annotations

import sys

from asyncllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
