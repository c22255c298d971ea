"""openapi.json: every route is in it and nothing else, and what is said of fields is so."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import jsonschema_rs  # schemathesis's own validator
import pytest
import schemathesis

from asyncllm.errors import InvalidRequestError
from asyncllm.sampling_params import SamplingParams
from asyncllm.server.app import build_app
from asyncllm.server.args import ServerArgs
from asyncllm.server.openapi.document import openapi, with_parts
from asyncllm.server.openapi.fields import FIELD_DOCS, field_doc
from asyncllm.server.routes import ROUTES
from tests.server.fake_engine import FakeEngine
from tests.server.http_harness import run, serving

REQUESTS = list(dict.fromkeys(route.request for route in ROUTES if route.request is not None))
TYPES = with_parts(REQUESTS)


def operations(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, item in document["paths"].items() for method in item}


@pytest.mark.parametrize("disable_page", [False, True])
def test_every_route_is_documented_and_every_operation_is_a_route(disable_page: bool) -> None:
    async def test() -> None:
        args = ServerArgs(port=0, disable_page=disable_page)
        app = build_app(FakeEngine(), args)  # type: ignore[arg-type]
        served = {
            (route.method, route.resource.canonical)
            for route in app.router.routes()
            if route.method != "HEAD" and route.resource is not None
        }
        async with serving(disable_page=disable_page) as server:
            _, document = await server.get("/openapi.json")
        assert operations(document) == served

    run(test())


def test_references_resolve_and_components_are_used() -> None:
    document = openapi(ROUTES, needs_key=True)
    text = repr(document)
    used = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert used == set(document["components"]["schemas"])
    assert not [name for name in used if "." in name or "_" in name], "two types of one name"


@pytest.mark.slow
def test_it_is_openapi_31_and_its_schemas_are_json_schemas() -> None:
    document = openapi(ROUTES, needs_key=True)
    schemathesis.openapi.from_dict(document).validate()
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    del document["info"]
    with pytest.raises(jsonschema_rs.ValidationError):
        schemathesis.openapi.from_dict(document).validate()


def test_key_is_asked_for_where_it_is() -> None:
    async def test() -> None:
        async with serving(api_key=["secret"]) as server:
            _, document = await server.get("/openapi.json")
            for method, path in sorted(operations(document)):
                operation = document["paths"][path][method.lower()]
                url = server.url + re.sub(r"\{\w+\}", "main.js", path)
                async with server.session.request(method, url) as response:
                    assert (response.status == 401) == bool(operation.get("security")), path
                    assert ("401" in operation["responses"]) == bool(operation.get("security"))
        async with serving() as server:
            _, document = await server.get("/openapi.json")
            assert "security" not in repr(document)

    run(test())


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
def test_every_field_has_a_note(kind: Any) -> None:
    missing = [name for name in kind.__struct_fields__ if field_doc(kind, name) is None]
    assert not missing


def test_every_note_is_of_a_field() -> None:
    fields = {name for kind in TYPES for name in kind.__struct_fields__}
    own = {f"{kind.__name__}.{name}" for kind in TYPES for name in kind.__struct_fields__}
    assert not set(FIELD_DOCS) - fields - own


SAMPLED = [name for name in FIELD_DOCS if name in SamplingParams.__dataclass_fields__]


@pytest.mark.parametrize("name", SAMPLED)
def test_ranges_are_those_of_sampling_params(name: str) -> None:
    schema = FIELD_DOCS[name].schema
    beside: dict[str, Any] = {"use_beam_search": True} if name == "length_penalty" else {}
    for limit, step in (("minimum", -1), ("maximum", 1)):
        if limit in schema and (name, limit) != ("max_tokens", "minimum"):  # 0 scores the prompt
            SamplingParams(**{name: schema[limit]}, **beside)
            with pytest.raises(InvalidRequestError) as caught:
                SamplingParams(**{name: schema[limit] + step}, **beside)
            assert caught.value.param == name
    if "maxItems" in schema:
        items: list[Any] = [str(i) if name == "bad_words" else i for i in range(schema["maxItems"])]
        SamplingParams(**{name: items})
        with pytest.raises(InvalidRequestError):
            SamplingParams(**{name: [*items, items[0]]})
    if "minItems" in schema:
        with pytest.raises(InvalidRequestError):
            SamplingParams(**{name: []})
    if "exclusiveMinimum" in schema:
        with pytest.raises(InvalidRequestError):
            SamplingParams(**{name: schema["exclusiveMinimum"]})
