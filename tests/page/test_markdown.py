"""The page's own Markdown, in the browser that it builds nodes for."""

from __future__ import annotations

import json
import random

from tests.page.browser import Chromium, tab
from tests.page.upstream import upstream
from tests.waiting import run

LINK = '<a href="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
CASES = {
    "# One\n## Two #\n####### seven": "<h3>One</h3><h4>Two</h4><p>####### seven</p>",
    "a *b* **c** ***d*** ~~e~~ `f*g*`": (
        "<p>a <em>b</em> <strong>c</strong> <em><strong>d</strong></em> <del>e</del> "
        "<code>f*g*</code></p>"
    ),
    "2 * 3 * 4, snake_case_name, **open": "<p>2 * 3 * 4, snake_case_name, **open</p>",
    "``a`b`` and \\*no\\* and `open": "<p><code>a`b</code> and *no* and `open</p>",
    "**a *b* c** _d **e**_": (
        "<p><strong>a <em>b</em> c</strong> <em>d <strong>e</strong></em></p>"
    ),
    "- a\n- b\n  - c\n\n- d": (
        "<ul><li><p>a</p></li><li><p>b</p><ul><li>c</li></ul></li><li><p>d</p></li></ul>"
    ),
    "- a\n- b\n  - c": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>",
    "- [x] a\n- [ ] b": (
        '<ul><li><input type="checkbox" checked="" disabled="">a</li>'
        '<li><input type="checkbox" disabled="">b</li></ul>'
    ),
    "3. x\n4. y\n\nz": '<ol start="3"><li>x</li><li>y</li></ol><p>z</p>',
    "> q\n> - r\n\ns": "<blockquote><p>q</p><ul><li>r</li></ul></blockquote><p>s</p>",
    "a\n\n---\n\nb": "<p>a</p><hr><p>b</p>",
    "one\ntwo": "<p>one\ntwo</p>",
    "<b>&amp;</b> &#0;&nosuch;": "<p>&lt;b&gt;&amp;&lt;/b&gt; \ufffd&amp;nosuch;</p>",
    "[t](https://x.example/a_(b)) [j](javascript:x) [k](/local)": (
        "<p>" + LINK.format("https://x.example/a_(b)", "t") + " [j](javascript:x) [k](/local)</p>"
    ),
    "see https://x.example/a.": "<p>see " + LINK.format(*["https://x.example/a"] * 2) + ".</p>",
    "![alt](https://x.example/i.png)": (
        "<p>" + LINK.format("https://x.example/i.png", "alt") + "</p>"
    ),
    "[a [b](https://x.example/) c](https://y.example/)": (
        "<p>[a " + LINK.format("https://x.example/", "b") + " c]("
        + LINK.format("https://y.example/", "https://y.example/") + ")</p>"
    ),
    "|a|b|\n|-|:-:|\n|`c`|d|e|": (
        '<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead><tr>'
        '<th>a</th><th class="center">b</th></tr></thead><tbody><tr><td><code>c</code></td>'
        '<td class="center">d</td></tr></tbody></table></div>'
    ),
    "```py\n<i>\n\n# no\n```\nafter": (
        "<figure><figcaption>py</figcaption><pre>&lt;i&gt;\n\n# no\n</pre></figure><p>after</p>"
    ),
    "1. do\n   ```\n   x\n\n   y\n   ```\n2. done": (
        "<ol><li>do<figure><figcaption></figcaption><pre>x\n\ny\n</pre></figure></li>"
        "<li>done</li></ol>"
    ),
    "~~~\nopen": "<figure><figcaption></figcaption><pre>open</pre></figure>",
}  # fmt: skip
MATH = {
    r"so \(a^2\) is $x_1$ or $$b$$": ["a2", "x1", "b"],
    "\\[\n\\frac{1}{2}\n- 3\n\\]\n\n$$\n\\begin{aligned}a &= b \\\\ c &= d\\end{aligned}\n$$": [
        "12\u22123", "a=bc=d"
    ],
    "it costs $5 and $6, or $5-$6": [],
    r"\[not a link](/foo) and `\(a\)` and \(\)": [],
    "$$100\n\nis much": [],
    r"\(\nosuchcommand{\)": [],
}  # fmt: skip
# Simpler code blocks to compare with: without their buttons.
HELPERS = """
const { MarkdownStream } = await import('/web/markdown.js');
const render = (pieces) => {
  const root = document.createElement('div');
  const stream = new MarkdownStream(root);
  for (const piece of pieces) stream.append(piece);
  stream.finish();
  root.normalize();
  for (const figure of root.querySelectorAll('figure')) {
    figure.removeAttribute('class');
    figure.querySelector('figcaption').textContent = figure.querySelector('span').textContent;
    const pre = figure.querySelector('pre');
    pre.textContent = pre.textContent;
    pre.removeAttribute('tabindex');
  }
  return [root.innerHTML, stream.parsedChars, root];
};
"""


def in_page(chromium: Chromium, body: str, **values: object) -> object:
    """Runs `body` in the page after HELPERS, with `values` as constants; returns its result."""

    async def test() -> object:
        async with upstream() as server, tab(chromium) as opened:
            await opened.open(server.url)
            constants = "".join(f"const {k} = {json.dumps(v)};" for k, v in values.items())
            return await opened.evaluate(f"(async () => {{ {HELPERS} {constants} {body} }})()")

    return run(test())


def test_rendering(chromium: Chromium) -> None:
    texts = list(CASES)
    shown = in_page(chromium, "return texts.map((text) => render([text])[0]);", texts=texts)
    assert isinstance(shown, list)
    assert dict(zip(texts, shown, strict=True)) == CASES


def test_streamed_equals_whole(chromium: Chromium) -> None:
    """Whatever the pieces: all cases in one document, letter by letter and in threes."""
    text = "\n\n".join(CASES).replace("~~~\nopen", "~~~\nclosed\n~~~\n") * 2
    body = """
    const cut = (n) => text.match(new RegExp(`[^]{1,${n}}`, 'g'));
    return [1, 3, 1000, text.length].map((n) => render(cut(n))[0]);
    """
    shown = in_page(chromium, body, text=text)
    assert isinstance(shown, list)
    for one in shown:
        assert one == shown[-1]


def test_maths(chromium: Chromium) -> None:
    """MathML for what TeX is; money, escapes and what cannot be read stay text."""
    body = """
    const found = (root) => [...root.querySelectorAll('math')].map((m) => m.textContent);
    const both = (text) => [[text], [...text]].map((pieces) => found(render(pieces)[2]));
    return texts.map(both);
    """
    shown = in_page(chromium, body, texts=list(MATH))
    assert isinstance(shown, list)
    for (text, wanted), ways in zip(MATH.items(), shown, strict=True):
        assert ways == [wanted, wanted], text


def test_code_is_coloured_when_complete(chromium: Chromium) -> None:
    body = """
    const root = document.createElement('div');
    const stream = new MarkdownStream(root);
    const pair = (span) => [span.className, span.textContent];
    const spans = () => [...root.querySelectorAll('pre span')].map(pair);
    stream.append('```python\\ndef f(): return "<b>"\\n');
    const before = spans();
    stream.append('```\\n\\n- x\\n  ```nosuch\\n  y\\n  ```\\n');
    stream.finish();
    return [before, spans(), root.querySelector('pre').textContent];
    """
    shown = in_page(chromium, body)
    assert isinstance(shown, list)
    before, after, text = shown
    assert before == [] and text == 'def f(): return "<b>"\n'
    assert ["hl-keyword", "def"] in after and ["hl-string", '"<b>"'] in after


def test_names_of_links_may_come_later(chromium: Chromium) -> None:
    text = (
        "See [one] and [two][2].\n\nMore.\n\n[one]: https://x.example/1\n[2]: https://x.example/2\n"
    )
    body = "return [render([text])[0], render([...text])[0]];"
    wanted = (
        "<p>See " + LINK.format("https://x.example/1", "one") + " and "
        + LINK.format("https://x.example/2", "two") + ".</p><p>More.</p>"
    )  # fmt: skip
    assert in_page(chromium, body, text=text) == [wanted, wanted]


UNITS = [
    "word ", "w", "line\n", "- item\n", "para\n\n", "| a | b |\n", "[", "*a", "`", "**a *b ", "> ",
    "a](", "_x ~~y", "# ", "1. x\n\n", "```\n", "- ```\n", "https://x",
]  # fmt: skip


def test_work_grows_with_the_text(chromium: Chromium) -> None:
    """Twice the text is twice the parsing, not four times, whatever it is made of."""
    body = """
    const count = (unit, length) => {
      const text = unit.repeat(length / unit.length);
      return render(text.match(/[^]{1,100}/g))[1];
    };
    return units.map((unit) => [count(unit, 10000), count(unit, 20000)]);
    """
    counted = in_page(chromium, body, units=UNITS)
    assert isinstance(counted, list)
    for unit, (once, twice) in zip(UNITS, counted, strict=True):
        assert twice <= 2.3 * once + 100_000, unit


PIECES = [
    "a", "b c", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", "# ", "- ", "1. ", "> ", "```",
    "~~~", "`", "*", "**", "_", "[", "](https://x.example/)", "[a]: /u", "|a|b|\n|-|-|\n", "<b>",
    "$$", "$x$", "\\(", "\\)", "\\[", "\\]", "---", "===", "&amp;", "![", "- [x] ", "x" * 700,
]  # fmt: skip


def test_any_text_streams_as_the_whole(chromium: Chromium) -> None:
    """Random texts, whole, letter by letter and in threes."""
    rng = random.Random(1)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(3, 40))) for _ in range(300)]
    body = """
    const cut = (text, n) => render(text.match(new RegExp(`[^]{1,${n}}`, 'g')))[0];
    return texts.filter((text) => [1, 3].some((n) => cut(text, n) !== render([text])[0]));
    """
    assert in_page(chromium, body, texts=texts) == []


def test_no_letter_is_lost(chromium: Chromium) -> None:
    """In text long enough to be cut, with and without spaces."""
    body = """
    const text = ('word '.repeat(3000) + 'x'.repeat(9000) + '\\n\\n```\\n' + 'y'.repeat(9000));
    const root = render(text.match(/[^]{1,97}/g))[2];
    const count = (letter) => root.textContent.split(letter).length - 1;
    return [count('word'), count('x'), count('y')];
    """
    assert in_page(chromium, body) == [3000, 9000, 9000]
