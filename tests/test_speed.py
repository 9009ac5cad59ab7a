"""The picture of docs/images/speed.svg: bars for the numbers of the table above its link."""

import re
from xml.etree import ElementTree

import pytest

from tools.speed import draw

SVG = "{http://www.w3.org/2000/svg}"
PAGE = """
| another table | servd |
|---|---|
| 1 at once | 9999 |

{table}

![A picture](../images/speed.svg)

| a later table | servd |
|---|---|
| 1 at once | 8888 |
"""
PLAIN = """\
| GPT-2, two CPUs | servd | vLLM 0.32 | llama-server |
|---|---|---|---|
| 1 at once | 46.6 | 30.3 | 54.8 |
| 8 at once | 230 | 179 | 165 |"""
BY_WEIGHTS = """\
| Qwen3-0.6B, two CPUs | servd | llama-server |
|---|---|---|
| Q4_K_M, 1 at once | 40 | 80 |
| Q4_K_M, 16 at once | 1,200 | 400 |
| Q4_K_M, prompts | 900 | 450 |
| int8 / Q8_0, 1 at once | 30 | 15 |
| int8 / Q8_0, 16 at once | 900 | 300 |
| int8 / Q8_0, prompts | 800 | 400 |"""


@pytest.mark.parametrize("table", [PLAIN, BY_WEIGHTS])
def test_the_picture_has_the_table_and_nothing_overlaps(table):
    root = ElementTree.fromstring(draw(PAGE.format(table=table)))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    head, _, *rows = [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()]
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {*head[1:], *(cell for row in rows for cell in row[1:])} <= texts
    assert any(head[0] in text for text in texts if text)
    assert {part for row in rows for part in row[0].split(", ")} <= texts
    assert not {"9999", "8888"} & texts
    bars = [
        [float(rect.attrib[name]) for name in ("x", "y", "width", "height")]
        for rect in root.iter(f"{SVG}rect")
        if "rx" in rect.attrib
    ]
    assert len(bars) == sum(len(row) - 1 for row in rows)
    for i, (x, y, bar_width, bar_height) in enumerate(bars):
        assert x >= 0 and y >= 0 and x + bar_width <= width and y + bar_height <= height
        for other_x, other_y, other_width, other_height in bars[:i]:
            is_beside = x >= other_x + other_width or other_x >= x + bar_width
            assert is_beside or y >= other_y + other_height or other_y >= y + bar_height


def test_bars_are_as_high_as_their_share_of_the_best():
    root = ElementTree.fromstring(draw(PAGE.format(table=BY_WEIGHTS)))
    heights = [
        float(rect.attrib["height"]) for rect in root.iter(f"{SVG}rect") if "rx" in rect.attrib
    ]
    assert heights[0] * 2 == pytest.approx(heights[1], abs=2)
    assert heights[2] == pytest.approx(heights[3] * 3, abs=3)
