"""The training text: seeded, consistent in itself, and apart from the prompts of the quality
test.
"""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from tools.demo_model.corpus import Corpus, skip_sum
from tools.demo_model.grammar import Grammar
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


def test_held_out_text_differs(examples):
    assert list(islice(Corpus(0, held_out=True), 50)) != examples[:50]


def test_every_sum_is_right_and_some_pairs_are_left_out(examples):
    found = [SUM.findall(answer) for answer in answers(examples)]
    sums = [
        (int(a), sign, int(b), int(result)) for matches in found for a, sign, b, result in matches
    ]
    assert len(sums) > 1000
    for a, sign, b, result in sums:
        assert result == (a + b if sign == "+" else a - b)
    drills = [SUM.findall(example["text"]) for example in examples if "text" in example]
    assert not any(skip_sum(int(a), int(b)) for matches in drills for a, _, b, _ in matches)


def test_json_answers_are_json(examples):
    objects = [json.loads(answer) for answer in answers(examples) if answer.startswith("{")]
    assert len(objects) > 100
    assert {type(value) for item in objects for value in item.values()} == {str, int}


def test_calls_fit_the_given_functions(examples):
    calls = 0
    for example in conversations(examples):
        declared = {
            tool["function"]["name"]: tool["function"]["parameters"]
            for tool in example["tools"] or []
        }
        for message in example["messages"]:
            for call in message.get("tool_calls", []):
                calls += 1
                parameters = declared[call["function"]["name"]]
                assert list(call["function"]["arguments"]) == parameters["required"]
    assert calls > 100


def test_conversations_alternate_and_think_all_or_nothing(examples):
    for example in conversations(examples):
        messages = [message for message in example["messages"] if message["role"] != "system"]
        assert messages[0]["role"] == "user"
        for before, after in zip(messages, messages[1:], strict=False):
            assert (before["role"] == "assistant") == (after["role"] == "user") or after[
                "role"
            ] == "tool"
        reasoning = [
            bool(message.get("reasoning_content"))
            for message in messages
            if message["role"] == "assistant"
        ]
        assert set(reasoning) == {example["thinking"]}


def test_every_slot_and_choice_is_filled(examples):
    for example in examples:
        texts = (
            [example["text"]]
            if "text" in example
            else [message["content"] for message in example["messages"]]
        )
        for text in texts:
            assert not re.search(r"<[a-z]\w*>", text.replace("<think>", ""))
            assert "|" not in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_quality_prompt_is_in_the_training_text():
    files = (ROOT / "tools" / "demo_model").glob("*_prompts.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text("utf8").splitlines()]
    asked = {
        normalised(row["messages"][-1]["content"])
        for row in rows
        if row["kind"] not in ("text", "result")
    }
    options = parse([])
    for example in islice(Corpus(options.seed), options.examples):
        for message in example.get("messages", []):
            assert message["role"] != "user" or normalised(message["content"]) not in asked


def test_grammar_choices_slots_and_articles():
    import random

    grammar = Grammar({"colors": "red blue", "cities": ["New York"]})
    rng = random.Random(0)
    texts = {grammar.expand("{a|{b|c}} <color> <it>,  {x|} end", rng, it="owl") for _ in range(200)}
    assert texts == {
        f"{a} {c} owl,{x} end" for a in "abc" for c in ("red", "blue") for x in (" x", "")
    }
    assert grammar.expand("a <it> in <city>", rng, it="owl") == "an owl in New York"
