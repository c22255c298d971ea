"""The page, the real server and the built-in model together, behind an API key."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from asyncllm import AsyncLLMEngine
from tests.page.browser import Chromium, Tab, tab
from tests.server.http_harness import serving
from tests.waiting import run, until

ENGINE = {"num_gpu_blocks_override": 400, "swap_space": 0, "max_model_len": 512, "device": "cpu"}
KEY = "schlüssel"
DONE = "document.querySelector('.message.assistant:last-child:not(.waiting)')"


class SeenEngine(AsyncLLMEngine):
    num_snapshots = 0

    def snapshot(self, *args: Any) -> Any:
        self.num_snapshots += 1
        return super().snapshot(*args)


async def give_key(opened: Tab, key: str) -> None:
    await opened.click("#key")
    await opened.type(key)
    await opened.click("#key-dialog [type=submit]")


def test_key_chat_and_dashboard(chromium: Chromium) -> None:
    async def test() -> None:
        engine: Any = SeenEngine("tiny", **ENGINE)
        async with tab(chromium) as opened:
            async with serving(engine, api_key=[KEY]) as server:
                await opened.resize(1280, 900)
                await opened.open(server.url)
                await opened.until("document.querySelector('#key-dialog').open")
                await give_key(opened, "wrong")
                await opened.until(
                    "document.querySelector('#key-dialog').innerText.includes('accept')"
                )
                await opened.click("#key-remember")
                await give_key(opened, KEY)
                await opened.until(
                    "document.querySelector('#welcome-model').innerText.includes('tiny')"
                )
                assert not await opened.evaluate("document.querySelector('#key-dialog').open")
                await opened.reload()  # the key is remembered
                await opened.until("document.querySelector('.live').dataset.state === 'live'")
                await chat(opened)
                await goes_on(opened)
                await too_long(opened)
                await dashboard_shows(opened)
                await charts_answer_to_the_pointer(opened)
                await unwatched(opened, engine)
                refused = [error for error in opened.errors if not re.search("40[01]", error)]
                assert refused == []
            await no_connection(opened)
        assert engine.health() == "closed"

    run(test())


async def chat(opened: Tab) -> None:
    await opened.click("#examples li:first-child button")
    await opened.until(DONE)
    answer = await opened.evaluate(f"{DONE}.innerText")
    assert "Paris" in answer and "tokens/s" in answer, answer


async def goes_on(opened: Tab) -> None:
    """An answer that its limit cut off, continued by the real server."""
    text = f"{DONE}?.querySelector('.markdown').innerText.trim()"
    whole = await opened.evaluate(text)
    await opened.evaluate("localStorage['asyncllm.settings'] = '{\"max_tokens\": 3}'")
    await opened.press("r", "KeyR", modifiers=1)
    await opened.until(f"{DONE}?.innerText.includes('cut off')")
    begun = await opened.evaluate(text)
    await opened.evaluate("localStorage['asyncllm.settings'] = '{\"temperature\": 0}'")
    await opened.press("c", "KeyC", modifiers=1)
    await opened.until(f"{DONE} && !document.querySelector('.continue')")
    assert (await opened.evaluate(text)).startswith(begun), whole


async def too_long(opened: Tab) -> None:
    """The server's own words for a full context are understood, and an edit mends it."""
    await opened.press("n", "KeyN", modifiers=1)
    await opened.click("#prompt")
    await opened.type("word " * 600)
    await opened.press("Enter")
    gauge = "document.querySelector('#context').innerText"
    await opened.until(f"{DONE} && {gauge}.includes('alone is too long')")
    await opened.press("e", "KeyE", modifiers=1)
    await opened.until("document.activeElement.closest('.editor')")
    await opened.evaluate("document.activeElement.select()")
    await opened.type("What is the capital of France?")
    await opened.press("Enter")
    await opened.until(f"{DONE}?.innerText.includes('Paris')")
    await opened.until(f"/^\\d+ of 512 tokens$/.test({gauge})")


async def dashboard_shows(opened: Tab) -> None:
    """Figures of the request that just ended, and pictures that are not blank."""
    note = "document.querySelector('#board').innerText"
    await opened.until(f"/last \\d+, longest/.test({note}) && {note}.includes('of 400 in use')")
    row = "[...document.querySelectorAll('#board tbody tr')].map(r => r.innerText.split('\\t'))"
    rows = {name: values for name, *values in await opened.until(row)}
    assert float(rows["First token"][0].replace(",", "")) > 0
    for canvas in (".lines canvas", "canvas.pages", ".steps canvas"):
        colours = (
            "(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width,"
            f"c.height).data.buffer)).size)(document.querySelector('{canvas}'))"
        )
        await opened.until(f"{colours} >= 2")


async def charts_answer_to_the_pointer(opened: Tab) -> None:
    """The legend says what is under the pointer, and the axes have figures."""
    for name, label in (("lines", "generated"), ("steps", "step")):
        at = await opened.until(
            f"(box => box && [box.right - 4, box.y + 40])(document.querySelector('.{name} .u-over')"
            "?.getBoundingClientRect())"
        )
        await opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
        legend = f"document.querySelector('.{name} .u-legend').innerText"
        await opened.until(f"/{label}\\s*[\\d,]+/.test({legend})")


async def no_connection(opened: Tab) -> None:
    """Nothing old is shown as if it were the case, and the words are plain."""
    tiles = "[...document.querySelectorAll('.tiles dd')].map(e => e.innerText)"
    await opened.until(f"{tiles}.every(text => text === 'no connection')")
    await opened.until("document.querySelector('.live').innerText.includes('does not answer')")
    assert await opened.evaluate("document.querySelector('.lines').offsetHeight") == 0
    await opened.click("#prompt")
    await opened.type("Anybody there?")
    await opened.press("Enter")
    await opened.until(f"{DONE}?.innerText.includes('Is it still running?')")


async def unwatched(opened: Tab, engine: SeenEngine) -> None:
    """With the panel closed the feed is closed, and the engine is left alone."""
    await opened.press("d", "KeyD", modifiers=1)
    await opened.until("document.body.dataset.board === 'closed'")
    taken = -1
    while taken != engine.num_snapshots:
        taken = engine.num_snapshots
        await asyncio.sleep(0.7)
    await opened.press("d", "KeyD", modifiers=1)
    await until(lambda: engine.num_snapshots > taken + 1)
