"""Draw docs/images/speed.svg: the first table of docs/benchmarks/peers.md as bars."""

from __future__ import annotations

from html import escape
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/benchmarks/peers.md"
# the bars stand on BASE
WIDTH = 760
HEIGHT = 300
LEFT = 20
TOP = 66
BASE = 262
BAR = 56
GAP = 6
COLOURS = ["#1d4ed8", "#a3a3a3", "#d4b483"]
TEXT = "#111827"
SOFT = "#4b5563"


def label(x: int, y: int, text: str, size: int = 14, colour: str = TEXT) -> str:
    """Text centred at x."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="middle">'
        f"{escape(text)}</text>"
    )


def table(text: str) -> tuple[list[str], list[tuple[str, list[float]]]]:
    """The names of the servers, and a row for each load: its name, and tok/s of each server."""
    first = text[text.index("\n|") + 1 :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first.splitlines()]
    head, _, *body = rows
    return head[1:], [(load, [float(cell) for cell in cells]) for load, *cells in body]


def draw() -> str:
    """The whole picture as SVG text. Bars of a load are as high as their share of its best."""
    names, rows = table(PAGE.read_text(encoding="utf8"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        "<title>Output tokens per second beside other servers</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        label(WIDTH // 2, 24, "Output tokens per second, GPT-2 124M in float32, two CPU cores", 15),
    ]
    for i, name in enumerate(names):
        x = WIDTH // 2 + (i - 1) * 150
        parts.append(f'<rect x="{x - 58}" y="37" width="12" height="12" fill="{COLOURS[i]}"/>')
        parts.append(label(x, 48, name, 13))
    step = (WIDTH - 2 * LEFT) // len(rows)
    for i, (load, speeds) in enumerate(rows):
        middle = LEFT + step // 2 + i * step
        first = middle - (len(speeds) * (BAR + GAP) - GAP) // 2
        for j, speed in enumerate(speeds):
            x = first + j * (BAR + GAP)
            height = round((BASE - TOP - 20) * speed / max(speeds))
            parts.append(
                f'<rect x="{x}" y="{BASE - height}" width="{BAR}" height="{height}" rx="3" '
                f'fill="{COLOURS[j]}"/>'
            )
            parts.append(label(x + BAR // 2, BASE - height - 6, f"{speed:g}", 13))
        parts.append(label(middle, BASE + 22, load, 13, colour=SOFT))
    return "\n".join([*parts, "</svg>"]) + "\n"
