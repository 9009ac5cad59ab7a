"""RepetitionDetector against the definition: the output ends in so many copies of a pattern."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from servd.core.repetition import RepetitionDetector
from servd.params import RepetitionDetection


def repeats(output: list[int], smallest: int, largest: int, count: int) -> bool:
    sizes = range(max(smallest, 1), largest + 1)
    return any(len(output) >= size * count and output[-size * count :] == output[-size:] * count for size in sizes)


@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=6),
    output=st.lists(st.integers(0, 2), max_size=40),
    sizes=st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted),
    count=st.integers(2, 4),
)
def test_ends_where_the_output_repeats_itself(prompt, output, sizes, count):
    smallest, largest = sizes
    detector = RepetitionDetector(RepetitionDetection(largest, smallest, count))
    for end in range(1, len(output) + 1):
        assert detector.append([*prompt, *output[:end]], len(prompt)) is repeats(output[:end], smallest, largest, count)
