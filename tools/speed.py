"""Draw docs/images/speed.svg: the table above its link in docs/benchmarks/peers.md as bars.

The head of the table names the model and the CPU, then the servers. A row names the load, after the
weights if there are several: `Q4_K_M, 8 at once`. Rows of the same weights are beside one another.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs/benchmarks/peers.md"
LINK = "(../images/speed.svg)"
WIDTH = 760
LEFT = 20
HEAD = 66
BAR = 56
GAP = 6
COLOURS = ["#1d4ed8", "#a3a3a3", "#d4b483"]
TEXT = "#111827"
SOFT = "#4b5563"
Rows = list[tuple[str, list[str]]]


def label(x: int, y: int, text: str, size: int = 14, colour: str = TEXT) -> str:
    """Text centred at x."""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="middle">'
        f"{escape(text)}</text>"
    )


def read_table(page: str) -> tuple[str, list[str], dict[str, Rows]]:
    """Return what was measured, the servers, and for all weights each load with its speeds."""
    table = page.split(LINK)[0].rpartition("\n|---")
    head = table[0].splitlines()[-1]
    body = (line for line in table[2].splitlines()[1:] if line.startswith("|"))
    measured, *servers = split(head)
    rows: dict[str, Rows] = {}
    for name, *speeds in map(split, body):
        weights, _, load = name.rpartition(", ")
        rows.setdefault(weights, []).append((load, speeds))
    return measured, servers, rows


def split(line: str) -> list[str]:
    """Return the cells of a row."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def draw(page: str | None = None) -> str:
    """The whole picture as SVG text. Bars of a load are as high as their share of its best."""
    measured, servers, rows = read_table(page or PAGE.read_text(encoding="utf8"))
    has_titles = len(rows) > 1
    highest = 120 if has_titles else 176
    above = 40 if has_titles else 20
    panel = above + highest + 38
    height = HEAD + len(rows) * panel
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        "<title>Tokens per second beside other servers</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        label(WIDTH // 2, 24, f"Tokens per second, {measured}", 15),
    ]
    for i, name in enumerate(servers):
        x = WIDTH // 2 + (2 * i + 1 - len(servers)) * 75
        parts.append(f'<rect x="{x - 58}" y="37" width="12" height="12" fill="{COLOURS[i]}"/>')
        parts.append(label(x, 48, name, 13))
    for i, (weights, loads) in enumerate(rows.items()):
        top = HEAD + i * panel
        if has_titles:
            parts.append(label(WIDTH // 2, top + 10, weights))
        parts += draw_panel(loads, top + above + highest, highest)
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_panel(loads: Rows, base: int, highest: int) -> list[str]:
    """Return the bars of a row of loads, which stand on `base`."""
    parts: list[str] = []
    step = (WIDTH - 2 * LEFT) // len(loads)
    for i, (load, speeds) in enumerate(loads):
        middle = LEFT + step // 2 + i * step
        first = middle - (len(speeds) * (BAR + GAP) - GAP) // 2
        numbers = [float(speed.replace(",", "")) for speed in speeds]
        for j, number in enumerate(numbers):
            x = first + j * (BAR + GAP)
            height = round(highest * number / max(numbers))
            parts.append(
                f'<rect x="{x}" y="{base - height}" width="{BAR}" height="{height}" rx="3" '
                f'fill="{COLOURS[j]}"/>'
            )
            parts.append(label(x + BAR // 2, base - height - 6, speeds[j], 13))
        parts.append(label(middle, base + 22, load, 13, colour=SOFT))
    return parts
