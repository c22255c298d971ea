"""Every query of the dashboard, run against the /metrics of a server that serves the tiny model."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from pathlib import Path
from typing import Any

from asyncllm import AsyncLLMEngine
from tests.server.http_harness import COMPLETIONS, run, serving
from tests.server.promql import Query, Scrape

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "asyncllm.json"
# Nothing fails or is swapped here; a rate of 0 / 0 is what it then should be.
MAY_BE_ZERO = re.compile(
    "aborts|preempt|swapped|padding|graph|starved|launch_lead|num_requests|kv_cache_usage|rank_lag"
)


VARIABLE = re.compile(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)")


def queries() -> list[tuple[str, str]]:
    """(panel, expression)"""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [(p["title"], t["expr"]) for p in dashboard["panels"] for t in p.get("targets", [])]
    assert all(p.get("targets") for p in dashboard["panels"] if p["type"] != "row")
    return found


def test_dashboard_is_well_formed() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", DASHBOARD.read_text()))
    assert used == names


def test_every_query_against_a_live_server() -> None:
    async def test() -> None:
        async with serving(small_engine()) as server:
            before = await scrape(server)
            started = time.monotonic()
            for _ in range(2):  # the second time the prompt's first page is cached
                await asyncio.gather(*(ask(server, number) for number in range(3)))
            seconds = time.monotonic() - started
            after = await scrape(server)
        selected = set()
        for panel, expr in queries():
            query = Query(expr, before, after, seconds)
            try:
                result = query.run()
            except (AssertionError, KeyError) as error:
                raise AssertionError(f"{panel}: {expr}: {error}") from error
            selected |= set(query.selected)
            assert result, panel
            zero = all(not value or math.isnan(value) for value in result.values())
            assert not zero or MAY_BE_ZERO.search(expr), f"{panel}: {expr}"
        for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                found = VARIABLE.fullmatch(variable["query"])
                assert found is not None, variable
                assert all(found[2] in dict(key) for key in after.samples[found[1]])
        # What nobody draws is named here, with its reason.
        drawn = {name.removesuffix("_bucket") for name in selected}
        not_drawn = {name for name in after.types if name.startswith("asyncllm:")} - drawn
        families = {re.sub("_(bucket|count|sum)$", "", name) for name in not_drawn} - drawn
        assert families == {
            "asyncllm:cache_config_info",  # constants
            "asyncllm:engine_up", "asyncllm:rank_up",  # /health says it, too
            "asyncllm:num_preemptions_total",  # by mode
            "asyncllm:num_requests_swapped", "asyncllm:num_requests_waiting",  # by reason
            "asyncllm:prompt_tokens_total", "asyncllm:prompt_tokens_cached_total",  # by source
            "asyncllm:request_max_num_generation_tokens", "asyncllm:request_params_n",
            "asyncllm:request_prefill_kv_computed_tokens",
        }  # fmt: skip

    run(test())


def small_engine() -> AsyncLLMEngine:
    return AsyncLLMEngine("tiny", num_gpu_blocks_override=120, max_num_seqs=8, swap_space=0.01)


async def scrape(server: Any) -> Scrape:
    _, text = await server.get("/metrics")
    return Scrape.parse(text, instance="127.0.0.1:8000", job="asyncllm")


async def ask(server: Any, number: int) -> None:
    prompt = f"Story {number}. " + "Once upon a time there was a little fox. " * 4
    body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True}
    status, answer = await server.post(COMPLETIONS, body)
    assert status == 200, answer
