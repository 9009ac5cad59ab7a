"""The Markdown of answers, drawn by the console's own files in headless Chromium."""

import json
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.console.conftest import Page, browser
from tests.integration.conftest import shared

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Draws a source in pieces, in the page and under its policy. Returns what is there at the end.
DRAW = """
const [pieces, done] = arguments;
(async () => {
  const { Markdown } = await import(new URL("console/markdown.js", document.baseURI).href);
  const root = document.createElement("div");
  document.body.append(root);
  const markdown = new Markdown(root);
  let numMade = 0;
  const create = document.createElement;
  document.createElement = (name) => (numMade++, create.call(document, name));
  try {
    for (const piece of pieces) {
      markdown.append(piece);
      markdown.draw();
    }
    markdown.draw(true);
  } finally {
    document.createElement = create;
  }
  const all = [...root.querySelectorAll("*")];
  const found = { html: root.outerHTML, text: root.textContent, numMade,
    names: [...new Set(all.map((each) => each.localName))].sort(),
    attributes: [...new Set(all.flatMap((each) => each.getAttributeNames()))].sort(),
    links: [...root.querySelectorAll("a")].map((each) => each.href) };
  root.remove();
  return found;
})().then(done, (error) => done({ error: error.stack }));
"""
EXAMPLE = """# A *title*

Some **bold**, _it_, ***both***, ~~gone~~ and `code **x**`, 2 * 3 * 4, snake_case_name, \\*so\\*
with [a link](https://example.org/a_(b) "title") and https://example.org/x_y_z.

- one
- two
  1. nested

     in it
  2. again
- three
  ```py
  x = 1
    y = 2
  ```
7. seventh
8. eighth

> quoted
> - item

| left | right |
|------|:-----:|
| 1 \\| 2 | `x` |
---
```python
def f():
    return "<b>"
```
In
1986. a year, no list
~~~
never closed
"""
NAMES = {"a", "blockquote", "button", "code", "del", "div", "em", "h3", "h4", "hr", "li", "ol", "p"}
NAMES |= {"pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"}
ATTRIBUTES = {"aria-label", "class", "href", "rel", "role", "start", "tabindex", "target", "type"}
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "<script>window.hit = 1</script>",
    "</div></p><svg onload=alert(1)>",
    "[click](javascript:window.hit=1)",
    "[click](JaVaScRiPt:alert(1))",
    "[click](  data:text/html,<script>alert(1)</script>)",
    "<javascript:alert(1)>",
    '[a](https://x.org"onclick="alert(1))',
    "![x](javascript:alert(1))",
    "`<b>`",
    "```<img src=x>\n<script>alert(1)</script>",
    "| <b> |\n|---|\n| <i onclick=alert(1)> |",
    "> # <h1>",
    "- <style>*{display:none}</style>",
    "[a][b]\n\n[b]: javascript:alert(1)",
    "&lt;b&gt; &#106;avascript:",
)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    for server in shared("--executor", "fake", "--max-model-len", "4096"):
        with browser(server.url) as page:
            page.driver.set_script_timeout(120)
            page.open()
            page.wait(".empty")
            yield page
            page.check()


def draw(page: Page, *pieces: str) -> dict[str, Any]:
    drawn = page.driver.execute_async_script(DRAW, pieces)
    assert "error" not in drawn, drawn["error"]
    return drawn


def html(page: Page, source: str) -> str:
    """What is inside of the element that the source is drawn into."""
    return draw(page, source)["html"].removeprefix("<div>").removesuffix("</div>")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
        ("# a\n### b", "<h3>a</h3><h4>b</h4>"),
        ("#a", "<p>#a</p>"),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("***a***", "<p><strong><em>a</em></strong></p>"),
        ("**a*", "<p>**a*</p>"),
        ("2 * 3 * 4 and a_b_c", "<p>2 * 3 * 4 and a_b_c</p>"),
        ("``a ` *b*`` `c", "<p><code>a ` *b*</code> `c</p>"),
        (r"\*a\* \a", r"<p>*a* \a</p>"),
        ("- a\n- b\n\ntext", "<ul><li><p>a</p></li><li><p>b</p></li></ul><p>text</p>"),
        ("3. a\n   - b", '<ol start="3"><li><p>a</p><ul><li><p>b</p></li></ul></li></ol>'),
        ("- a\nb", "<ul><li><p>a\nb</p></li></ul>"),
        ("In\n1986. It", "<p>In\n1986. It</p>"),
        ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
        ("a\n\n* * *\n", "<p>a</p><hr>"),
        ("a|b\nc|d", "<p>a|b\nc|d</p>"),
    ],
)
def test_a_source_becomes_elements(page: Page, source: str, expected: str):
    assert html(page, source) == expected


def test_a_table_has_its_cells(page: Page):
    drawn = html(page, "text\n| a | b |\n|:--|---|\n| 1 \\| 2 | **x** |\n| y |\n\nafter")
    assert drawn.startswith("<p>text</p>") and drawn.endswith("<p>after</p>")
    assert "<tr><th>a</th><th>b</th></tr>" in drawn
    assert "<tr><td>1 | 2</td><td><strong>x</strong></td></tr><tr><td>y</td></tr>" in drawn


def test_a_fence_has_its_language_and_exactly_its_text(page: Page):
    code = '\n  if a < b && "c":\n\t**no**\n````\n# no\n'
    drawn = draw(page, f"`````c++ title\n{code}`````\n*after*")
    assert "<span>c++</span>" in drawn["html"] and "<em>after</em>" in drawn["html"]
    assert code in drawn["text"] and "strong" not in drawn["names"]


def test_only_links_to_the_web_are_links(page: Page):
    drawn = draw(
        page,
        "[a](https://a.org/b_(c) 'no') [b](http://b.org \"t\") [c](/c) [d](ftp://d.org) "
        "https://e.org/x_y. (http://f.org) [**g** https://h.org](<https://g.org>) "
        "![i](https://i.org) https://j.org/(k)",
    )
    assert drawn["links"] == [
        "https://a.org/b_(c)",
        "http://b.org/",
        "https://e.org/x_y",
        "http://f.org/",
        "https://g.org/",
        "https://i.org/",
        "https://j.org/(k)",
    ]
    assert drawn["html"].count('rel="noopener noreferrer"') == len(drawn["links"])


@pytest.mark.parametrize("source", HOSTILE)
def test_what_is_hostile_is_text(page: Page, source: str):
    drawn = draw(page, source)
    assert {*drawn["names"]} <= NAMES and {*drawn["attributes"]} <= ATTRIBUTES
    assert all(link.startswith(("http://", "https://")) for link in drawn["links"])
    assert not page.run("return window.hit")
    for part in re.findall(r"[<>\w:;]*(?:<|javascript)[\w:;]*>?", source):
        if "```<img" not in source:
            assert part in drawn["text"]


def test_no_letter_is_lost(page: Page):
    for source in (EXAMPLE.replace("https://", ""), "```" + "x " * 200 + "\n`a`", "- " * 300 + "b"):
        drawn = draw(page, source)["text"]
        for word in re.findall(r"[a-z]+", source):
            assert word in drawn


@pytest.mark.parametrize("seed", range(4))
def test_pieces_make_the_same_as_the_whole(page: Page, seed: int):
    """Also of sources that are put together at random, cut at random."""
    chance = random.Random(seed)
    lines = [*EXAMPLE.splitlines(), *HOSTILE, "", "", "```", "  - x", "---|---", "a | b", "    y"]
    sources = [EXAMPLE, *("\n".join(chance.choices(lines, k=25)) for _ in range(40))]
    for source in sources:
        number = chance.choice((1, 5, 40))
        cuts = sorted({0, len(source), *chance.choices(range(len(source)), k=number)})
        pieces = [source[begin:end] for begin, end in pairwise(cuts)]
        assert draw(page, *pieces)["html"] == draw(page, source)["html"], json.dumps(pieces)


def test_markdown_streams_block_by_block(page: Page):
    for number in (10, 100):
        block = "Some *words* of `code`.\n\n```\na\nb\nc\n```\n- item\n\n"
        source = block * number
        drawn = draw(page, *source)
        assert drawn["numMade"] < 400 * number


@pytest.mark.parametrize(
    "part",
    [
        "x",
        "**a ",
        "[",
        "[a](http://x ",
        "`a``",
        ">",
        "- ",
        " ",
        "|",
        "1. ",
        "_a ",
        "https://",
        "*a ",
    ]
    + ["a\n\n", "```\n", "- a\n", "> " * 300 + "a\n", "|a|b|\n|-|-|\n", "\\", "~~a", "![", "]("],
)
def test_a_million_characters_end(page: Page, part: str):
    """Of one line, or of many: without an answer in time, the driver raises an error."""
    for source in (part * (300_000 // len(part)), part * 4000 + "\n" + "-" * 300_000):
        draw(page, source)


def test_what_is_nested_ever_deeper_is_drawn(page: Page):
    items = "".join(f"{'  ' * depth}- a\n" for depth in range(500))
    for source in (
        items,
        "> " * 5000 + "a",
        "*a _b " * 2000 + "_ *" * 2000,
        "[" * 9999 + "]" * 9999,
    ):
        drawn = draw(page, source)
        assert "a" in drawn["text"] or "[" in drawn["text"]
