"""SIGTERM and Ctrl-C at a server that is busy in every way, in a process of its own."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import MODEL, Served, served
from tests.text.test_render_limit import TEMPLATE
from tests.waiting import PATIENCE_SECONDS

LONG = {"max_tokens": 1500, "n": 8, "ignore_eos": True}
LARGE = 16 << 10  # characters of a chat that is rendered in a thread


class Asked(threading.Thread):
    """A request whose answer nobody waits for; `status` once it is there."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        self._request = urllib.request.Request(url + path, content, headers)
        self.status: int | None = None
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=PATIENCE_SECONDS) as response:
                self.status = response.status
        except urllib.error.HTTPError as error:
            self.status = error.code
        except OSError:  # the process has ended
            self.status = 0


def is_busy(server: Served) -> bool:
    with urllib.request.urlopen(f"{server.url}/load", timeout=PATIENCE_SECONDS) as response:
        return bool(json.load(response)["server_load"])


def is_held(server: Served) -> bool:
    """Nobody is answered."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=0.3):
            return False
    except TimeoutError:
        return True


def ends_within(server: Served, seconds: float) -> int:
    start = time.monotonic()
    code = server.process.wait(PATIENCE_SECONDS)
    assert time.monotonic() - start < seconds
    return code


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, LARGE], ids=["on the loop", "in a thread"])
def test_while_a_template_never_ends(size: int, tmp_path: Path) -> None:
    """A timer ends it on the loop; in the thread the patience of the shutdown counts."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("== 'never'", "[:5] == 'never'"))
    with served("--chat-template", str(template), "--shutdown-timeout", "1") as server:
        message = {"role": "user", "content": "never" + "x" * size}
        asked = Asked(server.url, "/v1/chat/completions", {"model": MODEL, "messages": [message]})
        while asked.status is None and not (is_busy if size else is_held)(server):
            time.sleep(0.01)  # until it is being rendered: before that nothing is to be waited for
        server.process.send_signal(signal.SIGTERM)
        assert ends_within(server, 30) == 0
        asked.join(PATIENCE_SECONDS)
        assert asked.status in (400, 503, 0)


@pytest.mark.slow
def test_the_log_says_how_long_it_drains(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with served("--shutdown-timeout", "0.5") as server:
        asked = Asked(server.url, "/v1/completions", {"model": MODEL, "prompt": "A", **LONG})
        while not is_busy(server):
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        assert ends_within(server, 30) == 0
        asked.join(PATIENCE_SECONDS)
        assert asked.status == 503
    said = capfd.readouterr().err
    assert "shutting down: 1 in progress, which have 0.5 s; Ctrl-C or SIGTERM again" in said
