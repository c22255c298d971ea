"""docs/api.md names every field of every request, as the server has them, and no route it has not.

`python -m tests.server.test_api_doc` writes its tables anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from asyncllm.server.openapi.field_doc import Kind
from asyncllm.server.openapi.fields import field_doc
from asyncllm.server.routes import ROUTES

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
SERVER = Path(__file__).parents[2] / "asyncllm" / "server"
MARK = "<!-- fields -->\n"
TITLES: dict[Kind, str] = {
    "done": "Done",
    "ignored": "Accepted and ignored: they do not change the answer",
    "refused": "Refused with a 400 that names them, where they ask for anything",
}
NAMES = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "batch",
    "/v1/completions": "completions",
    "/inference/v1/generate": "generate",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "",  # a part of messages
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "",  # a part of responses
    "/v1/load_lora_adapter": "load_lora_adapter",
    "/v1/unload_lora_adapter": "unload_lora_adapter",
}


def tables() -> str:
    rows: dict[Kind, dict[tuple[str, str], list[str]]] = {kind: {} for kind in TITLES}
    for route in ROUTES:
        if route.request is None or not NAMES[route.path]:
            continue
        for name in route.request.__struct_fields__:
            doc = field_doc(route.request, name)
            assert doc is not None, name
            rows[doc.kind].setdefault((name, doc.text), []).append(NAMES[route.path])
    lines: list[str] = []
    for kind, title in TITLES.items():
        lines += ["", f"### {title}", "", "| field | of | |", "| --- | --- | --- |"]
        lines += [
            f"| `{name}` | {', '.join(apis)} | {text.replace('|', '&#124;')} |"
            for (name, text), apis in sorted(rows[kind].items())
        ]
    return "\n".join(lines) + "\n"


def test_the_tables_are_what_the_server_has() -> None:
    written = DOCUMENT.read_text().partition(MARK)[2]
    assert written == tables(), "python -m tests.server.test_api_doc writes them anew"


def test_routes_exist() -> None:
    named = set(re.findall(r"`(/[a-z_/0-9.]+)`", DOCUMENT.read_text().partition(MARK)[0]))
    assert len(named) > 10
    assert named <= {re.sub(r"\{.*", "", route.path).rstrip("/") for route in ROUTES}


def test_every_status_is_listed() -> None:
    source = "".join(path.read_text() for path in SERVER.rglob("*.py"))
    raised = set(re.findall(r"ApiError\((\d{3})", source)) | {"400", "405"}  # aiohttp's own
    document = DOCUMENT.read_text().partition(MARK)[0]
    assert raised == set(re.findall(r"\b[45]\d\d\b", document))


if __name__ == "__main__":
    DOCUMENT.write_text(DOCUMENT.read_text().partition(MARK)[0] + MARK + tables())
