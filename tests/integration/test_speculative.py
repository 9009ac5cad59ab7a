"""A client sees no difference between a server that drafts ahead and one that does not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Server, shared
from tests.integration.test_demo_model import WEATHER
from tests.limits import WAIT_SECONDS

PORT = "On which port does servd listen?"
COPY = "Repeat: red green blue red green blue red green blue red green"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (PORT, {"temperature": 0}),
    "copying": (COPY, {"temperature": 0, "max_tokens": 64, "ignore_eos": True}),
    "seeded": (COPY, {"seed": 7, "temperature": 1.3, "top_p": 0.9, "max_tokens": 64}),
    "three choices": (PORT, {"seed": 3, "n": 3, "max_tokens": 48}),
    "penalties": (COPY, {"seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5}),
    "bad words": (COPY, {"temperature": 0, "bad_words": ["blue"], "max_tokens": 32}),
    "logprobs": (COPY, {"temperature": 0, "logprobs": True, "top_logprobs": 3}),
    "stop string": (COPY, {"temperature": 0, "stop": ["blue red"], "ignore_eos": True}),
    "tool call": ("What is the weather in Paris?", {"temperature": 0, "tools": [WEATHER]}),
    "forced tool call": (
        "Hello!",
        {"seed": 1, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "schema": ("JSON for Anna, 31.", {"seed": 2, "response_format": SCHEMA}),
    "reasoning": (
        "What is 48 + 36?",
        {"temperature": 0, "chat_template_kwargs": {"enable_thinking": True}},
    ),
}


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    """The demo model as it is."""
    yield from shared("--device", "cpu")


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    """The same with drafts from wherever a token came before."""
    config = '{"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}'
    yield from shared("--device", "cpu", "-sc", config)


def chat(server: Server, name: str, **more: Any) -> dict[str, Any]:
    """Choices and usage of a chat, without the ids that every answer has anew."""
    text, fields = CHATS[name]
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 96, **fields, **more}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_SECONDS)
    answer = reply.raise_for_status().json()
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls") or []:
            del call["id"]
    del answer["usage"]["prompt_tokens_details"]  # what was cached before
    return {"choices": answer["choices"], "usage": answer["usage"]}


def logprobs(answer: dict[str, Any]) -> list[float]:
    """All log-probabilities, taken out: sums of other shapes round differently."""
    return [
        token.pop("logprob")
        for choice in answer["choices"]
        for position in (choice["logprobs"] or {"content": []})["content"]
        for token in [*position["top_logprobs"], position]
    ]


@pytest.mark.parametrize("name", CHATS)
def test_an_answer_is_the_same_with_drafts(plain, drafting, name):
    expected, answer = chat(plain, name), chat(drafting, name)
    assert logprobs(answer) == pytest.approx(logprobs(expected), abs=1e-3)
    assert answer == expected


def test_answers_are_the_same_when_they_come_together(plain, drafting):
    expected = [chat(plain, name) for name in CHATS]
    with ThreadPoolExecutor(len(CHATS)) as clients:
        answers = list(clients.map(lambda name: chat(drafting, name), CHATS))
    for answer, expected_answer in zip(answers, expected, strict=True):
        assert logprobs(answer) == pytest.approx(logprobs(expected_answer), abs=1e-3)
    assert answers == expected
    # Or all this would say nothing. How many drafts pay depends on the machine's load.
    assert drafting.metric("vllm:spec_decode_num_draft_tokens_total") > 0


def test_a_request_may_do_without_drafts(drafting):
    with_drafts = chat(drafting, "copying")
    before = drafting.metric("vllm:spec_decode_num_drafts_total")
    assert chat(drafting, "copying", speculative=False) == with_drafts
    assert drafting.metric("vllm:spec_decode_num_drafts_total") == before
