"""/openapi.json is true, and wrong parameters are named."""

import asyncio
import base64
import hashlib
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks

from servd.api.http import route
from servd.api.http.route import document, schema_of
from servd.api.protocol.anthropic import MessagesRequest
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.responses import ResponsesRequest
from servd.api.routes import load_routers
from servd.checkpoint.pooling import PoolingSpec
from tests.api.harness import Served, serve, user
from tests.api.test_errors import check
from tools import compatibility

DOCUMENT = document(load_routers(), needs_key=False)
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}
DRIVEN = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
# A right body, to which generated fields are added: all at once are hardly ever right.
BASES = {path: base for path, (base, _) in compatibility.ROUTES.items()}
QUESTION = {"type": "predicate", "instructions": "It is a greeting."}
BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}
BASES |= {
    "/api/chat": {"messages": user("hi"), "options": {"num_predict": 4}},
    "/api/embed": {"input": "hi"},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 4}},
    "/v1/decisions": {"input": "hi", "questions": [QUESTION]},
    "/tokenize": {"prompt": "hi"},
    # The file is replaced by one that is there, half of the time.
    "/v1/batches": {"input_file_id": "file-of-nobody", **BATCH},
    "/v1/chat/completions/render": BASES["/v1/chat/completions"],
    "/v1/messages/count_tokens": {"messages": user("hi")},
    "/v1/rerank": BASES["/rerank"],
    "/v1/responses/compact": {"input": "hi"},
    "/v1/responses/input_tokens": BASES["/v1/responses"],
    "/v1/score": BASES["/score"],
    "/v1/tokenize": {"prompt": "hi"},
    "/v2/rerank": BASES["/rerank"],
}
load_all_checks()
[not_a_server_error] = CHECKS.get_by_names(["not_a_server_error"])
[positive_data_acceptance] = CHECKS.get_by_names(["positive_data_acceptance"])
[negative_data_rejection] = CHECKS.get_by_names(["negative_data_rejection"])
CHECKED = CHECKS.get_by_names(
    "not_a_server_error status_code_conformance content_type_conformance "
    "response_headers_conformance response_schema_conformance".split()
)


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema by itself, in which references into the document work."""
    return {**schema, "components": DOCUMENT["components"]}


def validate(value: Any, schema: dict[str, Any]) -> None:
    """Whether a value has its schema; the document itself is checked once, by schemathesis."""
    jsonschema.Draft202012Validator(schema).validate(value)


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def body_schema(path: str) -> dict[str, Any]:
    """What the document says of the body of a request."""
    body = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    return resolved(DOCUMENT["components"]["schemas"][name])


def content(path: str, status: int, method: str = "post") -> dict[str, Any]:
    """What the document says of a JSON response."""
    response = DOCUMENT["paths"][path][method]["responses"][str(status)]
    return resolved(response["content"]["application/json"]["schema"])


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A server on a socket, in a thread of its own."""
    address: Future[str] = Future()
    end = threading.Event()

    async def run() -> None:
        folder = str(tmp_path_factory.mktemp("batches"))
        async with serve(listen=True, max_model_len=256, batch_dir=folder) as server:
            address.set_result(server.url)
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    yield address.result(10)
    end.set()
    thread.join()


def stored_response(url: str) -> str:
    """The id of a new response that can be read, cancelled and deleted."""
    body = {"input": "hi", "background": True}
    return httpx.post(f"{url}/v1/responses", json=body).json()["id"]


def created_conversation(url: str) -> str:
    """The id of a conversation with an item."""
    body = {"items": [{"id": "known", "role": "user", "content": "hi"}]}
    return httpx.post(f"{url}/v1/conversations", json=body).json()["id"]


def uploaded_file(url: str) -> str:
    """The id of a file that a batch can answer."""
    file = {"file": ("a.jsonl", b"{}")}
    return httpx.post(f"{url}/v1/files", files=file, data={"purpose": "batch"}).json()["id"]


def created_batch(url: str) -> str:
    """The id of a batch that nobody runs."""
    body = {"input_file_id": uploaded_file(url), **BATCH}
    return httpx.post(f"{url}/v1/batches", json=body).json()["id"]


KNOWN = {
    "name": lambda url: "fake",
    "file": lambda url: "app.js",
    "asset": lambda url: "swagger-ui.css",
    "response_id": stored_response,
    "conversation_id": created_conversation,
    "item_id": lambda url: "known",
    "file_id": uploaded_file,
    "batch_id": created_batch,
}


@pytest.mark.parametrize("num_cases", [4, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_generated_requests_are_answered_as_described(name, num_cases, url):
    operation = OPERATIONS[name]
    base = BASES.get(operation.path)
    modes = [operation.as_strategy(mode) for mode in schemathesis.GenerationMode]
    if not operation.body:
        modes.pop()
    answered = []

    @settings(DRIVEN, max_examples=num_cases)
    @given(st.one_of(modes), st.data())
    def drive(case, data):
        if isinstance(case.body, dict):
            if base is not None:
                names = sorted(case.body, key=str)
                kept = data.draw(st.lists(st.sampled_from(names), max_size=3)) if names else []
                case.body = base | {name: case.body[name] for name in kept}
            case.body["model"] = "fake"  # there are few others that exist
            # The first example, which has False everywhere, shall be answered.
            if "input_file_id" in case.body and not data.draw(st.booleans()):
                case.body["input_file_id"] = uploaded_file(url)
        for parameter in case.path_parameters:
            if not data.draw(st.booleans()):
                case.path_parameters[parameter] = KNOWN.get(parameter, stored_response)(url)
        response = case.call(base_url=url)
        # A deadline of microseconds passes, which is what the client asked for.
        late = response.status_code == 504 and "timeout" in case.body
        checks = [
            response_check
            for response_check in CHECKED
            if not (late and response_check is not_a_server_error)
        ]
        case.validate_response(response, checks=checks)
        answered.append(response.status_code)

    drive()
    # The first ones refuse here; /invocations has the bodies of five routes, seldom whole, and
    # /collective_rpc takes the names of five methods.
    refusing = ("POST /classify", "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter")
    assert 200 in answered or name in (*refusing, "POST /invocations", "POST /collective_rpc")


# What no schema says: rules of the model, of what exists, and between fields.
BEYOND_SCHEMAS = re.compile(
    "|".join(
        (
            # Of the model, and of what exists.
            r".*maximum context length is \d+ tokens",
            r"prompt is too long: \d+ tokens > \d+ maximum",
            r"\w+: token id \d+ is not in the vocabulary",
            r"every entry of \w+ must be a whole number between 0 and 256, ",
            r"(output_)?dimensions? must be between 1 and \d+, the size of this model's vectors",
            r"the model has no classification head",
            r"servd knows no reasoning format of this model",
            r"`suffix` is not supported: servd knows no fill-in-the-middle tokens",
            r"this model's chat template does not read documents",
            r"prompt_name .* is not in the model's files",
            r"`after`: there is no ",
            r"there is no response ",
            r"`encrypted_content` of a reasoning item is damaged",
            # Of grammars: they do not compile.
            r"(guided_\w+|regex|ebnf|grammar|json_schema|structured_outputs|tools): ",
            r"(response_format|format|text\.format|output_config\.format): ",
            # Between fields.
            r"`\S+` needs `\w+`",
            r"send either `conversation` or `previous_response_id`",
            r"top_logprobs must be at most \d+ \(--max-logprobs\)",
            r".* with `use_beam_search`(: leave it out)?$",
            r"`best_of` is not supported: set `n`, ",
            r"min_tokens must be at most ",
            r"`\w+` duplicates a field of this API: ",
            r"`\S+`.* cannot be (used together|streamed)",
            r"`tool_choice` names .* not in `tools`",
            r"`pooling` is not for `task` classify",
            r"`task` and `pooling` contradict each other",
            r"`text_1` has \d+ texts and `text_2` \d+: ",
            r"repetition_detection\.\w+ must be at (least 2|most \d+), ",
            r"the options of `questions\[\d+\]` must all differ",
            r"tools: two functions have the name ",
            r"(messages|input) must not be empty$",  # there are blocks, but none is shown
            r"the last message is the assistant's: it must contain only text",
            # A list in a form is a field per entry.
            r"the multipart body cannot be read: Too many fields",
        )
    )
)


def refused_beyond_schemas(response: Any) -> bool:
    """Whether a schema cannot say why a body is refused."""
    if response.status_code != 400:
        return False
    error = response.json()["error"]
    message = error["message"] if isinstance(error, dict) else error
    return BEYOND_SCHEMAS.match(message) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_described_is_what_is_accepted(name, url):
    modes = [OPERATIONS[name].as_strategy(mode) for mode in schemathesis.GenerationMode]

    @settings(DRIVEN, max_examples=100)
    @given(st.one_of(modes))
    def drive(case):
        response = case.call(base_url=url)
        checks = CHECKS.get_all()
        if response.status_code == 504 and "timeout" in case.body:
            checks.remove(not_a_server_error)
        if refused_beyond_schemas(response):
            checks.remove(positive_data_acceptance)
        if name == "POST /v1/conversations" and is_valid(case.body, body_schema(case.path)):
            # A text in place of the list in `output` counts as wrong, though either is right.
            checks.remove(negative_data_rejection)
        case.validate_response(response, checks=checks)

    drive()


@pytest.mark.parametrize("path", compatibility.ROUTES)
async def test_bodies_and_responses_have_their_schemas(path, http):
    base, fields = compatibility.ROUTES[path]
    num_answered = 0
    for field, value in fields.items():
        body = {**base, **compatibility.BESIDE.get(field, {}), field: value}
        response = await http.post(path, json=body)
        if response.headers["content-type"].startswith("text/event-stream"):
            continue
        validate(response.json(), content(path, response.status_code))
        if response.status_code == 200:
            num_answered += 1
            validate(body, body_schema(path))
    assert num_answered > len(fields) / 2


USER = {"messages": user("hi")}
PREDICATE = {"type": "predicate", "instructions": [{"type": "input_json", "data": {"a": 1}}]}


def blocks(*content: dict[str, Any], role: str = "user") -> dict[str, Any]:
    """A body of the Messages API with these blocks in its last message."""
    messages = [*user("hi"), {"role": role, "content": [*content]}]
    return {"messages": messages, "max_tokens": 4}


def decision(*parts: dict[str, Any]) -> dict[str, Any]:
    """A body of decisions with these parts as the instructions."""
    return {"input": "hi", "questions": [PREDICATE | {"instructions": [*parts]}]}


def tool(parameters: Any) -> dict[str, Any]:
    """The tools of a chat: one, with these parameters."""
    function = {"name": "f", "parameters": parameters}
    return {"tools": [{"type": "function", "function": function}]}


ACCEPTED = [
    ("/api/chat", {}),
    ("/api/chat", {"messages": [], "top_k": 3, **tool({"properties": {}})}),
    ("/api/generate", {"prompt": "", "options": {"top_k": 3}}),
    ("/tokenize", {"prompt": None, "content": "a"}),
    ("/v1/chat/completions", {"messages": [*user("hi"), {"role": "assistant"}, *user("hi")]}),
    ("/v1/chat/completions", USER | tool({})),
    ("/v1/chat/completions", USER | {"response_format": {"type": "json_schema", "schema": {}}}),
    ("/v1/chat/completions", USER | {"response_format": {"type": "text", "schema": None}}),
    ("/v1/completions", {"prompt": [65.0, 66], "logit_bias": {"7": 1}}),
    ("/v1/completions", {"prompt": [[65, 66.0]]}),
    ("/v1/decisions", {"input": "hi", "questions": [PREDICATE]}),
    ("/v1/embeddings", USER),
    ("/v1/messages", blocks({"type": "document"})),
    ("/v1/messages", blocks({"type": "tool_result", "tool_use_id": "a", "content": None})),
    ("/v1/responses", {"input": [{"type": "web_search_call"}, *user("hi")]}),
]
REFUSED = [
    ("/api/chat", {"messages": [{}]}),
    ("/api/chat", {"messages": [{"role": "user", "images": [5]}]}),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}),
    ("/api/chat", {"top_k": {}}),
    ("/api/chat", {"top_k": -2, "messages": []}),
    ("/api/chat", {"tools": [{"function": {}}]}),
    ("/api/embed", {"input": "a", "dimensions": 2**31}),
    ("/api/generate", {"min_p": "x"}),
    ("/api/generate", {"seed": 2**63}),
    ("/pooling", {"input": "a", "task": "token_classify"}),
    ("/pooling", {}),
    ("/pooling", {"input": "a", **USER}),
    ("/rerank", {"query": "", "documents": ["a"]}),
    ("/score", {"text_1": "a", "text_2": {"text": ""}}),
    ("/tokenize", {"messages": None}),
    ("/tokenize", {"prompt": "a", "content": "a"}),
    ("/tokenize", {"prompt": "a", **USER}),
    ("/v1/chat/completions", {"messages": [{"role": "tool"}]}),
    ("/v1/chat/completions", USER | tool({"type": "string"})),
    ("/v1/chat/completions", USER | {"response_format": {"type": "json_schema"}}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {"x": 1}}),
    ("/v1/completions", {"prompt": "a", "stop_token_ids": [-1]}),
    ("/v1/completions", {"prompt": ["a", 1]}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {"prompt": ["a"] * 1025}),
    ("/v1/decisions", decision({"type": "input_json"})),
    ("/v1/decisions", decision({"type": "input_text", "text": ""})),
    ("/v1/embeddings", {"input": ""}),
    ("/v1/messages", blocks({"type": "tool_use", "id": "a", "name": "b", "input": {}})),
    ("/v1/messages", blocks({"type": "tool_result", "tool_use_id": "a", "content": 0})),
    ("/v1/messages", blocks({"type": "text"}, role="assistant")),
    ("/v1/messages", blocks(role="tool")),
    ("/v1/messages/count_tokens", USER | {"output_config": {"effort": "x"}}),
    ("/v1/messages/count_tokens", USER | {"tool_choice": {"type": "tool"}}),
    ("/v1/messages/count_tokens", USER | {"top_k": -2}),
    ("/v1/responses", {"input": [{"type": "0..0"}]}),
    ("/v1/responses/input_tokens", {"input": "hi", "reasoning": {"effort": "x"}}),
    ("/v1/responses/input_tokens", {"input": "hi", "seed": 2**63}),
    ("/v2/embed", {"texts": ["a", ""]}),
]


@pytest.mark.parametrize(("path", "body"), ACCEPTED)
async def test_what_is_accepted_is_described(path, body, http):
    validate(body, body_schema(path))
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("path", "body"), REFUSED)
async def test_what_is_refused_is_described(path, body, http):
    with pytest.raises(jsonschema.ValidationError):
        validate(body, body_schema(path))
    response = await http.post(path, json=body)
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("path", BASES)
async def test_the_kind_of_every_answer_is_described(path, http):
    for stream in (None, False, True):
        response = await http.post(path, json=BASES[path] | {"stream": stream})
        described = DOCUMENT["paths"][path]["post"]["responses"][str(response.status_code)]
        kind, _, _ = response.headers["content-type"].partition(";")
        assert kind in described["content"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_events_have_their_schemas(path, http):
    base, _ = compatibility.ROUTES[path]
    response = await http.post(path, json={**base, "stream": True})
    described = DOCUMENT["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    [text, _] = described["itemSchema"]["properties"]["data"]["anyOf"]
    documents = re.findall(r"^data: ({.*})$", response.text, re.MULTILINE)
    assert len(documents) > 3
    for data in documents:
        validate(json.loads(data), resolved(text["contentSchema"]))


def number_bounds(schema: dict[str, Any]) -> Iterator[tuple[float, float | None]]:
    """A number at each end of what the schema allows, and one just beyond, if there is an end."""
    for option in schema.get("anyOf", [schema]):
        if option.get("type") not in ("integer", "number"):
            continue
        for end, sign in (("inimum", -1), ("aximum", 1)):
            is_exclusive = f"exclusiveM{end}" in option
            bound = option.get(f"exclusiveM{end}" if is_exclusive else f"m{end}")
            step = 1 if option["type"] == "integer" else 1e-9 * max(1, abs(bound or 0))
            if is_exclusive:
                yield bound - sign * step, bound
            elif bound is not None:
                yield bound, bound + sign * step
            else:
                yield sign * 10**20, None


def lengths(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Lists and texts of the largest length that the schema allows, and longer by one."""
    for option in schema.get("anyOf", [schema]):
        max_length = option.get("maxItems") or option.get("maxLength") or 0
        if option.get("items", {}).get("type") == "integer" and max_length:
            yield [65] * max_length, [65] * (max_length + 1)
        elif (option.get("items", {}).get("type") or option.get("type")) == "string" and max_length:
            is_list = option["type"] == "array"
            yield (
                (["x"] * max_length, ["x"] * (max_length + 1))
                if is_list
                else ("x" * max_length, "x" * (max_length + 1))
            )


# By the size of the model, an option, or by another field.
RULED_OTHERWISE = (
    "best_of dimensions logprobs min_tokens output_dimension prompt_logprobs "
    "thinking_token_budget top_logprobs"
).split()


@pytest.mark.parametrize("path", compatibility.ROUTES)
async def test_bounds_are_those_that_hold(path, http):
    base, fields = compatibility.ROUTES[path]
    bounded = [
        (field, *bounds)
        for field, schema in body_schema(path)["properties"].items()
        if field not in RULED_OTHERWISE
        for bounds in [*number_bounds(schema), *lengths(schema)]
    ]
    assert bounded
    for field, within, beyond in bounded:
        body = base | compatibility.BESIDE.get(field, {})
        if field == "logprob_token_ids":
            body["logprobs"] = fields["logprobs"]
        if beyond is not None:
            refused = await http.post(path, json=body | {field: beyond})
            assert refused.status_code == 400, (field, beyond)
            assert field.partition("_")[0] in refused.json()["error"]["message"]
        accepted = await http.post(path, json=body | {field: within})
        is_context_full = "maximum context length" in accepted.text
        is_late = field == "timeout" and accepted.status_code == 504
        is_valid = accepted.status_code == 200 or is_context_full or is_late
        assert is_valid, (field, within, accepted.text)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_fields_that_are_taken_over_from_chats_are_described(path, http):
    described = body_schema(path)["properties"]
    chat = body_schema("/v1/chat/completions")["properties"]
    base = BASES[path]
    for name, value in {"top_k": 5, "seed": 1, "stop": ["x"], "guided_regex": "a+"}.items():
        assert described[name] == chat[name]
        response = await http.post(path, json={**base, name: value})
        assert "x-servd-ignored" not in response.headers and response.status_code == 200
    assert "tools" in described


def test_every_field_is_tried():
    # These two are described with the fields of chats, too, which are tried there.
    models = {"/v1/messages": MessagesRequest, "/v1/responses": ResponsesRequest}
    for path, (_, fields) in compatibility.ROUTES.items():
        names = models[path].model_fields if path in models else body_schema(path)["properties"]
        assert not names.keys() - fields.keys(), path
    assert (
        not ChatCompletionRequest.lacking.keys()
        - compatibility.ROUTES["/v1/chat/completions"][1].keys()
    )


PEERS = tomllib.loads(Path(__file__).with_name("peer_fields.toml").read_text(encoding="utf8"))
PEER_FIELDS = [(path, names) for of in PEERS["peers"].values() for path, names in of.items()]
HARMLESS = set(" ".join(PEERS["harmless"].values()).split())
OWN_BASES = {"/classify": {"input": "hi"}, "/detokenize": {"tokens": [65]}}
# Values of fields that ask for something, where the tool for the page has none.
FEW_TOKENS = {"num_predict": 4}
OTHERS = {"format": "json", "images": ["a"], "options": FEW_TOKENS, "tokens": [65], "raw": True}
OTHERS |= {"content": "a", "think": True, "keep_alive": 5, "input": "hi", "prompt": "hi"}


@pytest.mark.parametrize(("path", "names"), PEER_FIELDS)
async def test_every_field_of_a_peer_is_judged(served: Served, path, names):
    """Each is served, refused, or ignored with its name. The last only where it does no harm."""
    served.async_llm.processor.chat_template.reads_tools = True
    if path == "/classify":
        labels = [f"label {i}" for i in range(16)]
        served.async_llm.processor.pooling = PoolingSpec(task="classify", labels=labels, size=16)
    _, examples = compatibility.ROUTES.get(path, ({}, {}))
    base = {**BASES, **OWN_BASES}[path]
    for name in names.split():
        field, _, option = name.partition(".")
        value = examples.get(field, OTHERS.get(field, 1))
        if option:
            value = FEW_TOKENS | {option: 1}
        body = base | compatibility.BESIDE.get(field, {}) | {field: value}
        answer = await served.http.post(path, json=body)
        assert answer.status_code in (200, 400), (name, answer.text)
        ignored = answer.headers.get("x-servd-ignored", "").split(", ")
        is_known = field in body_schema(path)["properties"]
        is_served = answer.status_code == 200 and is_known and name not in ignored
        assert is_served or answer.status_code == 400 or name in HARMLESS, name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"prompt": "a", "context": [1]}),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}),
        ("/rerank", {"query": "a", "documents": ["b"], "chat_template_kwargs": {"a": 1}}),
        ("/tokenize", {**USER, "chat_template": "{{ 1 }}"}),
        ("/v1/chat/completions", {**USER, "add_special_tokens": True}),
        ("/v1/completions", {"prompt": "a", "watermarking": True}),
        ("/v1/messages", {**USER, "max_tokens": 4, "include_stop_str_in_output": True}),
        ("/v1/responses", {"input": "a", "previous_input_messages": [{}]}),
    ],
)
async def test_what_would_change_an_answer_is_refused(http, path, body):
    *_, field = body
    answer = await http.post(path, json=body)
    assert answer.status_code == 400 and f"`{field}` is not supported" in answer.text
    neutral: Any = type(body[field])()
    assert (await http.post(path, json=body | {field: neutral})).status_code == 200


VECTORS_ALONE = ["dimensions", "embed_dtype", "encoding_format", "endianness", "normalize"]


@pytest.mark.parametrize("field", VECTORS_ALONE)
async def test_classes_have_no_form_of_vectors(served: Served, field):
    labels = [f"label {i}" for i in range(16)]
    served.async_llm.processor.pooling = PoolingSpec(task="classify", labels=labels, size=16)
    body = {"input": "a", field: compatibility.EMBEDDINGS[field]}
    answer = await served.http.post("/classify", json=body)
    assert answer.headers["x-servd-ignored"] == field and answer.status_code == 200


async def test_the_page_of_compatibility_is_current():
    page = await compatibility.page()
    assert compatibility.PAGE.read_text(encoding="utf8") == page, "run `make docs`"


async def test_every_route_is_described(served: Served):
    document = (await served.http.get("/openapi.json")).json()
    routes = [route for router in load_routers() for route in router.routes]
    there_are = {
        (route.path_format, method.lower()) for route in routes for method in route.methods
    }
    described = {
        (path, method) for path, methods in document["paths"].items() for method in methods
    }
    assert described == there_are
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert operation["summary"], path
            assert operation["responses"], path
    ids = [o["operationId"] for methods in document["paths"].values() for o in methods.values()]
    assert len(ids) == len(set(ids))


async def test_keys_are_described_where_they_are_needed():
    async with serve(api_key=["k"]) as served:
        assert (await served.http.get("/openapi.json")).status_code == 401
        key = {"authorization": "Bearer k"}
        document = (await served.http.get("/openapi.json", headers=key)).json()
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if "{" in path:
                    continue
                response = await served.http.request(method, path)
                assert (response.status_code == 401) == ("security" in operation), path
                assert (response.status_code == 401) == ("401" in operation["responses"]), path


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_the_page_needs_nothing_from_elsewhere(path, http):
    page = await http.get(path)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.findall(r"@import|url\(|https?://", page.text)
    (inline,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    used = re.findall(r"""(?:src=|href=|url: )["']([^"']+)["']""", page.text)
    assert len(used) == 4
    for name in used:
        file = await http.get(f"/{name}")
        assert file.status_code == 200 and len(file.content) > 400
    for name in ("docs/none.js", "docs/..%2f__init__.py", "docs/"):
        assert (await http.get(f"/{name}")).status_code == 404


# ---- routes ----


def test_two_structs_of_one_name_are_refused(monkeypatch):
    monkeypatch.setattr(route, "ANSWERS", {})
    first = msgspec.defstruct("SameName", [("a", int)])
    second = msgspec.defstruct("SameName", [("b", str)])
    assert schema_of(first) == {"$ref": "#/components/schemas/SameName"}
    with pytest.raises(AssertionError, match="SameName"):
        schema_of(second)


@pytest.mark.parametrize(
    ("method", "path", "param"),
    [
        ("GET", "/v1/requests?recent=0", "recent"),
        ("GET", "/v1/requests?slowest=201", "slowest"),
        ("GET", "/v1/steps?recent=x", "recent"),
        ("GET", "/v1/requests/a/timeline?format=xml", "format"),
        ("GET", "/v1/files?limit=10001", "limit"),
        ("GET", "/v1/batches?order=up", "order"),
        ("GET", "/v1/responses/a?stream=maybe", "stream"),
        ("GET", "/v1/responses/a?starting_after=-1", "starting_after"),
        ("GET", "/v1/responses/a?starting_after=" + "9" * 5000, "starting_after"),
        ("GET", "/v1/responses/a/input_items?limit=101", "limit"),
        ("GET", "/v1/responses/a/input_items?order=up", "order"),
        ("POST", "/sleep?level=3", "level"),
    ],
)
async def test_wrong_parameters_are_named(method, path, param, tmp_path):
    async with serve(batch_dir=str(tmp_path)) as served:
        message = check(await served.http.request(method, path), 400, param)
    assert message.startswith(f"{param} must be ")
    assert len(message) < 200
