"""The report: the page is whole and asks for nothing outside, the live table draws."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import loadtest
import pytest
import rich.console

from loadtesting import live
from loadtesting.client import Counter

VOID = {"meta", "img", "br"}
OUTSIDE = {"script", "link", "iframe", "object", "embed", "video", "audio", "base", "form"}


class Page(HTMLParser):
    """Fails on an element that is not closed in order, or that could fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in OUTSIDE
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert name in ("class", "alt", "src", "lang", "charset", "name", "content"), name
            if name == "src":
                assert value is not None and value.startswith("data:image/svg+xml;base64,")
                self.images.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def check(page: Path) -> Page:
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "@import" not in text and "url(" not in text
    found = Page(text)
    assert len(found.images) == 3
    for image in found.images:
        check_svg(base64.b64decode(image.split(",", 1)[1]).decode())
    return found


def check_svg(text: str) -> None:
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    references = re.findall(r'href="([^"]+)"', text) + re.findall(r"url\(([^)]+)\)", text)
    assert references and all(r.startswith(("#", "data:")) for r in references)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-prompts 12 --max-concurrency 4", "steady window"),
        ("--num-prompts 12 --max-concurrency 4 --num-seeds 2", "means of 2 seeds"),
        ("--num-prompts 5 --max-concurrency 4 --num-seeds 2 --ab-url {url}", "2 seeds, in turn"),
        ("--slo ttft:1e6 --request-rate 3e3 --find-knee --probe-s 1e-9", "none failed"),
    ],
)
def test_the_page(
    mock: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    words: str,
) -> None:
    from loadtesting import knee

    monkeypatch.setattr(knee, "MAX_PROBES", 3)
    url, file = mock(), tmp_path / "report.html"
    always = f"--base-url {url} --output-len 6 --num-warmups 1 --html {file}"
    always = f"{always} --max-client-lag-ms 1e6"
    assert loadtest.main(f"{always} {flags.format(url=url)}".split()) == 0
    page = check(file)
    text = "".join(page.words)
    assert words in text and "valid, no request failed" in text and url in text


def test_the_page_of_a_run_in_which_all_failed(mock: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    flags = f"--num-prompts 3 --num-warmups 0 --max-client-lag-ms 1e6 --html {file}"
    assert loadtest.main(["--base-url", mock(fail_every=1), *flags.split()]) == 1
    words = "".join(Page(file.read_text()).words)
    assert "3 requests failed" in words and "nothing to plot" in words


def test_hostile_text_stays_text(mock: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    flags = f"--num-prompts 2 --num-warmups 0 --max-client-lag-ms 1e6 --html {file}"
    evil = "<script>x</script>"
    assert loadtest.main(["--base-url", mock(), "--model", evil, *flags.split()]) == 0
    assert evil in "".join(check(file).words)


def test_the_live_table() -> None:
    counters = [[0] * len(Counter), [0] * len(Counter)]
    before = live.Look(10.0, live.add_up(counters))
    counters[0][Counter.SENT], counters[0][Counter.DONE] = 7, 4
    counters[1][Counter.SENT], counters[1][Counter.READS] = 5, 3000
    look = live.Look(12.0, live.add_up(counters))
    console = rich.console.Console(file=io.StringIO(), width=120)
    console.print(live.draw("a server", 2.0, before, look))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    numbers = re.findall(r"[\d.,]+", shown.splitlines()[-2])
    # seconds, done, in flight, failed, done/s, reads/s, MB/s
    assert numbers == ["10", "4", "8", "0", "2.0", "1,500", "0.00"]


def test_no_table_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with live.live_table("x") as watch:
        watch([[0] * len(Counter)])
    assert capfd.readouterr() == ("", "")
