"""Structured outputs by HTTP: every way to ask for one, refusals, and schemas that explode."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema
import openai
import pydantic
import pytest

from servd.api.engine import grammar_checker
from servd.api.protocol.structured import StructuredRequest
from servd.base.errors import Overloaded
from servd.core.structured_output import grammar
from servd.messages.params import StructuredOutput
from tests.api.harness import MODEL, Served, events, serve, user

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"enum": ["S", "M", "L"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
# Compiling the conjunction of these patterns takes for ever.
PATTERNS = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(2, 30)]
EXPLOSIVE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"allOf": PATTERNS}}}


def json_schema(schema) -> dict:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "strict": True, "schema": schema},
    }


async def ask(http, path=CHAT, **body) -> str:
    prompt = {"messages": user("hi")} if path == CHAT else {"prompt": "hi"}
    answer = await http.post(path, json={**prompt, "max_tokens": 400, **body})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if path == CHAT else choice["text"]


def is_valid(text: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))


FORMS = [
    ({"response_format": json_schema(SCHEMA)}, is_valid),
    ({"response_format": {"type": "json_object"}}, lambda text: type(json.loads(text)) is dict),
    ({"structured_outputs": {"json": SCHEMA}}, is_valid),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_valid),
    ({"structured_outputs": {"json_object": True}}, lambda text: type(json.loads(text)) is dict),
    ({"structured_outputs": {"regex": "[0-9]{4}"}}, lambda text: re.fullmatch("[0-9]{4}", text)),
    ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
    (
        {"structured_outputs": {"grammar": 'root ::= "a" [0-9]'}},
        lambda text: re.fullmatch("a[0-9]", text),
    ),
    ({"guided_json": SCHEMA}, is_valid),
    ({"guided_regex": "[0-9]{4}"}, lambda text: re.fullmatch("[0-9]{4}", text)),
    ({"guided_choice": ["red", "green"]}, lambda text: text in ("red", "green")),
    ({"guided_grammar": 'root ::= "a" [0-9]'}, lambda text: re.fullmatch("a[0-9]", text)),
]


async def test_every_way_to_ask(http):
    for path in (CHAT, COMPLETIONS):
        for body, is_right in FORMS:
            assert is_right(await ask(http, path, **body)), body


async def test_a_stream_joined_is_the_answer_and_choices_are_independent(http):
    body = {
        "messages": user("hi"),
        "max_tokens": 400,
        "n": 3,
        "seed": 1,
        "response_format": json_schema(SCHEMA),
    }
    whole = (await http.post(CHAT, json=body)).json()
    chunks = events((await http.post(CHAT, json={**body, "stream": True})).text)
    joined = dict.fromkeys(range(3), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice["delta"].get("content") or ""
    assert joined == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert all(is_valid(text) for text in joined.values())


REFUSED = [
    ({"response_format": json_schema({"type": "bogus"})}, "response_format", "bogus"),
    ({"response_format": json_schema({"not": {}})}, "response_format", "Unimplemented"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema",
        "schema",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "text"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must not be empty"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "EOF"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "unknown",
    ),
    (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "structured_outputs.choice",
        "together",
    ),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "together"),
    ({"guided_grammar": "hello"}, "guided_grammar", "::="),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "at most 65536"),
    ({"guided_json": {"enum": ["a"]}, "use_beam_search": True}, "guided_json", "beam"),
    ({"response_format": EXPLOSIVE}, "response_format", "too complex"),
]


@pytest.fixture(autouse=True)
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, a check waits for its CPU time and gives a verdict."""
    monkeypatch.setattr(grammar_checker, "BUSY_FACTOR", 100)


async def test_unsupported_structures_are_refused_and_serving_continues(http, monkeypatch):
    monkeypatch.setattr(grammar_checker, "TIME_LIMIT", 1.0)
    for body, param, reason in REFUSED:
        for stream in (False, True):
            answer = await http.post(CHAT, json={"messages": user("hi"), "stream": stream, **body})
            assert answer.status_code == 400, body
            error = answer.json()["error"]
            assert error["param"].startswith(param) and reason in error["message"], error
    assert is_valid(await ask(http, response_format=json_schema(SCHEMA)))


async def test_an_output_that_outgrows_its_grammar_is_cut_and_says_why(http, monkeypatch):
    monkeypatch.setitem(grammar.LIMITS, "max_lexer_states", 40)
    body = {"messages": user("hi"), "max_tokens": 150, "guided_regex": "[0-9]{200}"}
    whole = await http.post(CHAT, json=body)
    choice = whole.json()["choices"][0]
    assert choice["finish_reason"] == "length" and "too many states" in choice["stop_reason"]
    assert re.fullmatch("[0-9]{20,149}", choice["message"]["content"])
    num_tokens = whole.json()["usage"]["completion_tokens"]
    assert num_tokens == len(choice["message"]["content"])
    chunks = events((await http.post(CHAT, json={**body, "stream": True})).text)
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1] == "length"


OUTGROWING = [
    {"guided_json": {"type": "object", "properties": {f"p{i}": {} for i in range(n)}}}
    for n in (900, 2000, 3500)
] + [
    {"guided_choice": [f"item {i}" for i in range(4000)]},
    {"guided_choice": ["<eos>"]},
    {"guided_json": {"const": "<eos>"}},
    {"guided_regex": "(([a-z]{1,30} ){1,30}){1,30}"},
    {"guided_grammar": 'start: "<eos>" /[a-z]{1,9}/ "<eos>"'},
    {"guided_grammar": "start: " + " | ".join(f'"item {i}" A' for i in range(3000)) + "\nA: /a/"},
]


async def test_no_form_is_an_error_of_the_server(http):
    for body in OUTGROWING:
        answer = await http.post(CHAT, json={"messages": user("hi"), "max_tokens": 300, **body})
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert re.search(
                "more than [0-9]|limit is [0-9]|within [0-9]", answer.json()["error"]["message"]
            )
        else:
            assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


async def test_an_explosive_schema_disturbs_nobody(served: Served, monkeypatch):
    monkeypatch.setattr(grammar_checker, "TIME_LIMIT", 1.5)
    served.async_llm.processor.grammars.check(StructuredOutput("regex", "warm"))
    explosion = asyncio.create_task(
        served.http.post(CHAT, json={"messages": user("hi"), "response_format": EXPLOSIVE})
    )
    statuses = []
    while not explosion.done():
        answer = await served.http.post(CHAT, json={"messages": user("hi"), "max_tokens": 5})
        statuses.append(answer.status_code)
    assert (await explosion).status_code == 400
    assert len(statuses) > 4  # one or two, if they had to wait for the compilation
    assert set(statuses) == {200}


async def test_free_text_asks_for_nothing(http):
    for body in (
        {"response_format": {"type": "text"}},
        {"structured_outputs": None},
        {"guided_json": None},
    ):
        answer = await http.post(CHAT, json={"messages": user("hi"), "max_tokens": 4, **body})
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert "x-servd-ignored" not in answer.headers


def test_a_schema_keeps_the_order_of_its_keys():
    body = StructuredRequest.model_validate({"guided_json": {"properties": {"b": {}, "a": {}}}})
    output = body.structured_output()
    assert output is not None and output.value.index('"b"') < output.value.index('"a"')


async def test_the_openai_client_parses_into_pydantic():
    class Item(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=6)
        size: int = pydantic.Field(ge=0, le=99)

    async with serve(listen=True) as served:
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="-", max_retries=0
        ) as client:
            done = await client.chat.completions.parse(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                response_format=Item,
                max_tokens=400,
            )
            item = done.choices[0].message.parsed
            assert isinstance(item, Item) and 0 <= item.size <= 99


async def test_a_process_that_died_is_started_again(served: Served):
    grammars = served.async_llm.processor.grammars
    grammars.check(StructuredOutput("regex", "a"))
    assert grammars._process is not None
    grammars._process[0].process.kill()
    grammars.check(StructuredOutput("regex", "b"))


async def test_a_process_that_died_before_it_was_ready_is_started_again(served: Served):
    grammars = served.async_llm.processor.grammars
    grammars.start()
    assert grammars._process is not None
    grammars._process[0].process.kill()
    with pytest.raises(Overloaded, match="retry"):
        grammars.check(StructuredOutput("regex", "a"))
    grammars.check(StructuredOutput("regex", "a"))
