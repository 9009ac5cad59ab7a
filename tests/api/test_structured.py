"""Structured outputs by HTTP: every way to ask for one, refusals, and schemas that explode."""

import asyncio
import json
import re

import jsonschema
import pytest

from servd.api.engine import grammar_checker, limited_process
from servd.api.protocol.structured import StructuredRequest
from servd.core.structured_output import grammar
from servd.messages.params import StructuredOutput
from tests.api.harness import Served, events, user

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
    form = {"name": "answer", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": form}


async def ask(http, path=CHAT, **body) -> str:
    prompt = {"messages": user("hi")} if path == CHAT else {"prompt": "hi"}
    answer = await http.post(path, json={**prompt, "max_tokens": 400, **body})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if path == CHAT else choice["text"]


def is_valid(text: str) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(text))


DIGITS = {"type": "regex", "pattern": "[0-9]{4}"}
TAG = {"type": "tag", "begin": "<a>", "content": DIGITS, "end": "</a>"}
TAGGED = {"type": "structural_tag", "format": TAG}
GRAMMAR = 'root ::= "a" [0-9]'
FORMS = [
    ({"response_format": json_schema(SCHEMA)}, is_valid),
    ({"response_format": {"type": "json_object"}}, lambda text: type(json.loads(text)) is dict),
    ({"structured_outputs": {"json": SCHEMA}}, is_valid),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_valid),
    ({"structured_outputs": {"json_object": True}}, lambda text: type(json.loads(text)) is dict),
    ({"structured_outputs": {"regex": "[0-9]{4}"}}, re.compile("[0-9]{4}").fullmatch),
    ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
    ({"structured_outputs": {"grammar": GRAMMAR}}, re.compile("a[0-9]").fullmatch),
    ({"response_format": TAGGED}, re.compile("<a>[0-9]{4}</a>").fullmatch),
    ({"structured_outputs": {"structural_tag": TAGGED}}, re.compile("<a>[0-9]{4}</a>").fullmatch),
    ({"guided_json": SCHEMA}, is_valid),
    ({"guided_regex": "[0-9]{4}"}, re.compile("[0-9]{4}").fullmatch),
    ({"guided_choice": ["red", "green"]}, lambda text: text in ("red", "green")),
    ({"guided_grammar": GRAMMAR}, re.compile("a[0-9]").fullmatch),
]


async def test_every_way_to_ask(http):
    for path in (CHAT, COMPLETIONS):
        for body, is_right in FORMS:
            assert is_right(await ask(http, path, **body)), body


JSON_OBJECT = {"response_format": {"type": "json_object"}}
REFUSED = [
    ({"response_format": json_schema({"type": "bogus"})}, "response_format"),
    ({"response_format": json_schema({"not": {}})}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": json_schema(None)}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ({**JSON_OBJECT, "guided_regex": "a"}, "guided_regex"),
    ({"guided_grammar": "hello"}, "guided_grammar"),
    ({"guided_regex": "a" * 70_000}, "guided_regex"),
    ({"guided_json": {"enum": ["a"]}, "use_beam_search": True}, "guided_json"),
    ({"response_format": EXPLOSIVE}, "response_format"),
]


@pytest.fixture(autouse=True)
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, a check waits for its CPU time and gives a verdict."""
    monkeypatch.setattr(limited_process, "BUSY_FACTOR", 100)


async def test_unsupported_structures_are_refused_and_serving_continues(http, monkeypatch):
    monkeypatch.setattr(grammar_checker, "TIME_LIMIT", 1.0)
    for body, param in REFUSED:
        for stream in (False, True):
            answer = await http.post(CHAT, json={"messages": user("hi"), "stream": stream, **body})
            assert answer.status_code == 400, body
            error = answer.json()["error"]
            assert error["param"].startswith(param), error
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
            message = answer.json()["error"]["message"]
            assert re.search("more than [0-9]|limit is [0-9]|within [0-9]", message)
        else:
            assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


async def test_an_explosive_schema_disturbs_nobody(served: Served, monkeypatch):
    monkeypatch.setattr(grammar_checker, "TIME_LIMIT", 1.5)
    served.async_llm.processor.grammars.check(StructuredOutput("regex", "warm"))
    body = {"messages": user("hi"), "response_format": EXPLOSIVE}
    explosion = asyncio.create_task(served.http.post(CHAT, json=body))
    statuses = []
    while not explosion.done():
        answer = await served.http.post(CHAT, json={"messages": user("hi"), "max_tokens": 5})
        statuses.append(answer.status_code)
    assert (await explosion).status_code == 400
    assert len(statuses) > 4  # one or two, if they had to wait for the compilation
    assert set(statuses) == {200}


def test_a_schema_keeps_the_order_of_its_keys():
    body = StructuredRequest.model_validate({"guided_json": {"properties": {"b": {}, "a": {}}}})
    output = body.structured_output()
    assert output is not None and output.value.index('"b"') < output.value.index('"a"')
