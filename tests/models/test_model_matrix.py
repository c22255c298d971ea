"""docs/model_matrix.md says what scripts/model_matrix.py finds.

A quarter of the classes that it has results of is examined again, drawn with a seed that is
printed. `scripts/model_matrix.py` examines all.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncllm.model_config import ARCHITECTURES
from tests.script_module import import_script

ROOT = Path(__file__).parents[2]
matrix = import_script(ROOT / "scripts" / "model_matrix.py")
page = import_script(ROOT / "scripts" / "model_matrix_page.py")
TEXT = (ROOT / "docs" / "model_matrix.md").read_text().partition("\n## ")[0]
ROWS = {
    name: (served, reason)
    for name, served, reason in re.findall(r"^\| (\w+) \| (.*?) \| ?(.*?) ?\|$", TEXT, re.MULTILINE)
    if name != "class"
}
IS_DOCUMENTED = f"transformers {transformers.__version__}:" in TEXT
NOT_COMPARED = "not compared: the script was not run on it to its end"
# The processes of one run share it, and so draw alike.
SEED = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(time.time_ns())
SHARES = 4  # each ends well before faulthandler_timeout


def test_every_class_is_listed() -> None:
    classes = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert not IS_DOCUMENTED or set(ROWS) == classes
    served = {name for name, row in ROWS.items() if row[0] != "-"}
    assert {name for name in served if ROWS[name][0] == "native"} <= {*ARCHITECTURES}
    assert all(reason for name, (_, reason) in ROWS.items() if name not in served)
    assert not any(reason.startswith("wrong") for _, reason in ROWS.values())


def test_rows_are_made_of_results() -> None:
    served = "by backend", "1e-06"
    refused = "refused", "architectures 'BForCausalLM' has x, which is not served"
    results = matrix.Results("2", {"BForCausalLM": refused, "AForCausalLM": served})
    text = matrix.markdown(results)
    rows = "| AForCausalLM | transformers' code |  |\n| BForCausalLM | - | refused: has x |\n"
    assert text.endswith(rows) and "1 refused, 1 transformers' code." in text
    older = matrix.Results("1", {"BForCausalLM": ("native", "0")})
    both = matrix.markdown(results, older)
    assert "transformers 1, the oldest" in both
    assert "Of 1 classes that were examined with it: 1 native. These differ:\n" in both
    assert both.partition("\n## ")[0].endswith(rows)
    assert both.endswith("| --- | --- | --- |\n| BForCausalLM | native |  |\n")


@pytest.mark.slow
@pytest.mark.skipif(not IS_DOCUMENTED, reason="docs/model_matrix.md is of another transformers")
@pytest.mark.parametrize("share", range(SHARES))
def test_a_quarter_of_the_classes_is_as_documented(share: int, tmp_path: Path) -> None:
    """By the command: it forks for each class, which a process with threads as a test's cannot."""
    print(f"seed {SEED}")
    compared = sorted(name for name, (_, reason) in ROWS.items() if reason != NOT_COMPARED)
    drawn = random.Random(SEED).sample(compared, len(compared) // 4)
    results = tmp_path / "results.json"
    command = [sys.executable, ROOT / "scripts" / "model_matrix.py", "--json", results]
    subprocess.run([*command, *drawn[share::SHARES]], check=True, timeout=280)
    wrong = {}
    for name, (verdict, details) in matrix.Results.read(results).rows.items():
        served, reason = ROWS[name]
        found = page.SERVED.get(verdict, "-")
        if found != served or (found == "-" and not reason.startswith(verdict)):
            wrong[name] = (served, verdict, details)
    assert not wrong, f"seed {SEED}: {wrong}"
