"""Threads, Triton without a device, and what of the tests is slow."""

from __future__ import annotations

import os
from collections import Counter
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


# Grids of which the fast tier runs each nth case alone, in the order in which they are collected.
# Numbers that do not divide a grid's sides take another column in each row.
EACH_NTH = {
    ("cuda/test_balanced_decode.py", "test_equals_the_reference"): 9,
    ("cuda/test_skinny_gemm.py", "test_a_product_by_a_factor_and_with_a_bias"): 7,
    ("engine/test_against_transformers.py", "test_tokens_and_logprobs_equal"): 23,
    ("engine/test_beam_search_random.py", "test_random_searches"): 5,
    ("engine/test_lora.py", "test_each_target_alone"): 11,
    ("engine/test_lora.py", "test_equals_the_merged_models"): 29,
    ("engine/test_lora.py", "test_every_family_and_target"): 23,
    ("engine/test_lora.py", "test_whole_weights_and_magnitudes"): 11,
    (
        "engine/test_non_finite.py",
        "test_only_the_poisoned_request_fails_and_its_pages_are_clean",
    ): 9,
    ("engine/test_penalties.py", "test_counts_are_what_was_said"): 9,
    ("engine/test_penalties.py", "test_whatever_becomes_of_a_sequence"): 7,
    ("engine/test_recurrent.py", "test_a_second_turn_goes_on_from_the_first_ones_answer"): 13,
    ("engine/test_recurrent.py", "test_captured_steps"): 5,
    ("engine/test_recurrent.py", "test_tokens_and_logprobs_equal"): 13,
    ("models/test_transformers_backend.py", "test_families_equal_transformers"): 11,
    ("models/test_transformers_backend.py", "test_native_families_by_the_backend_are_the_same"): 23,
    ("worker/test_graphs.py", "test_a_later_capture_writes_to_no_page_that_was_used"): 5,
    ("worker/test_graphs.py", "test_graphed_equals_eager"): 4,
    ("worker/test_graphs.py", "test_masks_on_captured_steps_equal_eager"): 7,
    ("worker/test_graphs.py", "test_more_changes_of_slots_than_one_step_brings"): 11,
}
_num_seen: Counter[tuple[str, str]] = Counter()


def pytest_itemcollected(item: pytest.Item) -> None:
    if not SLOW.isdisjoint((item.path, item.path.parent)):
        item.add_marker("slow")
    grid = str(item.path.relative_to(TESTS)), item.name.partition("[")[0]
    if grid in EACH_NTH:
        if _num_seen[grid] % EACH_NTH[grid] > 0:
            item.add_marker("slow")
        _num_seen[grid] += 1


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Their imports alone take seconds of each process."""
    is_fast_tier = config.option.markexpr == "not slow"
    return True if is_fast_tier and collection_path in SLOW else None
