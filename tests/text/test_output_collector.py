"""Deltas joined into wholes."""

from __future__ import annotations

from asyncllm.engine.output_collector import OutputCollector
from asyncllm.errors import RequestFailedError
from asyncllm.outputs import CompletionOutput, Logprob, RequestOutput


def delta(
    *completions: CompletionOutput, finished: bool = False, **fields: object
) -> RequestOutput:
    output = RequestOutput("r", "p", [1, 2], None, list(completions), finished)
    for name, value in fields.items():
        setattr(output, name, value)
    return output


def merge(collector: OutputCollector, update: RequestOutput) -> RequestOutput:
    collector.add(update)
    return collector.output


def test_deltas_add_up() -> None:
    collector = OutputCollector()
    first = CompletionOutput(0, "a", [5], -1.0, [{5: Logprob(-1.0)}])
    last = CompletionOutput(0, "b", [6], -3.0, [{6: Logprob(-2.0)}], "stop", "x")
    collector.add(delta(first, prompt_logprobs=[None, {2: Logprob(-1.0)}]))
    whole = merge(collector, delta(last, finished=True, num_cached_tokens=1))
    (completion,) = whole.outputs
    assert (completion.text, completion.token_ids) == ("ab", [5, 6])
    assert completion.logprobs == [{5: Logprob(-1.0)}, {6: Logprob(-2.0)}]
    assert completion.cumulative_logprob == -3.0
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "x")
    assert (whole.finished, whole.num_cached_tokens) == (True, 1)
    assert whole.prompt_logprobs == [None, {2: Logprob(-1.0)}]


def test_what_was_handed_out_stays_as_it_was() -> None:
    collector = OutputCollector()
    update = CompletionOutput(0, "a", [5], None, [{5: Logprob(-1.0)}])
    first = merge(collector, delta(update))
    merge(collector, delta(CompletionOutput(0, "b", [6], None, [{6: Logprob(-1.0)}])))
    assert (first.outputs[0].text, first.outputs[0].token_ids) == ("a", [5])
    assert (update.token_ids, update.logprobs) == ([5], [{5: Logprob(-1.0)}])
    assert len(first.outputs[0].logprobs or []) == 1


def test_completions_in_order_of_their_index() -> None:
    collector = OutputCollector()
    collector.add(delta(CompletionOutput(1, "b", [6], finish_reason="stop")))
    whole = merge(collector, delta(CompletionOutput(0, "a", [5])))
    assert [(c.index, c.text, c.finish_reason) for c in whole.outputs] == [
        (0, "a", None),
        (1, "b", "stop"),
    ]


def test_an_error_is_kept() -> None:
    collector = OutputCollector()
    error = RequestFailedError("broken")
    collector.add(delta(CompletionOutput(0, "", [], finish_reason="error"), error=error))
    assert merge(collector, delta(CompletionOutput(1, "b", [6]))).error is error
