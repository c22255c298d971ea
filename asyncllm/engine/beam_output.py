"""The words of a beam search: its best beams as completions.

They come all at once, so many tokens that to detokenise them on the loop would delay everybody:
`render` is for a thread, and raises nothing.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from asyncllm.engine.beam_search import Beam, EndedSearch
from asyncllm.engine.output_logprobs import logprob_dict, token_text
from asyncllm.engine.text.sequence_text import hides_last_token, sequence_text
from asyncllm.engine.text.stop_checker import StopStrings
from asyncllm.engine.text.tokenizer import Tokenizer
from asyncllm.errors import output_failed
from asyncllm.outputs import CompletionOutput, RequestOutput, SampleLogprobs
from asyncllm.types import Sequence

logger = logging.getLogger(__name__)


def render(
    search: EndedSearch, output: RequestOutput, tokenizer: Tokenizer | None
) -> RequestOutput:
    """`output` with its completions, or with the error that they met."""
    request, num_returned = search.request, search.request.sampling_params.n
    pairs = list(zip(request.sequences, search.beams, strict=True))
    num_rest = sum(beam.num_tokens for _, beam in pairs[num_returned:])
    try:
        best = [_completion(seq, beam, tokenizer) for seq, beam in pairs[:num_returned]]
    except Exception as error:  # one request's own: it may only hurt itself
        logger.exception("request %s: output failed", request.request_id)
        return replace(output, error=output_failed(request.request_id, error))
    return replace(output, outputs=best, num_unreturned_tokens=num_rest)


def _completion(seq: Sequence, beam: Beam, tokenizer: Tokenizer | None) -> CompletionOutput:
    assert seq.finish_reason is not None, f"sequence {seq.seq_id} has not ended"
    path = beam.path()
    token_ids = [step.token_id for step in path]
    return CompletionOutput(
        seq.index,
        _text(seq, token_ids, tokenizer),
        token_ids,
        beam.total,
        _logprobs(seq, path, tokenizer),
        seq.finish_reason.value,
        seq.stop_reason,
    )


def _text(seq: Sequence, token_ids: list[int], tokenizer: Tokenizer | None) -> str:
    text = sequence_text(seq.request, tokenizer, StopStrings(()))
    if hides_last_token(seq):
        token_ids = token_ids[:-1]
    return "".join([text.push(token_id, False)[0] for token_id in token_ids]) + text.close()


def _logprobs(
    seq: Sequence, path: list[Beam], tokenizer: Tokenizer | None
) -> SampleLogprobs | None:
    num_top = seq.request.num_shown_logprobs
    if num_top is None:
        return None
    text_of = token_text(seq.request.sampling_params, tokenizer)
    return [
        logprob_dict(step.token_id, step.logprobs, num_top, text_of)
        for step in path
        if step.logprobs is not None
    ]
