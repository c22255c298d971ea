"""Each sampling parameter's meaning, as one distribution in float64: from vLLM's documents,
one token at a time, without a look at the sampler."""

from __future__ import annotations

import math

from asyncllm import SamplingParams


def reference_probs(
    logits: list[float],
    params: SamplingParams,
    prompt: list[int],
    outputs: list[int],
    stop_ids: frozenset[int] = frozenset(),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> list[float]:
    """The probability of each token to come next, after `prompt` and `outputs`."""
    scores = edited(logits, params, outputs, stop_ids, bad_words)
    scores = [penalised(x, token, params, prompt, outputs) for token, x in enumerate(scores)]
    if params.greedy:
        best = scores.index(max(scores))
        return [float(token == best) for token in range(len(scores))]
    scores = [x / params.temperature for x in scores]
    return filtered(scores, params)


def edited(
    logits: list[float],
    params: SamplingParams,
    outputs: list[int],
    stop_ids: frozenset[int],
    bad_words: tuple[tuple[int, ...], ...],
) -> list[float]:
    """Tokens that must not come at -inf, the bias added to the rest."""
    forbidden = set(stop_ids) if len(outputs) < params.min_tokens else set()
    for *begin, end in bad_words:
        if not begin or outputs[-len(begin) :] == begin:
            forbidden.add(end)
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(logits))) - set(params.allowed_token_ids)
    bias = params.logit_bias or {}
    return [
        -math.inf if token in forbidden else x + bias.get(token, 0.0)
        for token, x in enumerate(logits)
    ]


def penalised(
    x: float, token: int, params: SamplingParams, prompt: list[int], outputs: list[int]
) -> float:
    count = outputs.count(token)
    if count or token in prompt:
        x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    return x - params.frequency_penalty * count - params.presence_penalty * (count > 0)


def filtered(scores: list[float], params: SamplingParams) -> list[float]:
    """min-p, then top-k, then the smallest set of the rest that reaches top-p; renormalised.

    Of equals all are kept or none.
    """
    probs = softmax(scores)
    least = params.min_p * max(probs)
    ordered = sorted((p for p in probs if p >= least), reverse=True)
    if params.top_k > 0:
        ordered = [p for p in ordered if p >= ordered[: params.top_k][-1]]
    reached = 0.0
    for p in ordered:
        if params.top_p < 1 and reached >= params.top_p * sum(ordered):
            break
        reached += p
        least = p
    kept = [p if p >= least else 0.0 for p in probs]
    return [p / sum(kept) for p in kept]


def softmax(scores: list[float]) -> list[float]:
    best = max(scores)
    weights = [math.exp(x - best) for x in scores]
    return [weight / sum(weights) for weight in weights]
