"""A headless Chromium, driven over its DevTools protocol with the websocket client we have anyway.

`Chromium` is the process; `tab()` opens one tab with a storage of its own. Every wait is for a
condition, and bounded; a page that throws, logs an error or breaks its own policy fails the test
that opened it.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.waiting import PATIENCE_SECONDS

NAVIGATED = (  # what Chromium says of a question that the page's end overtook
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find context with specified id",
    "Cannot find default execution context",
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--headless",
    "--no-sandbox",  # as root it will not start with one
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",  # containers have little
    "--no-first-run",
    "--remote-debugging-port=0",
    "about:blank",
]


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """The process. It speaks on a local port of its own choice."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [program, f"--user-data-dir={self._profile.name}", *FLAGS],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.endpoint = self._wait_for_port(Path(self._profile.name) / "DevToolsActivePort")

    def _wait_for_port(self, file: Path) -> str:
        for _ in range(PATIENCE_SECONDS * 20):
            if file.exists() and len(lines := file.read_text().split()) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            if self._process.poll() is not None:
                break
            time.sleep(0.05)
        raise RuntimeError(f"Chromium did not start (exit code {self._process.poll()})")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._profile.cleanup()


class Navigated(RuntimeError):
    """The page went away while it was asked; another one is coming, or none."""


class Tab:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self.errors: list[str] = []  # what the page threw, or logged as an error
        self.urls: list[str] = []  # all it asked for

    async def attach(self, context: str) -> None:
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        return await answer

    async def listen(self) -> None:
        """Answers the calls until Chromium hangs up; then fails what still waits."""
        try:
            async for message in self._socket:
                data = json.loads(message.data)
                if "id" in data:
                    self._answer(data)
                else:
                    self._note(data["method"], data["params"])
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(RuntimeError("Chromium hung up"))

    def _answer(self, data: dict[str, Any]) -> None:
        answer = self._answers.pop(data["id"], None)
        if answer is None or answer.done():  # answered twice, or no longer waited for
            return
        if error := data.get("error"):
            kind = Navigated if error["message"] in NAVIGATED else RuntimeError
            answer.set_exception(kind(error["message"]))
        else:
            answer.set_result(data["result"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", details["text"])
            self.errors.append(thrown)
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if details := answer.get("exceptionDetails"):
            raise AssertionError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The first truthy value of `expression`; an element counts as true.

        It may be asked while the page is replaced by another, which is then asked.
        """
        expression = f"(value => value instanceof Node || value)({expression})"
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    with suppress(Navigated):
                        if value := await self.evaluate(expression):
                            return value
                    await asyncio.sleep(0.02)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never true: {expression}\n{self.errors}\n{text}") from None

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def reload(self) -> None:
        await self.evaluate("window.old = true")
        await self.call("Page.reload")
        await self.until("!window.old && document.readyState === 'complete'")

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: str = "", modifiers: int = 0) -> None:
        """`modifiers`: 1 Alt, 2 Ctrl, 8 Shift."""
        number = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "ArrowDown": 40}.get(key, 0)
        event = {"key": key, "code": code or key, "modifiers": modifiers}
        event["windowsVirtualKeyCode"] = number
        if key == "Enter":
            event["text"] = "\r"
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        event.pop("text", None)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def click(self, selector: str) -> None:
        """A real click: what lies over the element gets it instead."""
        box = await self.until(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return;"
            "e.scrollIntoView({block: 'nearest'}); const b = e.getBoundingClientRect();"
            "return b.width ? [b.x + b.width / 2, b.y + b.height / 2] : null; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1],
                            button="left", clickCount=1)  # fmt: skip

    async def resize(self, width: int, height: int, mobile: bool = False, scale: float = 1) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                        deviceScaleFactor=scale, mobile=mobile)  # fmt: skip

    async def screenshot(self) -> bytes:
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def tab(chromium: Chromium) -> AsyncIterator[Tab]:
    """A tab with its own storage, for the block."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(chromium.endpoint, max_msg_size=0) as socket,
    ):
        opened = Tab(socket)
        listener = asyncio.create_task(opened.listen())
        context = await opened.call("Target.createBrowserContext")
        try:
            await opened.attach(context["browserContextId"])
            yield opened
        finally:
            opened._session = None
            await opened.call("Target.disposeBrowserContext", **context)
            listener.cancel()
