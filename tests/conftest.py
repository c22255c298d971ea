"""Threads, Triton without a device, and what of the tests is slow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

# Small steps are quickest on one thread, and two processes of tests share two cores.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # the processes that tests start
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the real hub
# Read when Triton is imported: its kernels then run without a device, slowly.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

TESTS = Path(__file__).parent
# Whole folders and modules of the slow tier. Single tests are marked where they are.
SLOW = {
    TESTS / "clients",
    TESTS / "loadtesting" / "test_ceiling.py",
    TESTS / "loadtesting" / "test_page.py",
    TESTS / "loadtesting" / "test_real_server.py",
    TESTS / "loadtesting" / "test_runs.py",
    TESTS / "page" / "test_chat_page.py",
    TESTS / "page" / "test_docs_page.py",
    TESTS / "page" / "test_markdown.py",
    TESTS / "page" / "test_whole_page.py",
    TESTS / "server" / "test_schemathesis.py",
}


# Grids of which the fast tier runs these cases alone, by their parameters.
BACKEND = TESTS / "models" / "test_transformers_backend.py"
FAST_CASES = {
    (BACKEND, "test_families_equal_transformers"): {
        "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "FalconForCausalLM",
    },
    (BACKEND, "test_native_families_by_the_backend_are_the_same"): {
        "llama-chunked-recompute", "llama-batched", "llama-swap", "qwen2-windows-chunked-recompute",
    },
}  # fmt: skip


def pytest_itemcollected(item: pytest.Item) -> None:
    name, _, case = item.name.rstrip("]").partition("[")
    fast = FAST_CASES.get((item.path, name))
    is_left_out = fast is not None and case not in fast
    if is_left_out or not SLOW.isdisjoint((item.path, item.path.parent)):
        item.add_marker("slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Their imports alone take seconds of each process."""
    is_fast_tier = config.option.markexpr == "not slow"
    return True if is_fast_tier and collection_path in SLOW else None
