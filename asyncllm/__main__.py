"""`python -m asyncllm` is the `asyncllm` command."""

import sys

from asyncllm.cli import main

if __name__ == "__main__":
    sys.exit(main())
