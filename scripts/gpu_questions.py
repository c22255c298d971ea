"""The questions of gpu_oracles.py to engines: their arguments, kinds of sampling, questions.

`ROOMY` holds all questions at once; in `TIGHT` they need three times the pages there are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from asyncllm import SamplingParams, StructuredOutputsParams

Args = dict[str, Any]

ROOMY: Args = {
    "num_gpu_blocks_override": 2000,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "swap_space": 0.2,
    "dtype": "bfloat16",
}
TIGHT = ROOMY | {"num_gpu_blocks_override": 24}
EAGER = ROOMY | {"enforce_eager": True}
GREEDY = [SamplingParams(temperature=0, max_tokens=64)]
SCORED = [SamplingParams(temperature=0, max_tokens=64, prompt_logprobs=0)]
SAMPLED = [
    SamplingParams(temperature=1.0, seed=3, max_tokens=48),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=4, max_tokens=48),
    SamplingParams(
        temperature=0, repetition_penalty=1.2, presence_penalty=0.5, logprobs=3, max_tokens=48
    ),
    SamplingParams(
        temperature=0.7,
        seed=5,
        allowed_token_ids=list(range(1000)),  # what it wants to say: elsewhere many are near ties
        logit_bias={101: -5.0},
        min_tokens=3,
        max_tokens=48,
    ),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "sum": {"type": "integer", "minimum": 0, "maximum": 9999},
        "sure": {"enum": ["yes", "no"]},
    },
    "required": ["sum", "sure"],
    "additionalProperties": False,
}

# Few choices: batches differ by when masks come, and in free text some token is a near tie.
REASON = "(yes|no|maybe), because of the (rain|wind|snow|sun)"


def favour_digits(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor."""
    logits[16:26] += len(output_token_ids) % 3
    return logits


# Rows whose sampling waits for the host, between rows that do not.
HOSTED = [
    SamplingParams(temperature=0, max_tokens=48),
    SamplingParams(
        temperature=0,
        max_tokens=48,
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    ),
    SamplingParams(
        temperature=1.0,
        seed=6,
        max_tokens=48,
        structured_outputs=StructuredOutputsParams(regex=REASON),
    ),
    SamplingParams(temperature=0, max_tokens=48, logits_processors=[favour_digits]),
    SamplingParams(temperature=0.8, seed=7, max_tokens=48, bad_words=["the capital", "is a"]),
]
# Rows that the captured sampler filters.
FILTERED = [
    SamplingParams(temperature=0.6, top_k=20, top_p=0.95, seed=9, max_tokens=48),
    SamplingParams(temperature=0.9, min_p=0.05, seed=10, max_tokens=48, logprobs=2),
    SamplingParams(temperature=0, max_tokens=48),
    SamplingParams(temperature=1.0, top_p=0.5, seed=11, max_tokens=48),
    SamplingParams(temperature=1.2, top_k=1000, top_p=0.9999, seed=12, max_tokens=48),
]
# And that it penalises, by what was said and by what the prompt says.
PENALISED = [
    SamplingParams(temperature=0, max_tokens=48, frequency_penalty=0.4),
    SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, presence_penalty=1.5, seed=13, max_tokens=48
    ),
    SamplingParams(temperature=0, max_tokens=48),
    SamplingParams(temperature=0, max_tokens=48, repetition_penalty=1.15, logprobs=1),
    replace(HOSTED[2], presence_penalty=-0.5, repetition_penalty=1.1),
]
# Rows whose masks the plain kernels apply, as long as no row beside them needs more.
MASKED = [
    *HOSTED[:3],
    replace(HOSTED[1], temperature=0.9, seed=8, logprobs=2),
    replace(HOSTED[2], top_p=0.8, top_k=50),
]
QUESTIONS = [
    *(f"What is {a} + {b}?" for a, b in ((12, 30), (7, 8), (25, 41), (3, 96))),
    *(f"What is the capital of {c}?" for c in ("France", "Japan", "Peru", "Kenya")),
    *(f"Spell the word {w}." for w in ("banana", "window", "guitar")),
    *(f"Tell me a story about a {a}." for a in ("fox", "bear", "owl")),
    "Count from 3 to 17.",
    "How many metres are 3 kilometres?",
]
# A short prompt has no full page to share.
LONG_QUESTIONS = [f"{QUESTIONS[-1]} {question} " * 6 for question in QUESTIONS]
