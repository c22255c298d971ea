"""The page at /docs: it describes what openapi.json does, and what is sent from it is sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from tests import waiting
from tests.page.browser import Chromium, Tab, tab
from tests.server.fake_engine import reply
from tests.server.http_harness import Server, serving

KEY = "schlüssel"
CHAT = "#post_v1_chat_completions"
TEXT = "document.querySelector('#content').innerText"
STATUS = "document.querySelector('.status').innerText"


def run(
    chromium: Chromium, test: Callable[[Tab, Server], Coroutine[Any, Any, None]], **args: Any
) -> None:
    async def on_page() -> None:
        async with serving(**args) as server, tab(chromium) as opened:
            await opened.resize(1280, 900)
            await opened.open(f"{server.url}/docs")
            await opened.until("document.querySelector('#routes a')")
            await test(opened, server)
            errors = [error for error in opened.errors if "status of 40" not in error]
            assert errors == []  # the policy's complaints are errors too
            assert all(url.startswith(server.url) for url in opened.urls)

    waiting.run(on_page())


async def show(opened: Tab, hash_: str) -> None:
    await opened.evaluate(
        "document.querySelector('#content').firstElementChild.id = 'before';"
        f"location.hash = {json.dumps(hash_)}"
    )
    await opened.until("document.querySelector('#content h2.operation:not(#before)')")


async def send(opened: Tab, body: dict[str, Any] | None = None) -> str:
    if body is not None:
        text = json.dumps(json.dumps(body))
        await opened.evaluate(f"document.querySelector('.try textarea').value = {text}")
    await opened.click(".try [type=submit]")
    await opened.until(f"/ ms$/.test({STATUS})")
    return await opened.evaluate("document.querySelector('.output').textContent")


def test_every_operation_and_field_is_shown(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Server) -> None:
        _, document = await server.get("/openapi.json")
        for path, item in document["paths"].items():
            for method, operation in item.items():
                await show(opened, f"#{operation['operationId']}")
                await opened.until(f"{TEXT}.includes({json.dumps(path)})")
                title = await opened.evaluate("document.title")
                assert title.startswith(f"{method.upper()} {path}")
                if "requestBody" not in operation:
                    continue
                ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                fields = document["components"]["schemas"][ref.split("/")[-1]]["properties"]
                shown = await opened.evaluate(
                    "[...document.querySelectorAll('#content .fields th code')]"
                    ".map(c => c.textContent)"
                )
                assert set(fields) <= set(shown), path

    run(chromium, test)


def test_the_overview_says_nothing_where_there_is_no_key(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Server) -> None:
        lines = (await opened.evaluate(TEXT)).splitlines()
        assert "What this server answers to" in lines and "/v1/responses" in " ".join(lines)
        assert "null" not in lines

    run(chromium, test)


def test_words_of_a_field(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Server) -> None:
        await show(opened, CHAT)
        row = (
            "[...document.querySelectorAll('.fields tr')]"
            ".find(r => r.querySelector('code').textContent === '%s').innerText"
        )
        temperature = await opened.evaluate(row % "temperature")
        assert "number" in temperature and "≥ 0, ≤ 100" in temperature
        assert "default 1" in temperature and "greedy" in temperature
        assert "required" in await opened.evaluate(row % "messages")
        # A shape within is drawn when it is opened.
        assert "tool_call_id" not in await opened.evaluate(TEXT)
        await opened.evaluate(
            "[...document.querySelectorAll('.shape summary')]"
            ".find(s => s.innerText === 'Message').click()"
        )
        await opened.until(f"{TEXT}.includes('tool_call_id')")
        await opened.evaluate(
            "[...document.querySelectorAll('.shape summary')]"
            ".find(s => s.innerText.startsWith('Accepted and ignored')).click()"
        )
        await opened.until(f"{TEXT}.includes('safety_identifier')")

    run(chromium, test)


def test_find(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Server) -> None:
        rows = "[...document.querySelectorAll('#routes .path')].map(p => p.innerText)"
        await opened.press("/", "Slash")
        assert await opened.evaluate("document.activeElement.id") == "find"
        await opened.type("suffix")  # a field of completions
        await opened.until(f"{rows}.length === 1")
        assert await opened.evaluate(rows) == ["/v1/completions"]
        await opened.type(" or not")
        await opened.until("document.querySelector('#routes').innerText.includes('Nothing')")
        assert await opened.evaluate("document.querySelector('#num-found').innerText") == "0 routes"

    run(chromium, test)


def test_try_it(chromium: Chromium) -> None:
    """Whole, streamed, refused; and the curl line is what was sent."""

    async def test(opened: Tab, server: Server) -> None:
        await show(opened, CHAT)
        whole = json.loads(await send(opened))
        assert whole["choices"][0]["message"]["content"] == reply(0)[: len(reply(0))][:32]
        body = {"messages": [{"role": "user", "content": "it's"}], "stream": True}
        streamed = await send(opened, body)
        assert streamed.count("data: ") > 5 and streamed.endswith("data: [DONE]\n\n")
        refused = json.loads(await send(opened, {**body, "temperature": -1}))
        assert refused["error"]["param"] == "temperature"
        assert (await opened.evaluate(STATUS)).startswith("400 ")
        await opened.evaluate(
            "document.querySelector('.try').dispatchEvent(new Event('input', {bubbles: true}))"
        )
        curl = await opened.evaluate("document.querySelector('.try details pre').textContent")
        assert f"curl -X POST '{server.url}/v1/chat/completions'" in curl
        assert "it'\\''s" in curl and "Authorization" not in curl

    run(chromium, test)


def test_path_parameters(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Server) -> None:
        server.service.model_names = ("org/model",)
        await show(opened, "#get_v1_models_model")
        await opened.click(".try input")
        await opened.type("org/model")
        assert json.loads(await send(opened))["id"] == "org/model"

    run(chromium, test)


def test_query_parameters(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Server) -> None:
        _, kept = await server.post("/v1/responses", {"input": "Hello"})
        await show(opened, "#get_v1_responses_response_id_input_items")
        names = await opened.evaluate(
            "[...document.querySelectorAll('.try label')].map(l => l.innerText)"
        )
        assert names == ["response_id", "order", "after", "limit"]
        await opened.click(".try input")
        await opened.type(kept["id"])
        assert len(json.loads(await send(opened))["data"]) == 1
        await opened.click("#get_v1_responses_response_id_input_items-limit")
        await opened.type("0")
        assert json.loads(await send(opened))["error"]["param"] == "limit"

    run(chromium, test)


def test_stop_a_stream(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Server) -> None:
        server.engine.step_seconds = 0.05
        server.engine.script = "and so on " * 300  # for minutes
        await show(opened, CHAT)
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        text = json.dumps(json.dumps(body))
        await opened.evaluate(f"document.querySelector('.try textarea').value = {text}")
        await opened.click(".try [type=submit]")
        await opened.until("document.querySelector('.output').textContent.includes('data: ')")
        await opened.click(".try [type=submit]")
        await opened.until(f"{STATUS} === 'Stopped.'")
        await server.quiet()
        assert server.engine.aborted

    run(chromium, test)


def test_key(chromium: Chromium) -> None:
    """The page needs none; what is sent from it carries the one that was given."""

    async def test(opened: Tab, server: Server) -> None:
        await show(opened, CHAT)
        assert "needs the API key" in await opened.evaluate(TEXT)
        refused = json.loads(await send(opened))
        assert refused["error"]["code"] == "invalid_api_key"
        await opened.click("#key")
        await opened.type(KEY)
        await opened.click(".try textarea")
        assert "choices" in json.loads(await send(opened))
        curl = await opened.evaluate("document.querySelector('.try details pre').textContent")
        assert "$ASYNCLLM_API_KEY" in curl and KEY not in curl

    run(chromium, test, api_key=[KEY])


def test_narrow(chromium: Chromium) -> None:
    """The list is a drawer, nothing is wider than the screen, and a route closes the drawer."""

    async def test(opened: Tab, server: Server) -> None:
        await opened.resize(390, 780, mobile=True)
        await opened.until("document.body.dataset.list === 'closed'")
        await opened.click("#toggle-list")
        await opened.click(f"#routes a[href='{CHAT}']")
        await opened.until("document.body.dataset.list === 'closed'")
        await opened.until(f"{TEXT}.includes('temperature')")
        assert await opened.evaluate(
            "document.querySelector('#scroller').scrollWidth <= innerWidth"
        )

    run(chromium, test)


def test_names_of_controls(chromium: Chromium) -> None:
    """A screen reader finds a name for every control; every id is one element's."""

    async def test(opened: Tab, server: Server) -> None:
        await show(opened, CHAT)
        nameless = await opened.evaluate(
            "[...document.querySelectorAll('button, input, textarea, a, summary')].filter(e =>"
            "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length))"
            ".map(e => e.outerHTML)"
        )
        assert nameless == []
        ids = await opened.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids))
        # Choosing a route moves the focus to what it says.
        await opened.until("document.activeElement.id === 'content'")

    run(chromium, test)
