"""`asyncllm chat` and `asyncllm complete`, through pipes and on a terminal, with a real server."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from asyncllm.commands import api_client, terminal
from asyncllm.commands.api_client import AnswerError, ApiClient, read_events
from asyncllm.commands.terminal import Screen
from tests.waiting import PATIENCE_SECONDS

SERVER = """
import asyncio, sys
from asyncllm import AsyncLLMEngine
from tests.server.http_harness import serving
from tests.waiting import until

async def main():
    engine = AsyncLLMEngine("tiny", num_gpu_blocks_override=200, swap_space=0)
    async with serving(engine, api_key=["secret"]) as server:
        print(server.url + "/v1", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await until(lambda: not server.service.num_live)
        print(server.engine.stats().num_running, flush=True)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-c", SERVER]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as server:
        assert server.stdin is not None and server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()
        assert server.stdout.read() == "0\n"  # every answer that was left has ended


def start(command: str, *words: str, **options: Any) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_API_KEY")}
    return subprocess.Popen(
        [sys.executable, "-m", "asyncllm", command, *words],
        env=environment | {"ASYNCLLM_API_KEY": "secret"},
        **options,
    )


def run(command: str, *words: str, typed: str = "") -> tuple[int, str, str]:
    pipe = subprocess.PIPE
    process = start(command, *words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    out, errors = process.communicate(typed, timeout=PATIENCE_SECONDS)
    return process.returncode, out, errors


def prompt_lengths(errors: str) -> list[int]:
    """As --stats tells them, one per answer."""
    return [int(number) for number in re.findall(r"\[(\d+) \+ \d+ tokens, first after", errors)]


@pytest.mark.slow
def test_quick_question(url: str) -> None:
    code, out, errors = run("chat", "--url", url, "-q", "What is 2 + 2?", "--stats")
    assert code == 0 and out.strip() and out.endswith("\n")
    assert prompt_lengths(errors) == [16]


@pytest.mark.slow
def test_piped_lines_are_one_conversation(url: str) -> None:
    prompts = ["--url", url, "--model-name", "tiny", "--system-prompt", "You are brief.", "--stats"]
    code, out, errors = run("chat", *prompts, typed="What is 2 + 2?\n\nWhat is 2 + 2?\n")
    assert code == 0 and len(out.splitlines()) >= 2
    assert "\x1b" not in out and ">" not in out
    first, second = prompt_lengths(errors)
    assert first > 16  # the system prompt
    assert second > 2 * first - 10  # all before it, the answer too


@pytest.mark.slow
def test_complete(url: str) -> None:
    code, out, _ = run("complete", "--url", url, "-q", "Once upon a time", "--max-tokens", "3")
    assert code == 0 and 0 < len(out.split()) <= 3
    code, out, _ = run("complete", "--url", url, "--max-tokens", "2", typed="One\nTwo\n")
    assert code == 0 and len(out.splitlines()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--api-key", "wrong"], "no valid API key"),
        (["--api-key", "wrong"], ": give the server's with --api-key, or in $ASYNCLLM_API_KEY or"),
        (["--model-name", "other"], "'other' does not exist"),
        (
            ["--url", "http://127.0.0.1:1/v1"],
            "no server at http://127.0.0.1:1/v1: Connection refused\n",
        ),
        (["--url", "127.0.0.1:1/v1"], "'127.0.0.1:1/v1' is no URL such as http://127"),
        (["--url", "nonsense"], "'nonsense' is no URL such as http://127.0.0.1:8000/v1"),
        (["--url", "{url}/v2"], "/v2/models: must its URL end in /v1?"),
    ],
)
def test_errors_are_one_line_and_exit_code_1(url: str, words: list[str], message: str) -> None:
    words = [word.format(url=url) for word in words]
    code, out, errors = run("chat", "--url", url, "-q", "Hi", *words)
    assert (code, out) == (1, "")
    assert errors.startswith("asyncllm: error: ") and message in errors
    assert errors.count("\n") == 1


# --- on a terminal --------------------------------------------------------------------------------


class Terminal:
    """The other end of a pty; what came out is in `seen`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, meanwhile: Callable[[], None] | None = None) -> str:
        """Until `text` has come; what came up to its end, which is taken from `seen`.

        `meanwhile` is called at once and each second: a signal between a prompt and the read
        behind it is noticed with the next key only.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        due = time.monotonic()
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if meanwhile is not None and time.monotonic() >= due:
                meanwhile()
                due += 1.0
            if select.select([self._fd], [], [], 0.1)[0]:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before


@contextmanager
def on_terminal(*words: str, code: int = 0) -> Iterator[tuple[Terminal, subprocess.Popen[str]]]:
    ours, theirs = pty.openpty()
    # A shell that starts the tests in the background has them, and so their children, ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start(*words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    signal.signal(signal.SIGINT, before)
    os.close(theirs)
    try:
        yield Terminal(ours), process
        assert process.wait(PATIENCE_SECONDS) == code
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_and_ctrl_d_the_program(url: str) -> None:
    with on_terminal("complete", "--url", url, "--max-tokens", "3000") as (screen, process):
        interrupt = partial(process.send_signal, signal.SIGINT)
        screen.wait_for("> ")
        screen.wait_for("> ", interrupt)  # at the prompt: another one
        screen.type("Once upon a time\n")
        screen.wait_for("time\r\n")  # the echo
        screen.wait_for(" ")  # it has begun
        screen.wait_for("> ", interrupt)
        screen.type("\x04")


@pytest.mark.slow
def test_without_a_server_there_is_no_prompt(url: str) -> None:
    for words, said in (
        (["--url", "http://127.0.0.1:1/v1"], "no server at http://127.0.0.1:1/v1"),
        (["--url", url, "--api-key", "wrong"], "--api-key, or in $ASYNCLLM_API_KEY"),
    ):
        with on_terminal("chat", *words, code=1) as (screen, _):
            assert ">" not in screen.wait_for(said)


@pytest.mark.slow
def test_commands(url: str) -> None:
    with on_terminal("chat", "--url", url, "--stats") as (screen, _):

        def type_line(line: str) -> str:
            screen.type(line + "\n")
            screen.wait_for(line)  # the echo
            return screen.wait_for("> ")

        assert "tiny at http://127.0.0.1:" in screen.wait_for("/help lists commands")
        screen.wait_for("> ")
        assert "/retry" in type_line("/help")
        assert "There is no /hlep" in type_line("/hlep")
        first, second, again, undone, path, anew = (
            prompt_lengths(type_line(line)) + prompt_lengths(type_line(more))
            for line, more in (
                ("What is 2 + 2?", "/undo"),
                ("What is 2 + 2?", "What is 2 + 3?"),
                ("/retry", "/undo"),
                ("What is 2 + 3?", "/undo"),
                ("/usr/bin is what?", "/new"),
                ("What is 2 + 2?", "/new"),
            )
        )
        assert first == anew == [16] and second[0] == 16 and second[1] > 16
        assert again == undone == second[1:]  # the same conversation before it
        assert len(path) == 1  # asked, no command
        assert "* tiny" in type_line("/model") and "has no other" in type_line("/model other")
        assert prompt_lengths(type_line("/system You are brief.")) == []
        (with_system,) = prompt_lengths(type_line("What is 2 + 2?"))
        assert with_system > 16
        assert "[" not in type_line("/stats") + type_line("What is 2 + 2?")
        screen.type("/quit\n")


# --- what is shown --------------------------------------------------------------------------------


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(out: io.StringIO) -> str:
    screen = Screen(out)
    screen.write("let me think", dim=True)
    screen.write("It is\x1b]0;title\x07 4\r\x9b2J\t.")
    screen.write("")
    screen.end()
    screen.end()
    return out.getvalue()


def test_reasoning_is_dim_and_controls_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    answer = "It is]0;title 42J\t.\n"
    assert show(Tty()) == f"{terminal.DIM}let me think\n{terminal.PLAIN}{answer}"
    monkeypatch.setenv("NO_COLOR", "1")
    assert show(Tty()) == f"let me think\n{answer}"
    assert show(io.StringIO()) == "let me think\nIt is\x1b]0;title\x07 4\r\x9b2J\t.\n"


EVENTS = (
    b': hello\n\ndata: {"choices": [{"delta": {"reasoning": "hm"}}]}\r\n\r\ndata: {"choices": '
    b'[{"delta": {"content": "\xc3\xa9"}}]}\n\nevent: x\ndata:[DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_however_they_are_cut(size: int) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start_at in range(0, len(EVENTS), size):
            yield EVENTS[start_at : start_at + size]

    async def work() -> list[bytes]:
        return [data async for data in read_events(pieces())]

    first, second, last = asyncio.run(work())
    assert b'"hm"' in first and "é".encode() in second and last == b"[DONE]"


async def answers(payload: bytes, status: int = 200) -> list[dict[str, Any]]:
    """The client's output for a server that answers with `payload`."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=payload, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with ApiClient(f"http://127.0.0.1:{port}/v1/", None) as client:
            return [event async for event in client.stream("/chat/completions", {})]
    finally:
        await runner.cleanup()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("payload", "status", "words"),
    [
        (b'data: {"error": {"message": "too hot"}}\n\n', 200, "too hot"),
        (b'data: {"error": true}\n\n', 200, "reported an error"),
        (b"data: {\n\n", 200, "not JSON"),
        (b"data: []\n\n", 200, "no object"),
        (b'data: {"choices": []}\n\n', 200, "ended before"),
        (b"<html>", 502, "HTTP status 502"),
        (b'{"error": "gone"}', 410, "gone"),
        (b"x" * 2000, 200, "more than 1000 bytes"),
    ],
)
def test_what_is_no_answer(
    payload: bytes, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_client, "MAX_EVENT_BYTES", 1000)
    with pytest.raises(AnswerError, match=words):
        asyncio.run(answers(payload, status))
