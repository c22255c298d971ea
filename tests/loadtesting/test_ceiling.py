"""The ceiling's search, on few streams: mock processes start, are loaded, and end."""

from __future__ import annotations

import json

import loadtest
import pytest

from loadtesting import ceiling, knee


def test_the_ceiling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ceiling, "NUM_STREAMS", 4)
    monkeypatch.setattr(ceiling, "PROBE_S", 0.2)
    monkeypatch.setattr(ceiling, "START_CHUNKS_PER_S", 100.0)
    monkeypatch.setattr(ceiling, "LEAST_CHUNKS_PER_S", 10.0)
    monkeypatch.setattr(knee, "MAX_PROBES", 2)
    flags = "--ceiling --processes 2 --mock-processes 2 --max-client-lag-ms 1e6"
    assert loadtest.main(flags.split()) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out.splitlines()[-1])
    offered = [probe["offered_chunks_per_s"] for probe in report["ceiling_probes"]]
    assert len(offered) == 2 and 100.0 in offered
    assert report["num_failed"] == 0
    assert "ceiling" in shown.err
