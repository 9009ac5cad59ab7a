"""Calls of servd's functions as a tree, for a terminal or as a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from itertools import groupby

import msgspec

STYLE = """<style>
:root { color-scheme: light dark } body { font: 14px ui-monospace, monospace; margin: 2em }
details, .leaf { margin-left: 1.5em } summary { cursor: pointer } pre { overflow: auto }
i { font-style: normal; opacity: .6 } em { font-style: normal; color: light-dark(#06603a, #7fd8a8) }
</style>"""


class Call(msgspec.Struct):
    """A call of a function, or all calls of a process."""

    name: str
    seconds: float = 0.0  # 0 if unknown
    text: str = ""  # what it tells
    calls: list[Call] = []
    place: str = ""  # its file

    @property
    def took(self) -> str:
        """Nothing if unknown."""
        return f"{1000 * self.seconds:.3f} ms" if self.seconds else ""

    def folded(self) -> Iterator[Call]:
        """The calls in it; of those of one name in a row the first two, and the rest as one."""
        for name, group in groupby(self.calls, lambda call: call.name):
            same = [*group]
            yield from same[:2]
            if more := same[2:]:
                seconds = sum(call.seconds for call in more)
                mean = f"{len(more)} more, {1000 * seconds / len(more):.3f} ms each"
                yield Call(name, seconds, mean)


def draw(calls: Iterable[Call], prefix: str = "") -> Iterator[str]:
    """Lines for a terminal."""
    calls = [*calls]
    for call in calls:
        branch, beside = ("└─ ", "   ") if call is calls[-1] else ("├─ ", "│  ")
        yield f"{prefix + branch + call.name:<60}{call.took:>13}  {call.text}".rstrip()
        yield from draw(call.folded(), prefix + beside)


def to_html(call: Call) -> str:
    """The same, to open and close."""
    name, text, place = map(html.escape, (call.name, call.text, call.place))
    line = f"<b>{name}</b> {call.took} <em>{text}</em> <i>{place}</i>"
    if not (inner := "".join(map(to_html, call.folded()))):
        return f'<div class="leaf">{line}</div>'
    return f"<details open><summary>{line}</summary>{inner}</details>"
