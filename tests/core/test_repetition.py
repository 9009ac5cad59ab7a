"""RepetitionDetector against the definition: the output ends in N copies of a pattern."""

import random

from servd.core.repetition import RepetitionDetector
from servd.messages.params import RepetitionDetection


def repeats(output: list[int], smallest: int, largest: int, count: int) -> bool:
    sizes = range(max(smallest, 1), largest + 1)
    return any(
        len(output) >= size * count and output[-size * count :] == output[-size:] * count
        for size in sizes
    )


def test_ends_where_the_output_repeats_itself():
    chance = random.Random(0)
    num_ended = 0
    for _ in range(300):
        prompt, output = ([chance.randrange(2) for _ in range(length)] for length in (3, 40))
        smallest, largest = sorted(chance.choices(range(7), k=2))
        count = chance.randint(2, 4)
        detector = RepetitionDetector(RepetitionDetection(largest, smallest, count))
        for end in range(1, len(output) + 1):
            expected = repeats(output[:end], smallest, largest, count)
            assert detector.append([*prompt, *output[:end]], len(prompt)) is expected
            num_ended += expected
    assert num_ended > 100
