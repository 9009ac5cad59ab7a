"""POST /v1/decisions: the trie of the options, the wire form, limits and admission."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.api.serving.decisions import branches
from tests.api.harness import serve

CHOICES = [{"value": "red"}, {"value": "rose", "description": "a pale red"}, {"value": "blue"}]
BODY = {
    "model": "fake",
    "input": "The sky at noon.",
    "questions": [
        {"type": "predicate", "instructions": "It is dark.", "name": "dark"},
        {"type": "choice", "instructions": "Which colour?", "choices": CHOICES},
        {
            "type": "score",
            "instructions": "How bright?",
            "levels": [{"label": "dim"}, {"label": "glaring"}],
        },
    ],
}


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=12))
def test_branches_tell_all_options_apart(options):
    options = [[*option, 9] for option in options]  # so that none is the beginning of another
    parted = {
        frozenset((i, j))
        for branch in branches(options)
        for a in branch.members.values()
        for b in branch.members.values()
        if a is not b
        for i in a
        for j in b
    }
    differing = {
        frozenset((i, j)) for i, a in enumerate(options) for j, b in enumerate(options) if a != b
    }
    assert parted == differing
    for branch in branches(options):
        for token_id, members in branch.members.items():
            start = [*branch.path, token_id]
            assert all(options[member][: len(start)] == start for member in members)
    assert len(branches(options)) < len(options)


async def test_one_answer_for_each_question(http):
    response = await http.post("/v1/decisions", json=BODY)
    assert response.status_code == 200, response.text
    decision = response.json()
    assert decision["model"] == "fake"
    predicate, choice, score = decision["answers"]
    assert predicate["type"] == "predicate" and predicate["name"] == "dark"
    assert 0 < predicate["probability"] < 1
    assert [p["value"] for p in choice["probabilities"]] == ["red", "rose", "blue"]
    assert math.isclose(sum(p["probability"] for p in choice["probabilities"]), 1)
    best = max(choice["probabilities"], key=lambda p: p["probability"])
    assert (choice["choice"], choice["confidence"]) == (best["value"], best["probability"])
    mean = sum(p["value"] * p["probability"] for p in score["probabilities"])
    assert math.isclose(score["score"], mean) and score["name"] is None
    usage = decision["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    # In both orders: one branch of yes and no, two of r and of re, one of dim and glaring.
    assert usage["output_tokens"] == 2 * (1 + 2 + 1)


async def test_texts_and_booleans_that_look_alike_are_two_options(http):
    choices = [{"value": True}, {"value": "true"}, {"value": False}]
    question = {"type": "choice", "instructions": "Which?", "choices": choices}
    response = await http.post("/v1/decisions", json={"input": "hi", "questions": [question]})
    [answer] = response.json()["answers"]
    assert [p["value"] for p in answer["probabilities"]] == [True, "true", False]


async def test_255_options_some_of_which_are_prefixes_of_others(http):
    choices = [{"value": str(number)} for number in range(255)]  # 1, 10, 100
    question = {"type": "choice", "instructions": "How many?", "choices": choices}
    response = await http.post("/v1/decisions", json={"input": "hi", "questions": [question]})
    assert response.status_code == 200, response.text
    [answer] = response.json()["answers"]
    assert math.isclose(sum(p["probability"] for p in answer["probabilities"]), 1)


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ({"type": "choice", "instructions": "?", "choices": [{"value": "a"}]}, "choices"),
        ({"type": "choice", "instructions": "?", "choices": [{"value": "a"}] * 2}, "questions[0]"),
        ({"type": "choice", "instructions": "?", "choices": [{"value": 1}] * 2}, "value"),
        ({"type": "predicate", "instructions": ""}, "instructions"),
        ({"type": "guess", "instructions": "?"}, "questions[0]"),
    ],
)
async def test_wrong_questions_are_refused(question, field, http):
    response = await http.post("/v1/decisions", json={"input": "hi", "questions": [question]})
    assert response.status_code == 400
    assert field in response.json()["error"]["param"]


async def test_an_input_that_does_not_fit_is_a_400(http):
    response = await http.post("/v1/decisions", json={**BODY, "input": "x" * 5000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_a_decision_counts_as_one_request():
    async with serve(max_waiting_requests=1) as served:
        assert (await served.http.post("/v1/decisions", json=BODY)).status_code == 200
        assert served.async_llm.num_unfinished == 0
