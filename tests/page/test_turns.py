"""Turns that change: edited, deleted, answered again, continued, and left out of a full context."""

from __future__ import annotations

import pytest

from tests.page.browser import Chromium, Tab
from tests.page.test_chat_page import ANSWER, DONE, TEXT, run, say
from tests.page.upstream import Upstream

TEXTS = "[...document.querySelectorAll('.message :is(.plain, .markdown)')].map(e => e.innerText)"
PAGES = (
    "[...document.querySelectorAll('.pager')].map(e => e.innerText.replace(/\\s+/g, ' ').trim())"
)
GAUGE = "document.querySelector('#context').innerText"
REFUSAL = "This model's maximum context length is 2048 tokens. However, your messages have 2500."


async def turn(opened: Tab, server: Upstream, question: str, answer: str) -> None:
    server.will_say(answer)
    await say(opened, question)
    await opened.until(f"{DONE} && {TEXT} === {answer!r}")


async def press_button(opened: Tab, of: str, name: str) -> None:
    """By the keyboard: focus, then Enter."""
    found = f"[...document.querySelectorAll('{of} button')].find(b => b.innerText === '{name}')"
    await opened.until(found)
    await opened.evaluate(f"{found}.focus()")
    await opened.press("Enter")


def contents(server: Upstream) -> list[str]:
    return [message["content"] for message in server.requests[-1]["messages"]]


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_edit_and_turn_back(chromium: Chromium, width: int) -> None:
    """An edit sends the message again; what was there can be turned to, and is kept."""

    async def test(opened: Tab, server: Upstream) -> None:
        await opened.resize(width, 800)
        await turn(opened, server, "One", "First.")
        await turn(opened, server, "Two", "Second.")
        await press_button(opened, ".user:first-child", "Edit")
        await opened.press("a", "KeyA", modifiers=2)
        await opened.evaluate("document.activeElement.select()")
        await opened.type("Uno")
        server.will_say("Primo.")
        await opened.press("Enter")
        await opened.until(f"{DONE} && {TEXT} === 'Primo.'")
        assert contents(server) == ["Uno"]
        assert await opened.evaluate(TEXTS) == ["Uno", "Primo."]
        assert await opened.evaluate(PAGES) == ["\u20392 / 2\u203a"]
        await press_button(opened, ".pager", "\u2039")
        assert await opened.until(f"{TEXTS}.length === 4 && {TEXTS}") == [
            "One", "First.", "Two", "Second.",
        ]  # fmt: skip
        await opened.reload()
        await opened.until(f"{TEXT} === 'Second.'")
        await press_button(opened, ".pager", "\u203a")
        await opened.until(f"{TEXT} === 'Primo.'")

    run(chromium, test)


@pytest.mark.slow
def test_edit_can_be_left(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        await turn(opened, server, "One", "First.")
        await opened.press("e", "KeyE", modifiers=1)
        await opened.until("document.activeElement.closest('.editor')")
        await opened.press("Escape")
        await opened.until("!document.querySelector('.editor')")
        assert await opened.evaluate(TEXTS) == ["One", "First."]
        assert len(server.requests) == 1

    run(chromium, test)


@pytest.mark.slow
def test_answers_at_one_place(chromium: Chromium) -> None:
    """Each regeneration is kept beside the others, and the one shown is what the model is told."""

    async def test(opened: Tab, server: Upstream) -> None:
        await turn(opened, server, "Say", "A1")
        for text in ("A2", "A3"):
            server.will_say(text)
            await opened.press("r", "KeyR", modifiers=1)
            await opened.until(f"{DONE} && {TEXT} === '{text}'")
        assert await opened.evaluate(PAGES) == ["\u20393 / 3\u203a"]
        await press_button(opened, ".pager", "\u2039")
        await opened.until(f"{TEXT} === 'A2'")
        assert await opened.evaluate(PAGES) == ["\u20392 / 3\u203a"]
        await turn(opened, server, "Next", "B")
        assert contents(server) == ["Say", "A2", "Next"]
        server.will_say("A4")  # of an answer in the middle
        await press_button(opened, ".assistant:nth-child(2)", "Regenerate")
        await opened.until(f"{DONE} && {TEXT} === 'A4'")
        assert contents(server) == ["Say"]
        assert await opened.evaluate(PAGES) == ["\u20394 / 4\u203a"]

    run(chromium, test)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_keyboard_reaches_what_a_message_offers(chromium: Chromium, width: int) -> None:
    """Back from the message box with Shift and Tab, and what has the focus can be seen."""

    async def test(opened: Tab, server: Upstream) -> None:
        await opened.resize(width, 800)
        await turn(opened, server, "One", "First.")
        await turn(opened, server, "Two", "Second.")
        focused = "document.activeElement"
        names = []
        for _ in range(9):
            await opened.press("Tab", modifiers=8)
            names.append(await opened.evaluate(f"{focused}.innerText"))
            actions = f"{focused}.closest('.actions')"
            assert await opened.evaluate(f"getComputedStyle({actions}).opacity") == "1"
        answer, question = ["Delete", "Regenerate", "Copy"], ["Delete", "Copy", "Edit"]
        assert names == [*answer, *question, *answer]

    run(chromium, test)


@pytest.mark.slow
def test_delete_a_message(chromium: Chromium) -> None:
    """A question goes with its answer, at the second press."""

    async def test(opened: Tab, server: Upstream) -> None:
        await turn(opened, server, "One", "First.")
        await turn(opened, server, "Two", "Second.")
        await press_button(opened, ".user:first-child", "Delete")
        assert len(await opened.evaluate(TEXTS)) == 4
        await opened.press("Enter")
        await opened.until(f"{TEXTS}.length === 2")
        await press_button(opened, ".assistant", "Delete")
        await opened.press("Enter")
        await opened.until(f"{TEXTS}.length === 1")
        await turn(opened, server, "Three", "Third.")
        assert contents(server) == ["Two", "Three"]

    run(chromium, test)


@pytest.mark.slow
def test_continue_a_stopped_answer(chromium: Chromium) -> None:
    async def test(opened: Tab, server: Upstream) -> None:
        server.will_say("One, *tw", None, "never seen")
        await say(opened, "Count")
        await opened.until(f"{TEXT} === 'One, *tw'")
        await opened.press("Escape")
        await opened.until(DONE)
        server.will_say("o*, three", finish="length")
        await opened.press("c", "KeyC", modifiers=1)
        await opened.until(f"{DONE} && {TEXT} === 'One, two, three'")
        request = server.requests[-1]
        assert contents(server) == ["Count", "One, *tw"]
        assert request["continue_final_message"] is True
        assert request["add_generation_prompt"] is False
        stats = await opened.evaluate(f"{ANSWER}.querySelector('.stats').innerText")
        assert stats.startswith("3 tokens") and "cut off" in stats
        server.will_say(".")
        await opened.reload()  # and after a reload, cut off at the limit
        await press_button(opened, ".assistant", "Continue")
        await opened.until(f"{DONE} && {TEXT} === 'One, two, three.'")
        assert not await opened.evaluate("document.querySelector('.continue')")  # it is whole

    run(chromium, test)


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_full_context(chromium: Chromium, width: int) -> None:
    """The gauge shows the server's count, warns, and leaves the oldest turns out at a press."""

    async def test(opened: Tab, server: Upstream) -> None:
        await opened.resize(width, 800)
        server.prompt_tokens = 400
        await turn(opened, server, "One " * 100, "First.")
        assert await opened.until(GAUGE) == "402 of 2,048 tokens"
        server.prompt_tokens = 1700
        await turn(opened, server, "Two " * 100, "Second.")
        await opened.until(f"{GAUGE}.includes('1,702 of 2,048') && {GAUGE}.includes('nearly full')")
        await press_button(opened, "#context", "Drop the oldest turns")
        await opened.until(f"!{GAUGE}.includes('nearly full')")
        divider = "document.querySelector('.divider')?.innerText"
        assert "2 messages above are not sent" in await opened.evaluate(divider)
        server.prompt_tokens = 900
        await turn(opened, server, "Three", "Third.")
        assert contents(server) == ["Two " * 100, "Second.", "Three"]
        server.prompt_tokens = 1700
        server.will_say("Four", None, "th.")
        await say(opened, "Four")
        await opened.until(f"{TEXT} === 'Four' && {GAUGE}.includes('nearly full')")
        assert "Drop" not in await opened.evaluate(GAUGE)  # not while an answer is written
        server.go.set()
        await opened.until(f"{DONE} && {GAUGE}.includes('Drop')")
        await opened.reload()
        await opened.until(f"{divider}.includes('not sent')")
        await press_button(opened, ".divider", "Send them again")
        await opened.until(f"!{divider}")
        assert await opened.evaluate("document.documentElement.scrollWidth") == width

    run(chromium, test)


@pytest.mark.slow
def test_refused_for_its_length(chromium: Chromium) -> None:
    """A conversation that the server refuses goes on without its oldest turns."""

    async def test(opened: Tab, server: Upstream) -> None:
        server.prompt_tokens = 100
        server.will_say(*"A token for each letter.")
        await say(opened, "One " * 400)
        await opened.until(f"{DONE} && {GAUGE} === '125 of 2,048 tokens'")
        server.refusal = REFUSAL
        await say(opened, "Two")
        await opened.until(f"{DONE} && {ANSWER}.innerText.includes('maximum context')")
        gauge = await opened.evaluate(GAUGE)  # never less than what the server counted
        assert "125 of 2,048" in gauge and "more than the context holds" in gauge
        server.will_say("Second.")
        await press_button(opened, "#context", "Drop the oldest turns")
        await opened.until(f"{DONE} && {TEXT} === 'Second.'")
        assert contents(server) == ["Two"]
        assert await opened.evaluate(PAGES) == []  # the refusal is not kept as an answer
        server.refusal = REFUSAL
        await press_button(opened, ".user:nth-last-child(2)", "Edit")
        await opened.type("Two " * 9)
        await opened.press("Enter")
        await opened.until(f"{DONE} && {GAUGE}.includes('alone is too long')")
        opened.errors.clear()  # Chromium logs each 400

    run(chromium, test)
