"""A device's clock for tests of what is timed by its events: it stands still but for the test."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch


class DeviceClock:
    """A clock that CUDA's events read, from here on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ms = 0.0
        stream = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", self._event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)

    def _event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(ms=None)
        event.record = lambda: setattr(event, "ms", self.ms)
        event.elapsed_time = lambda end: end.ms - event.ms
        return event
