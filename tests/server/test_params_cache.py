"""Parameters that requests with the same fields share, and what keeps them few and small."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncllm.sampling_params import SamplingParams
from asyncllm.server import completions
from asyncllm.server.completions import MAX_CACHED_PARAMS, ParamsCache
from asyncllm.server.inputs.refusals import sent_fields
from asyncllm.server.inputs.sampling import completion_params
from asyncllm.server.protocol import CompletionRequest
from tests.server.http_harness import COMPLETIONS, run, serving


def test_equal_fields_share_parameters_and_others_do_not() -> None:
    known = ParamsCache()
    first = known.get((1, None), SamplingParams)
    assert known.get((1, None), SamplingParams) is first
    assert known.get((2, None), SamplingParams) is not first
    assert known.get(([1],), SamplingParams) is not known.get(([1],), SamplingParams)


def test_only_so_many_are_kept_and_none_that_were_refused() -> None:
    known = ParamsCache()
    first = known.get((0,), SamplingParams)
    for number in range(1, MAX_CACHED_PARAMS + 1):
        known.get((number,), SamplingParams)
    assert len(known._params) == MAX_CACHED_PARAMS
    assert known.get((0,), SamplingParams) is not first, "the oldest is forgotten"
    with pytest.raises(ValueError, match="temperature"):
        known.get(("hot",), lambda: SamplingParams(temperature=-1))
    assert ("hot",) not in known._params


class Overrides:
    """An input processor that only says what it is asked for."""

    def default_params(self, overrides: dict[str, Any]) -> Any:
        return overrides


@pytest.mark.parametrize("name", sorted(completions._NOT_PARAMS))
def test_what_does_not_decide_changes_no_parameter(name: str) -> None:
    plain = CompletionRequest(prompt="a")
    more = CompletionRequest(**{"prompt": "a", name: "b"})
    overrides: Any = Overrides()
    assert completions._params_key(plain) == completions._params_key(more)
    assert completion_params(plain, sent_fields(plain), overrides) == completion_params(
        more, sent_fields(more), overrides
    )


def test_each_request_is_answered_by_its_own_fields() -> None:
    bodies = [
        {"prompt": "a", "max_tokens": 3},
        {"prompt": "bb", "max_tokens": 3, "user": "somebody"},
        {"prompt": "a", "max_tokens": 4},
        {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "max_tokens": 3, "stop": ["x"]},
    ]

    async def test() -> None:
        async with serving() as server:
            for body in bodies * 2:
                async with server.session.post(server.url + COMPLETIONS, json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()
            status, error = await server.post(COMPLETIONS, {"prompt": "a", "guided_json": {}})
            assert (status, error["error"]["param"]) == (400, "guided_json")
        params = [request.params for request in server.engine.seen]
        assert [one.max_tokens for one in params] == [3, 3, 4, 3, 3] * 2
        assert params[0] is params[1] is params[5], "the prompt and the user decide nothing"
        assert params[4].stop == ["x"] and not params[0].stop

    run(test())


def test_threads_that_prepare_large_requests_do_not_disturb_each_other() -> None:
    known = ParamsCache()

    async def fill(first: int) -> None:
        def work() -> None:
            for number in range(first, first + 20 * MAX_CACHED_PARAMS):
                known.get((number,), SamplingParams)

        await asyncio.to_thread(work)

    async def test() -> None:
        await asyncio.gather(fill(0), fill(100_000))

    asyncio.run(test())
    assert len(known._params) == MAX_CACHED_PARAMS
