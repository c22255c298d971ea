"""The cluster's simulation: the same numbers each time, and a model that gives measured figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
# docs/PERFORMANCE.md and docs/log/ranks.md, the 8B: device, workload -> figure -> value
MEASURED: dict[tuple[str, str], dict[str, float]] = {
    ("8b-h100", "lat8"): {"tpot_p50": 5.23, "ttft_p50": 16.2},
    ("8b-h100", "rate8"): {"tpot_p50": 6.35, "ttft_p50": 31.3},
    ("8b-h100", "long"): {"total_per_s": 31_807, "ttft_p50": 352},
    ("8b-tp2", "lat8"): {"tpot_p50": 2.42, "ttft_p50": 14.2},
    ("8b-tp2", "tput"): {"output_per_s": 17_200},  # without HTTP
    ("8b-tp4", "lat8"): {"tpot_p50": 1.56},
    ("8b-tp4", "tput"): {"output_per_s": 22_598},
}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def simulate(policy: str, seed: int = 0) -> dict[str, float]:
    import simulate_cluster as cluster

    traffic = cluster.Traffic(conversations_per_s=2.0, pause_s=1.0, mean_turns=4.0)
    result: dict[str, float] = cluster.simulate(2, policy, 4.0, traffic, seed)
    return result


@pytest.mark.usefixtures("scripts")
def test_a_small_cluster() -> None:
    """By affinity more is cached, and first tokens come sooner; the same numbers each time."""
    found = {name: simulate(name) for name in ("random", "round robin", "least load", "affinity")}
    assert all(each["requests"] > 10 for each in found.values())
    assert found["affinity"] == simulate("affinity")
    assert found["affinity"] != simulate("affinity", seed=1)
    best = found.pop("affinity")
    assert all(best["cached_share"] > each["cached_share"] for each in found.values())
    assert all(best["ttft_p50"] <= each["ttft_p50"] for each in found.values())


@pytest.mark.usefixtures("scripts")
def test_tensor_parallel_gpus_are_one_engine() -> None:
    """It gets the load of all, and answers as many requests of each GPU's, sooner."""
    import simulate_cluster as cluster

    traffic = cluster.Traffic(conversations_per_s=2.0, pause_s=1.0, mean_turns=4.0)
    one, two = (
        cluster.simulate(2, "affinity", 6.0, traffic, device_name=name) for name in ("8b", "8b-tp2")
    )
    assert two["requests"] == pytest.approx(one["requests"], rel=0.3)
    assert two["goodput"] == pytest.approx(one["goodput"], rel=0.3)
    assert two["tpot_p50"] < one["tpot_p50"]


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("policy", ["least load", "affinity"])
def test_a_sample_is_like_the_whole(policy: str) -> None:
    """Requests take as long, and find as much cached; by affinity which engines get how many
    depends on what their caches hold."""
    import simulate_cluster as cluster

    traffic = cluster.Traffic(conversations_per_s=2.0, pause_s=1.0, mean_turns=4.0)
    whole = cluster.simulate(8, policy, 6.0, traffic)
    sample = cluster.simulate(8, policy, 6.0, traffic, num_sampled=4)
    if policy == "least load":
        assert sample["requests"] == pytest.approx(whole["requests"] / 2, rel=0.2)
    assert sample["tpot_p50"] == pytest.approx(whole["tpot_p50"], rel=0.1)
    assert sample["cached_share"] == pytest.approx(whole["cached_share"], abs=0.1)


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize("num_sampled", [None, 1])
def test_nothing_is_lost(num_sampled: int | None) -> None:
    import simulate_cluster as cluster

    traffic = cluster.Traffic(conversations_per_s=2.0, pause_s=1.0, mean_turns=3.0)
    device = cluster.DEVICES["8b-h100"]
    router = cluster.policies(3, device.num_pages * cluster.BLOCK_SIZE, 0)["affinity"]()
    simulation = cluster.Simulation(3, device, traffic, router, 3.0, 0, num_sampled)
    simulation.run()
    for client in simulation.ended:
        assert client.arrival < client.first <= client.last
    assert len(simulation.ended) > 5 and not simulation._clients
    router.check_integrity()
    assert all(router.load(rank) == 0 for rank in range(3))
    for engine in simulation._engines.values():
        engine.scheduler.check_empty()


@pytest.mark.slow
@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(("name", "workload"), MEASURED)
def test_the_model_gives_measured_figures(name: str, workload: str) -> None:
    import simulate_schedule as schedule

    device = schedule.DEVICES[name]
    policy = schedule.policies(device)["default"]
    found: dict[str, Any] = schedule.simulate(device, schedule.WORKLOADS[workload], policy)
    for figure, value in MEASURED[name, workload].items():
        assert found[figure] == pytest.approx(value, rel=0.1), figure
