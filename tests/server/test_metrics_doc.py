"""docs/metrics.md names every series, as the server has it.

`python -m tests.server.test_metrics_doc` prints the table anew.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from asyncllm.server.observability.metrics import Metrics
from tests.server.fake_engine import FakeEngine
from tests.server.test_metrics import VLLM

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ALWAYS = {"model_name", "engine", "le"}
HEAD = ["| `asyncllm:` | type | labels | vLLM's | |", "| --- | --- | --- | --- | --- |"]


async def table() -> list[str]:
    """One line per series."""
    engine = FakeEngine()
    engine.config.enable_lora = True
    text = Metrics(engine, "fake", "asyncllm").exposition().decode()
    lines = []
    for family in text_string_to_metric_families(text):
        if not family.name.startswith("asyncllm:"):
            continue
        name = family.name.removeprefix("asyncllm:")
        labels = {key: None for s in family.samples for key in s.labels if key not in ALWAYS}
        shown = ", ".join(f"`{label}`" for label in labels)
        known = "yes" if name in {*VLLM, "cache_config_info", "lora_requests_info"} else ""
        suffix = "_total" if family.type == "counter" else ""
        what = family.documentation
        lines.append(f"| `{name}{suffix}` | {family.type} | {shown} | {known} | {what} |")
    return [*HEAD, *lines]


def test_the_table_is_what_the_server_has() -> None:
    written = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    assert written == asyncio.run(table())


if __name__ == "__main__":
    print("\n".join(asyncio.run(table())))
