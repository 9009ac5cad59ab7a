"""The training text: seeded, consistent, and apart from the prompts of the quality test."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from tools.demo_model.corpus import Corpus, skip_sum
from tools.demo_model.train import parse

ROOT = Path(__file__).parents[2]
SUM = re.compile(r"(-?\d+) ([+-]) (\d+) = (-?\d+)")


@pytest.fixture(scope="module")
def examples():
    return list(islice(Corpus(0), 4000))


def conversations(examples):
    return [example for example in examples if "messages" in example]


def answers(examples):
    for example in examples:
        if "text" in example:
            yield example["text"]
        else:
            yield from (
                message["content"]
                for message in example["messages"]
                if message["role"] == "assistant"
            )


def normalised(text):
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def test_a_seed_fixes_the_text():
    first, again, other = (list(islice(Corpus(seed), 50)) for seed in (1, 1, 2))
    assert first == again != other


def test_every_sum_is_right_and_some_pairs_are_left_out(examples):
    matches = [match for answer in answers(examples) for match in SUM.findall(answer)]
    sums = [(int(a), sign, int(b), int(result)) for a, sign, b, result in matches]
    assert len(sums) > 1000
    for a, sign, b, result in sums:
        assert result == (a + b if sign == "+" else a - b)
    drills = [SUM.findall(example["text"]) for example in examples if "text" in example]
    assert not any(skip_sum(int(a), int(b)) for matches in drills for a, _, b, _ in matches)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_quality_prompt_is_in_the_training_text():
    files = (ROOT / "tools" / "demo_model").glob("*_prompts.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text("utf8").splitlines()]
    questions = {
        normalised(row["messages"][-1]["content"])
        for row in rows
        if row["kind"] not in ("text", "result")
    }
    options = parse([])
    for example in islice(Corpus(options.seed), options.examples):
        for message in example.get("messages", []):
            assert message["role"] != "user" or normalised(message["content"]) not in questions
