"""Conversations found, renamed, exported and imported; files, settings and the focus."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser import Chromium, Tab
from tests.page.test_chat_page import ANSWER, DONE, TEXT, run, say
from tests.page.test_turns import turn
from tests.page.upstream import Upstream

TITLES = "[...document.querySelectorAll('#conversations .open')].map(b => b.textContent)"
NOTICE = "document.querySelector('#notice').innerText"


async def two_conversations(opened: Tab, server: Upstream) -> None:
    for question in ("Foxes", "Boats"):
        await opened.press("n", "KeyN", modifiers=1)
        await turn(opened, server, question, f"About {question.lower()}.")
    await opened.click("#toggle-list")


async def choose_file(opened: Tab, button: str, name: str, content: bytes) -> None:
    """Through the browser's own file dialog, which is answered without being shown."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_bytes(content)
        root = await opened.call("DOM.getDocument")
        node = await opened.call(
            "DOM.querySelector", nodeId=root["root"]["nodeId"], selector=f"#{button}-file"
        )
        await opened.call("DOM.setFileInputFiles", files=[str(file)], **node)
        await opened.until(f"document.querySelector('#{button}-file').value === ''")


@pytest.mark.slow
def test_find_and_rename(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        await two_conversations(opened, server)
        await opened.evaluate("document.querySelector('#find').focus()")
        await opened.type("about FOX")
        assert await opened.until(f"{TITLES}.length === 1 && {TITLES}") == ["Foxes"]
        await opened.evaluate("document.querySelector('#conversations .open').focus()")
        await opened.press("F2")
        await opened.type("Animals")
        await opened.press("Enter")
        assert await opened.until(f"{TITLES}[0] === 'Animals' && {TITLES}") == ["Animals"]
        assert await opened.evaluate("document.activeElement.innerText") == "Animals"
        await opened.reload()
        assert await opened.evaluate(TITLES) == ["Boats", "Animals"]

    run(chromium, test)


@pytest.mark.slow
def test_export_and_import(chromium: Chromium) -> None:
    """All that goes out comes in again, as more conversations; other files change nothing."""

    async def test(opened: Tab, server: Upstream) -> None:
        await two_conversations(opened, server)
        await opened.evaluate(
            "URL.createObjectURL = (blob) => { window.saved = blob.text(); return '#saved'; }"
        )
        await opened.click("#export")
        text = await opened.evaluate("window.saved")
        assert [one["title"] for one in json.loads(text)["conversations"]] == ["Boats", "Foxes"]
        await choose_file(opened, "import", "all.json", text.encode())
        await opened.until(f"{TITLES}.length === 4")
        await opened.until(f"{TEXT} === 'About boats.'")
        for bad in (b"{}", b"\xff", hostile({"role": "system", "content": "x"})):
            await choose_file(opened, "import", "bad.json", bad)
            assert "was not taken" in await opened.until(NOTICE)
        await choose_file(opened, "import", "odd.json", hostile(ODD))
        await opened.until(f"{TITLES}.length === 5 && {TEXT} === '<b>x</b>'")
        assert await opened.evaluate(f"{ANSWER}.querySelectorAll('b').length") == 0

    run(chromium, test)


ODD = {
    "role": "assistant", "content": "<b>x</b>", "reasoning": 5, "toolCalls": [None, {"name": 3}],
    "promptTokens": {}, "numTokens": "many", "branches": 7, "finish": [], "error": 5,
    "firstMs": "5", "lastMs": "7", "reasonedMs": [],
}  # fmt: skip


def hostile(message: dict[str, Any]) -> bytes:
    one = {"id": "../x", "title": 5, "updated": "now", "system": None, "messages": [message]}
    file = {"format": "asyncllm conversations", "version": 1, "conversations": [one]}
    return json.dumps(file).encode()


@pytest.mark.slow
def test_attach_a_text_file(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        await opened.click("#prompt")
        await opened.type("Read this:")
        await choose_file(opened, "attach", "a.md", "über\n```\nx\n```\n".encode())
        wanted = "Read this:\n\na.md:\n````\nüber\n```\nx\n```\n````\n"
        assert await opened.evaluate("document.querySelector('#prompt').value") == wanted
        await choose_file(opened, "attach", "a.png", b"\x89PNG\r\n\0")
        assert "a.png was not taken: it is not a text file" in await opened.evaluate(NOTICE)
        server.will_say("Read.")
        await opened.press("Enter")
        await opened.until(DONE)
        assert server.requests[0]["messages"][0]["content"] == wanted

    run(chromium, test)


@pytest.mark.slow
def test_settings_show_the_servers_defaults(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        await opened.press("s", "KeyS", modifiers=1)
        shown = "(name => document.querySelector(`#settings [name=${name}]`).placeholder)"
        await opened.until(f"{shown}('temperature') === '0.7'")
        assert await opened.evaluate(f"{shown}('top_k')") == "0"
        assert await opened.evaluate(f"{shown}('max_tokens')") == "what is left"
        assert await opened.evaluate(f"{shown}('min_p')") == "default"  # the server did not say

    run(chromium, test)


@pytest.mark.slow
def test_typing_goes_on_after_a_dialog(chromium: Chromium) -> None:
    """After Alt+S and Save, after Escape, and when nothing has the focus."""

    async def test(opened: Tab, server: Upstream) -> None:
        value = "document.querySelector('#prompt').value"
        closed = "!document.querySelector('#settings').open"
        for end in ("#settings [type=submit]", None):
            await opened.evaluate("document.activeElement.blur()")
            await opened.press("s", "KeyS", modifiers=1)
            if end:
                await opened.click(end)
            else:
                await opened.press("Escape")
            await opened.until(f"{closed} && document.activeElement.id === 'prompt'")
            await opened.type("a")
        assert await opened.evaluate(value) == "aa"
        await opened.evaluate("document.activeElement.blur()")
        await opened.press("b", "KeyB")
        await opened.until("document.activeElement.id === 'prompt'")

    run(chromium, test)


@pytest.mark.slow
def test_lost_connection_is_said_plainly(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        server.will_say("Half", None)
        await say(opened, "Go")
        await opened.until(f"{TEXT} === 'Half'")
        await server.cut()
        await opened.until(f"{DONE} && {ANSWER}.innerText.includes('The connection to the server')")
        opened.errors.clear()  # Chromium logs the broken transfer

    run(chromium, test)
