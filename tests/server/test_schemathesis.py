"""Requests made from our own OpenAPI document: no 5xx, and every response is as documented.

The real engine with the built-in model. Bodies are those that the document allows and those that
it does not: for each operation a sample of schemathesis's list (each field at its bounds, left out,
of a wrong type) and some at random. A stream's events are held to the schema of its chunks. The
seed is fixed; the context is short, so that no answer takes long.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import msgspec
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from asyncllm import AsyncLLMEngine
from asyncllm.server.openapi.document import openapi
from asyncllm.server.routes import ROUTES
from tests.server.in_thread import in_thread
from tests.waiting import PATIENCE_SECONDS

MAX_LISTED = 50  # per operation, of up to 900
NUM_RANDOM = 12  # per operation, of allowed bodies and of others
WITHOUT_END = {"GET /dashboard/events"}  # test_page_routes.py has it
ENGINE = {"num_gpu_blocks_override": 200, "swap_space": 0, "max_model_len": 40, "device": "cpu"}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    allow_header_conformance,
    unsupported_method,
]

# What is no request by the document is a 400, but for what these leave to others: messages are the
# chat template's to check, and where only tokens are counted no range of sampling matters.
LENIENT = {
    "POST /v1/chat/completions",
    "POST /v1/chat/completions/batch",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses/input_tokens",
    "POST /tokenize",
}

# test_lora.py has the others: a server without adapters has no such routes.
ASKED = [route for route in ROUTES if not route.path.endswith("lora_adapter")]
REQUESTS = {f"{route.method} {route.path}": route.request for route in ASKED}


def unless_spelt_in_strings(context: Any, response: Any, case: Any) -> bool | None:
    """Numbers and booleans may be strings, as in vLLM; the document has one type for each."""
    request = REQUESTS.get(case.operation.label)
    fits_strings = request is not None and _fits(case.body, request, strict=False)
    if fits_strings and not _fits(case.body, request, strict=True):
        return None
    return negative_data_rejection(context, response, case)  # type: ignore[no-any-return]


def _fits(body: Any, request: type, strict: bool) -> bool:
    try:
        msgspec.convert(body, request, strict=strict)
    except msgspec.ValidationError:
        return False
    return True


SCHEMA = schemathesis.openapi.from_dict(openapi(ASKED, needs_key=False))
OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = AsyncLLMEngine("tiny", **ENGINE)
    with in_thread(engine, enable_tokenizer_info_endpoint=True) as server:
        yield server.url


@pytest.mark.parametrize("label", sorted(OPERATIONS.keys() - WITHOUT_END))
def test_responses_are_as_documented(label: str, url: str) -> None:
    operation = OPERATIONS[label]
    checks = CHECKS if label in LENIENT else [*CHECKS, unless_spelt_in_strings]

    def check(case: Any) -> None:
        case.call_and_validate(base_url=url, checks=checks, timeout=PATIENCE_SECONDS)

    listed = list(
        SCHEMA.iter_coverage_cases(
            operation,
            generation_modes=list(GenerationMode),
            generation_config=SCHEMA.config.generation,
        )
    )
    for case in random.Random(label).sample(listed, min(len(listed), MAX_LISTED)):
        check(case)
    if operation.body:
        for mode in GenerationMode:
            at_random(hypothesis.given(case=operation.as_strategy(generation_mode=mode))(check))()


at_random = hypothesis.settings(
    max_examples=NUM_RANDOM,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)


def test_every_operation_is_asked() -> None:
    assert set(OPERATIONS) >= WITHOUT_END and len(OPERATIONS) == len(ASKED)
