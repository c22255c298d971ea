"""Clients get the right outputs where something comes between a step's `take` and its `emit`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from asyncllm.engine.beam_search import BeamSearchClient
from asyncllm.engine.live_requests import LiveRequests
from asyncllm.engine.stats import AbortCause
from asyncllm.outputs import RequestOutput
from asyncllm.types import StepResult, TokenLogprobs
from tests.engine.builders import make_request, make_scheduler, scheduled_requests


class Rig:
    """One request that has had its first step, and what its client has heard."""

    def __init__(self, max_tokens: int, **params: Any) -> None:
        self.aborts: Counter[AbortCause] = Counter()
        self.heard: list[RequestOutput] = []
        self.live = LiveRequests(
            make_scheduler(), None, self.aborts,
            max_queued_requests=9, max_queued_tokens=999, max_queue_seconds=60.0,
        )  # fmt: skip
        request = make_request(1, [1, 2, 3], max_tokens=max_tokens, detokenize=False, **params)
        if request.sampling_params.use_beam_search:
            search = BeamSearchClient(request, [2], self.live, self.heard.append, lambda: None)
            self.live.add(request, search.receive, None)
            search.ask()
        else:
            self.live.add(request, self.heard.append, None)

    def take(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        plan = self.live.scheduler.plan()
        assert plan is not None
        self.live.planned(plan)
        self.live.take(plan, StepResult([token_id], [logprobs]))

    @property
    def reasons(self) -> list[str | None]:
        return [output.outputs[0].finish_reason for output in self.heard]


def test_a_step_is_told_once() -> None:
    rig = Rig(max_tokens=2)
    rig.take(7)
    assert not rig.heard
    rig.live.emit()
    rig.live.emit()
    assert rig.reasons == [None]
    rig.take(8)
    rig.live.emit()
    assert rig.reasons == [None, "length"]
    rig.live.check_empty()


@pytest.mark.parametrize("max_tokens", [1, 5], ids=["ended by the step", "going on"])
def test_who_leaves_before_it_is_told_hears_of_its_end_alone(max_tokens: int) -> None:
    rig = Rig(max_tokens)
    rig.take(7)
    assert rig.live.abort("r1", "disconnect")
    rig.live.emit()
    assert rig.reasons == ["abort"] and not rig.heard[0].outputs[0].token_ids
    assert rig.aborts == {"disconnect": 1}
    assert not rig.live.abort("r1", "disconnect")
    rig.live.check_empty()


def test_a_search_whose_client_left_before_it_is_told_leaves_nothing() -> None:
    rig = Rig(max_tokens=1, use_beam_search=True, n=1)
    rig.take(7, TokenLogprobs(-1.0, 1, [7, 8], [-1.0, -2.0]))
    assert rig.live.abort("r1", "disconnect")
    rig.live.emit()
    assert rig.reasons == ["abort"]
    rig.live.check_empty()


@pytest.mark.parametrize("max_tokens", [1, 5], ids=["ended by the step", "going on"])
def test_what_a_failed_step_could_not_tell_ends_with_its_error(max_tokens: int) -> None:
    rig = Rig(max_tokens)
    rig.take(7)
    rig.live.restart(make_scheduler(), "boom", keep_queued=True)
    rig.live.emit()
    assert rig.reasons == ["error"]
    rig.live.check_empty()


def test_the_id_of_what_is_not_told_yet_is_taken() -> None:
    rig = Rig(max_tokens=1)
    rig.take(7)
    assert "r1" in rig.live.outputs.requests and "r1" not in scheduled_requests(rig.live.scheduler)
    rig.live.emit()
    assert "r1" not in rig.live.outputs.requests
