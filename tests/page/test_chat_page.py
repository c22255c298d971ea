"""The chat in a real browser, against a server whose every event is known."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests import waiting
from tests.page.browser import Chromium, Tab, tab
from tests.page.upstream import Upstream, chunk, upstream

Test = Callable[[Tab, Upstream], Coroutine[Any, Any, None]]

ANSWER = "document.querySelector('.message.assistant:last-child')"
TEXT = f"{ANSWER}?.querySelector('.markdown').innerText.trim()"
DONE = "document.querySelector('.message.assistant:last-child:not(.waiting)')"
SCROLLER = "document.querySelector('#scroller')"
HOSTILE = (
    "<script>window.hacked = 1</script>\n\n<img src=x onerror='window.hacked = 2'>\n\n"
    "[click](javascript:window.hacked=3) ![i](https://evil.example/i.png) "
    "[data](data:text/html,x) <b>bold?</b>\n\n```html\n<script>window.hacked = 4</script>\n```\n"
)


@asynccontextmanager
async def page(chromium: Chromium) -> AsyncIterator[tuple[Tab, Upstream]]:
    """The page open and its model known. At the end: no error, no request to anyone else."""
    async with upstream() as server, tab(chromium) as opened:
        await opened.resize(700, 700)  # the dashboard, which this server lacks, is not shown
        await opened.open(server.url)
        await opened.until(
            "document.querySelector('#welcome-model').innerText.includes('scripted')"
        )
        yield opened, server
        assert opened.errors == []
        assert {url for url in opened.urls if not url.startswith(server.url)} <= {"about:blank"}


def run(chromium: Chromium, test: Test) -> None:
    async def on_page() -> None:
        async with page(chromium) as (opened, server):
            await test(opened, server)

    waiting.run(on_page())


async def say(opened: Tab, text: str) -> None:
    await opened.click("#prompt")
    await opened.type(text)
    await opened.press("Enter")


def test_streams_and_follows(chromium: Chromium) -> None:
    """Text shows while the rest has not been sent; the answer ends with its figures."""

    async def test(opened: Tab, server: Upstream) -> None:
        server.will_say("Some ", None, "**bold** text.")
        await say(opened, "Hello\u00e9")
        assert await opened.until(TEXT) == "Some"
        assert await opened.evaluate("document.querySelector('#send').ariaLabel") == "Stop"
        server.go.set()
        await opened.until(DONE)
        assert await opened.evaluate(TEXT) == "Some bold text."
        assert await opened.evaluate(f"{ANSWER}.querySelector('strong').innerText") == "bold"
        stats = await opened.evaluate(f"{ANSWER}.querySelector('.stats').innerText")
        assert "3 tokens" in stats and "to first" in stats and "tokens/s" in stats
        request = server.requests[0]
        assert request["messages"] == [{"role": "user", "content": "Hello\u00e9"}]
        assert request["model"] == "scripted" and request["stream"] is True
        assert await opened.evaluate("document.activeElement.id") == "prompt"

    run(chromium, test)


def test_stop_and_regenerate(chromium: Chromium) -> None:
    """Stopping closes the connection, keeps the text, and the next try replaces it."""

    async def test(opened: Tab, server: Upstream) -> None:
        server.will_say("Half an", None, "never seen")
        await say(opened, "Go on")
        await opened.until(f"{TEXT} === 'Half an'")
        await opened.press("Escape")
        await opened.until(DONE)
        await server.disconnected.wait()
        assert "stopped" in await opened.evaluate(f"{ANSWER}.querySelector('.stats').innerText")
        server.will_say("Whole.")
        await opened.click(".message:last-child .regenerate")
        await opened.until(f"{TEXT} === 'Whole.'")
        assert await opened.evaluate("document.querySelectorAll('.message').length") == 2
        assert [len(request["messages"]) for request in server.requests] == [1, 1]
        server.will_say("Once more", None)
        await opened.press("r", "KeyR", modifiers=1)
        await opened.until(f"{TEXT} === 'Once more'")
        await opened.click("#send")  # it is the stop button now
        await opened.until(DONE)

    run(chromium, test)


def test_reload_keeps_conversations(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        server.will_say("First *answer*.")
        await say(opened, "First question")
        await opened.until(DONE)
        await opened.press("n", "KeyN", modifiers=1)
        await opened.until("!document.querySelector('#welcome').hidden")
        server.will_say("Second ans", None, "wer.")
        await say(opened, "Second question")
        await opened.until(f"{TEXT} === 'Second ans'")
        await opened.reload()
        assert await opened.until(TEXT) == "Second ans"  # what had come, and no more
        assert "stopped" in await opened.evaluate(f"{ANSWER}.querySelector('.stats').innerText")
        await opened.press("ArrowDown", modifiers=1)
        await opened.until(f"{TEXT} === 'First answer.'")
        titles = "[...document.querySelectorAll('#conversations .open')].map(b => b.textContent)"
        assert await opened.evaluate(titles) == ["Second question", "First question"]
        server.will_say("Third.")
        await say(opened, "And then?")
        await opened.until(f"{TEXT} === 'Third.'")
        roles = [message["role"] for message in server.requests[-1]["messages"]]
        assert roles == ["user", "assistant", "user"]
        await opened.click("#toggle-list")
        for _ in range(2):  # the second click confirms
            await opened.click("#conversations li:has([aria-current]) .remove")
        await opened.until(f"{titles.replace('textContent', 'textContent.length')}.length === 1")
        assert (
            await opened.evaluate(
                "Object.keys(localStorage).filter(k => k.includes('chat.')).length"
            )
            == 1
        )

    run(chromium, test)


def test_keys_in_the_list(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        for question in ("One", "Two"):
            await opened.press("n", "KeyN", modifiers=1)
            server.will_say(f"Answer to {question}.")
            await say(opened, question)
            await opened.until(f"{TEXT} === 'Answer to {question}.' && {DONE}")
        await opened.click("#toggle-list")
        await opened.evaluate("document.querySelector('#conversations .open').focus()")
        await opened.press("ArrowDown")
        assert await opened.evaluate("document.activeElement.innerText") == "One"
        await opened.press("Enter")
        await opened.until(f"{TEXT} === 'Answer to One.'")
        await opened.press("/", "Slash")
        assert await opened.evaluate("document.activeElement.id") == "prompt"

    run(chromium, test)


def test_answers_go_on_behind(chromium: Chromium) -> None:
    """Another conversation on screen does not end an answer, and does not get its text."""

    async def test(opened: Tab, server: Upstream) -> None:
        server.will_say("Begun", None, ", ended.")
        await say(opened, "Slow")
        await opened.until(f"{TEXT} === 'Begun'")
        await opened.press("n", "KeyN", modifiers=1)
        await opened.until("!document.querySelector('.message')")
        server.go.set()
        await opened.until(
            "document.querySelector('#status').innerText.startsWith('Answer complete')"
        )
        assert not await opened.evaluate("document.querySelector('.message') !== null")
        await opened.press("ArrowDown", modifiers=1)
        await opened.until(f"{TEXT} === 'Begun, ended.'")

    run(chromium, test)


@pytest.mark.parametrize("pieces", [1, 7])
def test_hostile_output_stays_text(chromium: Chromium, pieces: int) -> None:
    """Whole, or cut into pieces at the worst places."""

    async def test(opened: Tab, server: Upstream) -> None:
        texts = (
            [HOSTILE] if pieces == 1 else [HOSTILE[i : i + 7] for i in range(0, len(HOSTILE), 7)]
        )
        server.will_say(*texts)
        await say(opened, "<script>window.hacked = 5</script>")
        await opened.until(DONE)
        shown = await opened.evaluate(TEXT)
        assert "<script>window.hacked = 1</script>" in shown
        assert "onerror='window.hacked = 2'" in shown and "<b>bold?</b>" in shown
        inside = "document.querySelector('#messages').querySelectorAll('script, img, iframe, b')"
        assert await opened.evaluate(f"{inside}.length") == 0
        links = f"[...{ANSWER}.querySelectorAll('a')].map(a => [a.protocol, a.rel])"
        assert await opened.evaluate(links) == [["https:", "noopener noreferrer"]]
        await opened.reload()
        await opened.until(TEXT)
        assert await opened.evaluate("window.hacked") is None

    run(chromium, test)


def test_maths_and_code_break_no_policy(chromium: Chromium) -> None:
    """TeX that styles, links and loads, and coloured code: no violation, no request, no link."""
    parts = (
        "\\pmb{x}", "\\sideset{_1^2}{_3^4}\\sum", "\\color{red}y", "\\fbox{z}", "\\cancel{w}",
        "\\href{javascript:hacked=5}{a}", "\\url{https://evil.example/}", "\\class{b}{c}",
        "\\includegraphics[height=1em]{https://evil.example/i.png}", "\\style{color:red}{d}",
        "\\mathscr{S}", "\\def\\x{\\x\\x}\\x", "\\rule{999999em}{999999em}",
    )  # fmt: skip

    async def test(opened: Tab, server: Upstream) -> None:
        texts = [f"\\({part}\\)\n\n" for part in parts]
        server.will_say(*texts, "```html\n<b style='x'>&amp;</b>\n```\n")
        await say(opened, "Show")
        await opened.until(DONE)
        assert await opened.evaluate(f"{ANSWER}.querySelectorAll('math').length") >= 6
        inside = f"{ANSWER}.querySelectorAll('a, img, [href], [style*=url], script, style, b')"
        assert await opened.evaluate(f"{inside}.length") == 0
        code = await opened.evaluate(f"{ANSWER}.querySelector('figure code').textContent")
        assert code == "<b style='x'>&amp;</b>\n"
        assert await opened.evaluate("document.documentElement.scrollWidth") == 700

    run(chromium, test)


CONTRASTS = """
(() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((p) => (p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = light(getComputedStyle(document.querySelector('figure.code')).backgroundColor);
  return [...document.querySelectorAll('figure code span, #context span, .actions button')]
    .map((e) => [e.className || e.innerText, light(getComputedStyle(e).color)])
    .map(([name, l]) => [name, (Math.max(l, ground) + 0.05) / (Math.min(l, ground) + 0.05)]);
})()
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_read(chromium: Chromium, theme: str) -> None:
    """Code, the gauge and its warning, and the buttons: 4.5 to 1, as WCAG asks of text."""

    async def test(opened: Tab, server: Upstream) -> None:
        feature = {"name": "prefers-color-scheme", "value": theme}
        await opened.call("Emulation.setEmulatedMedia", features=[feature])
        server.prompt_tokens = 2000
        server.will_say(
            "```python\n# note\n@wraps\nclass A(B):\n    x: int = f(1, 'text', None)\n```\n\n"
            "```diff\n+ new\n- old\n```\n\n```html\n<a href='x'>&amp;</a>\n```\n"
        )
        await say(opened, "Show")
        await opened.until(DONE)
        assert theme == await opened.evaluate("document.documentElement.dataset.theme")
        contrasts = await opened.evaluate(CONTRASTS)
        assert len(contrasts) > 15
        assert [pair for pair in contrasts if pair[1] < 4.5] == []

    run(chromium, test)


def test_reasoning_and_tool_calls_are_folded(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        call = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": ""}}
        server.will_send(
            {"role": "assistant", "reasoning": "Let me <b>see</b>"},
            {"reasoning_content": " it."},
            None,
            {"content": "Here."},
            {"tool_calls": [call]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ' "Paris"}'}}]},
            finish="tool_calls",
        )
        await say(opened, "Weather?")
        title = f"{ANSWER}?.querySelector('.reasoning summary')?.innerText"
        assert await opened.until(title) == "Thinking…"
        server.go.set()
        await opened.until(DONE)
        assert (await opened.evaluate(title)).startswith("Thought for")
        assert await opened.evaluate(TEXT) == "Here."
        folded = f"[...{ANSWER}.querySelectorAll('details')].map(d => [d.open, d.textContent])"
        reasoning, tool = await opened.evaluate(folded)
        assert reasoning[0] is False and "Let me <b>see</b> it." in reasoning[1]
        assert tool[0] is False and "get_weather" in tool[1] and '"city": "Paris"' in tool[1]
        server.will_say("Sunny.")
        await say(opened, "Thanks")
        await opened.until(f"{TEXT} === 'Sunny.'")
        told = server.requests[-1]["messages"][1]
        assert told["tool_calls"][0]["function"]["name"] == "get_weather"
        assert "reasoning" not in told

    run(chromium, test)


def test_settings_reach_the_request(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        await opened.press("s", "KeyS", modifiers=1)
        for name, value in (
            ("system", "Be brief."),
            ("temperature", "0.25"),
            ("max_tokens", "9"),
            ("stop", "END"),
            ("extra", '{"min_tokens": 2}'),
        ):
            await opened.click(f"#settings [name={name}]")
            await opened.type(value)
        await opened.click("#settings [name=logprobs]")
        await opened.click("#settings [type=submit]")
        await opened.until("!document.querySelector('#settings').open")
        tokens = [token(" yes", -0.1), token(" no", -2.5)]
        server.will_say()
        server.events = [
            chunk({"content": " yes no"}, logprobs={"content": tokens}),
            *server.events,
        ]
        await say(opened, "Well?")
        await opened.until(DONE)
        request = server.requests[0]
        assert request["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (request["temperature"], request["max_tokens"]) == (0.25, 9)
        assert (request["stop"], request["min_tokens"]) == (["END"], 2)
        assert (request["logprobs"], request["top_logprobs"]) == (True, 5)
        assert "top_p" not in request
        await opened.click(".message [aria-pressed]")
        at = await opened.evaluate(
            "(() => { const b = document.querySelector('.tokens span:last-child')"
            ".getBoundingClientRect(); return [b.x + 3, b.y + 3]; })()"
        )
        await opened.call("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=at[1])
        tip = await opened.until(
            "!document.querySelector('#tip').hidden && document.querySelector('#tip').innerText"
        )
        assert "·no" in tip and "8.2 %" in tip and "·other" in tip

    run(chromium, test)


def token(text: str, logprob: float) -> dict[str, Any]:
    other = {"token": " other", "logprob": -3.0}
    return {
        "token": text,
        "logprob": logprob,
        "top_logprobs": [{"token": text, "logprob": logprob}, other],
    }


def test_errors_are_shown(chromium: Chromium) -> None:
    """An error event, and a connection that ends early; the history leaves failures out."""

    async def test(opened: Tab, server: Upstream) -> None:
        server.events = [
            chunk({"content": "Well"}),
            {"error": {"message": "the model <i>failed</i>"}},
        ]
        await say(opened, "One")
        await opened.until(DONE)
        error = f"{ANSWER}.querySelector('.error').innerText"
        assert await opened.evaluate(error) == "the model <i>failed</i>"
        server.events = []
        await opened.press("r", "KeyR", modifiers=1)
        await opened.until(f"{DONE} && {error}.includes('ended before')")
        server.will_say("Fine.")
        await say(opened, "Two")
        await opened.until(f"{TEXT} === 'Fine.'")
        assert [m["content"] for m in server.requests[-1]["messages"]] == ["One", "Two"]

    run(chromium, test)


def test_view_follows_only_at_the_end(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        lines = "".join(f"Line {i}\n\n" for i in range(60))
        server.will_say(lines, None, lines, None, "The end.")
        await say(opened, "Long")
        at_end = f"(s => s.scrollHeight - s.scrollTop - s.clientHeight < 3)({SCROLLER})"
        await opened.until(f"{ANSWER} && {ANSWER}.innerText.includes('Line 59') && {at_end}")
        await opened.evaluate(f"{SCROLLER}.scrollTop = 100")
        await opened.until("!document.querySelector('#to-end').hidden")
        server.go.set()
        await opened.until(DONE)
        assert await opened.evaluate(f"{SCROLLER}.scrollTop") == 100
        await opened.click("#to-end")
        await opened.until(at_end)

    run(chromium, test)


def test_narrow_screen_has_drawers(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        await opened.resize(375, 700, mobile=True)
        width = "document.documentElement.scrollWidth"
        assert await opened.evaluate(width) == 375
        shown = "getComputedStyle(document.querySelector('#list')).display !== 'none'"
        assert not await opened.evaluate(shown)
        await opened.click("#toggle-list")
        await opened.until(shown)
        assert await opened.evaluate(
            "document.querySelector('#list').contains(document.activeElement)"
        )
        await opened.press("Escape")
        await opened.until(f"!({shown})")
        server.will_say("| a | b |\n|---|---|\n| " + "wide " * 50 + "| x |\n\n" + "w" * 300)
        await say(opened, "Table")
        await opened.until(DONE)
        assert await opened.evaluate(width) == 375

    run(chromium, test)


def test_theme_is_kept(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        background = "getComputedStyle(document.body).backgroundColor"
        light = await opened.evaluate(background)
        await opened.click("#toggle-theme")
        dark = await opened.evaluate(background)
        assert dark != light
        await opened.reload()
        assert await opened.evaluate(background) == dark

    run(chromium, test)
