"""Buffers in rotation: none is written before what was enqueued to read it is done."""

from __future__ import annotations

import itertools

import pytest
import torch

from asyncllm.attention.rotating_buffers import RotatingBuffers


def test_a_buffer_waits_for_the_copies_out_of_it_and_for_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[str, int]] = []

    class Event:
        numbers = itertools.count()

        def __init__(self, device: torch.device) -> None:
            self.number = next(self.numbers)

        def synchronize(self) -> None:
            seen.append(("wait", self.number))

        def record(self) -> None:
            seen.append(("record", self.number))

    monkeypatch.setattr(torch, "Event", Event)
    buffers = RotatingBuffers([0, 1, 2], torch.device("cuda"))
    for _ in range(5):
        with buffers as buffer:
            seen.append(("write", buffer))
    verbs = ("wait", "write", "record")
    assert seen == [(verb, buffer) for buffer in (1, 2, 0, 1, 2) for verb in verbs]


def test_a_cpu_has_read_by_then() -> None:
    buffers = RotatingBuffers(["a", "b"], torch.device("cpu"))
    given = []
    for _ in range(3):
        with buffers as buffer:
            given.append(buffer)
    assert given == ["b", "a", "b"]
