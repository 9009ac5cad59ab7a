"""POST /v1/chat/completions, by HTTP and by the openai client."""

import math

import msgspec
import pytest

from servd.checkpoint.model_spec import FAKE_SPEC
from tests.api.harness import (
    MODEL,
    Served,
    chat_prompt,
    events,
    output_text,
    requests_sent,
    serve,
    user,
)
from tests.api.hostile import VALID

CHAT = "/v1/chat/completions"


async def ask(http, **body):
    answer = await http.post(CHAT, json={"messages": user("hi"), "max_tokens": 6, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_whole_answer(http):
    answer = await ask(http)
    assert list(answer)[:4] == ["object", "id", "created", "model"]
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["system_fingerprint"].startswith("servd-")
    message = {"role": "assistant", "content": output_text(chat_prompt("hi"), 6)}
    message["refusal"] = None
    ended = {"finish_reason": "length", "stop_reason": None, "logprobs": None}
    assert answer["choices"] == [{"index": 0, "message": message, **ended}]
    num_prompt = len(chat_prompt("hi"))
    used = {"prompt_tokens": num_prompt, "completion_tokens": 6, "total_tokens": num_prompt + 6}
    assert answer["usage"] == used | {"prompt_tokens_details": {"cached_tokens": 0}}


async def test_cached_tokens_are_reported(http):
    await ask(http)
    cached = (await ask(http, n=2))["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 16  # one block of the 19 tokens; counted once, though both choices found it
    salted = await ask(http, cache_salt="tenant")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    "role", ["system", "developer", "user", "assistant", "tool", "function", "critic"]
)
async def test_roles_reach_the_template(http, role):
    answer = await ask(http, messages=[{"role": role, "content": "be"}, *user("hi")])
    role_name = "System" if role == "developer" else role.capitalize()
    prompt = f"{role_name}: be\n" + chat_prompt("hi")
    assert answer["choices"][0]["message"]["content"] == output_text(prompt, 6)


async def test_max_completion_tokens_wins_over_max_tokens(http):
    assert (await ask(http, max_completion_tokens=3))["usage"]["completion_tokens"] == 3
    answer = await ask(http, max_tokens=None, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stop_is_list", [False, True])
async def test_stop_strings(http, stop_is_list):
    text = output_text(chat_prompt("hi"), 30)
    stop = text[10:12]
    first = text.index(stop)
    answer = await ask(http, max_tokens=30, stop=[stop, "\0"] if stop_is_list else stop)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == text[:first]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    answer = await ask(http, max_tokens=30, stop=stop, include_stop_str_in_output=True)
    assert answer["choices"][0]["message"]["content"] == text[: first + 2]


async def test_stop_token_ids(http):
    text = output_text(chat_prompt("hi"), 30)
    choice = (await ask(http, max_tokens=30, stop_token_ids=[ord(text[4])]))["choices"][0]
    assert choice["message"]["content"] == text[: text.index(text[4])]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord(text[4]))


async def test_logprobs(http):
    answer = await ask(http, logprobs=True, top_logprobs=3, max_tokens=4)
    content = answer["choices"][0]["logprobs"]["content"]
    said = "".join(entry["token"] for entry in content)
    assert said == answer["choices"][0]["message"]["content"]
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"] and entry["logprob"] <= 0
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # the fake takes the likeliest
        assert sum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) <= 1
    none = (await ask(http, logprobs=True, max_tokens=1))["choices"][0]["logprobs"]["content"]
    assert len(none) == 1 and none[0]["top_logprobs"] == []
    assert (await ask(http, logprobs=False, top_logprobs=0))["choices"][0]["logprobs"] is None


async def test_token_ids_are_returned_on_demand(http):
    answer = await ask(http, return_token_ids=True)
    assert bytes(answer["prompt_token_ids"]).decode() == chat_prompt("hi")
    choice = answer["choices"][0]
    assert bytes(choice["token_ids"]).decode() == choice["message"]["content"]
    plain = await ask(http)
    assert "prompt_token_ids" not in plain and "token_ids" not in plain["choices"][0]


async def test_logprobs_of_named_tokens(http):
    body = {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [10, 256, 10], "n": 2}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = await ask(http, **body)
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        said = bytes(byte for position in content for byte in position["bytes"]).decode()
        assert said == choice["message"]["content"]
        for token_id, position in zip(choice["token_ids"], content, strict=True):
            assert position["token"] == f"token_id:{token_id}"
            entries = position["top_logprobs"]
            top = {int(e["token"].removeprefix("token_id:")): e["logprob"] for e in entries}
            assert list(top) == list(dict.fromkeys([token_id, 10, 256])) and len(entries) == len(
                top
            )
            for other, logprob in top.items():  # the fake model's
                assert math.isclose(logprob, -((other - token_id) % 257 + 1) * math.log(2))
    refused = await http.post(CHAT, json={"messages": user("hi"), "logprob_token_ids": [10]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprob_token_ids"
    legacy = {"prompt": "hi", "max_tokens": 2, "logprobs": 0, "echo": True}
    answer = await http.post("/v1/completions", json={**legacy, "logprob_token_ids": [65]})
    (choice,) = answer.json()["choices"]
    tops = choice["logprobs"]["top_logprobs"]
    assert [top and len(top) for top in tops] == [None, 1, 2, 2] and "A" in tops[-1]


async def test_the_prompt_text_is_sent_once_on_demand(http):
    body = {"messages": user("hi"), "max_tokens": 3, "n": 2, "return_prompt_text": True}
    assert (await ask(http, **body))["prompt_text"] == chat_prompt("hi")
    chunks = events((await http.post(CHAT, json={**body, "stream": True})).text)
    prompt_texts = [chunk.get("prompt_text") for chunk in chunks]
    assert prompt_texts == [chat_prompt("hi"), *[None] * (len(chunks) - 1)]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_begins_with_the_message_that_is_continued(http, stream):
    parts = [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}]
    for content, echoed in (("Once upon", "Once upon"), (parts, "Once\nupon")):
        messages = [*user("hi"), {"role": "assistant", "content": content}]
        body = {"messages": messages, "add_generation_prompt": False, "echo": True}
        body["continue_final_message"] = True
        body |= {"max_tokens": 5, "stream": stream, "n": 2, "temperature": 0}
        said = output_text(f"User: hi\nAssistant: {echoed}", 5)
        answer = await http.post(CHAT, json=body)
        if stream:
            texts = ["", ""]
            for choice in [choice for chunk in events(answer.text) for choice in chunk["choices"]]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        else:
            texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
        assert texts == [echoed + said] * 2
    said = (await ask(http, echo=True))["choices"][0]["message"]["content"]
    assert said == output_text(chat_prompt("hi"), 6)


async def test_a_body_may_name_its_request(http):
    body = {"messages": user("hi"), "max_tokens": 1, "request_id": "mine"}
    answer = await http.post(CHAT, json=body)
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["id"].startswith("chatcmpl-mine-")
    body = {"prompt": "hi", "max_tokens": 1, "request_id": "mine"}
    answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "other"})
    assert answer.headers["x-request-id"] == "other"
    assert answer.json()["id"].startswith("cmpl-other-")
    answer = await http.post("/v1/completions", json={**body, "request_id": "two\nlines"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "request_id"


async def test_documents_reach_templates_that_read_them(http):
    documents = [{"title": "Sky", "text": "blue"}]
    body = {"messages": user("hi"), "max_tokens": 1, "documents": documents}
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "documents"
    template = "{% for d in documents or [] %}{{ d.title }} is {{ d.text }}. {% endfor %}"
    async with serve(chat_template=template + "{{ messages[0].content }}") as served:
        body = {"messages": user("hi"), "max_tokens": 3, "return_prompt_text": True}
        prompt = (await ask(served.http, **body, documents=documents))["prompt_text"]
        assert prompt == "Sky is blue. hi"
        assert (await ask(served.http, **body, documents=[]))["prompt_text"] == "hi"
        body = {"messages": user("hi"), "documents": documents}
        counted = await served.http.post("/tokenize", json=body)
        assert counted.json()["count"] == len("Sky is blue. hi")


async def test_sampling_fields_reach_the_engine(served: Served):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2,
        "seed": 5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [256],
        "allowed_token_ids": [97, 98],
        "logit_bias": {97: 3.5},
    }
    body = {**fields, "logit_bias": {"97": 3.5}, "priority": 3, "cache_salt": "s", "n": 2}
    await ask(served.http, **body)
    (sent,) = requests_sent(served.engine)
    assert (sent.options.priority, sent.options.cache_salt) == (3, "s")
    assert len(sent.choices()) == 2
    for i, request in enumerate(sent.choices()):
        assert {name: getattr(request.params, name) for name in fields} == {**fields, "seed": 5 + i}
        assert (request.options, request.eos_token_ids) == (sent.options, [])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_names_of_llama_server_are_read(served: Served, path: str):
    prompt = {"messages": user("hi")} if "chat" in path else {"prompt": "hi"}
    body = prompt | {"model": MODEL, "n_predict": 3, "repeat_penalty": 1.3}
    answer = await served.http.post(path, json=body)
    assert answer.json()["usage"]["completion_tokens"] == 3
    (sent,) = requests_sent(served.engine)
    assert sent.params.repetition_penalty == 1.3
    nulls = dict.fromkeys(("max_tokens", "repetition_penalty", "thinking_token_budget"))
    answer = await served.http.post(path, json=nulls | body | {"unknown": None})
    assert answer.json()["usage"]["completion_tokens"] == 3  # null is no value that could win
    assert "n_predict" not in answer.headers["x-servd-ignored"]
    assert "unknown" in answer.headers["x-servd-ignored"]
    (_, sent) = requests_sent(served.engine)
    assert sent.params.repetition_penalty == 1.3
    refused = await served.http.post(path, json=body | {"n_predict": -1})
    assert refused.status_code == 400 and "must be at least" in refused.text


async def test_requests_and_options_win_over_the_generation_config():
    generation = {"temperature": 0.25, "top_k": 9, "top_p": 0.5}
    spec = msgspec.structs.replace(FAKE_SPEC, generation=generation)
    override = '{"temperature": 0, "max_new_tokens": 3}'
    async with serve(spec=spec, override_generation_config=override) as served:
        answer = await ask(served.http, max_tokens=None, top_p=0.75)
        (request,) = requests_sent(served.engine)
        params = request.params
        assert (params.temperature, params.top_k, params.top_p) == (0, 9, 0.75)
        assert answer["usage"]["completion_tokens"] == 3


# ---- the route that renders ----

URL = "/v1/chat/completions/render"


async def test_it_shows_what_the_chat_route_sends(served: Served):
    body = {"messages": user("hi"), "temperature": 0, "max_tokens": 3, "stop": ["x"]}
    rendered = (await served.http.post(URL, json=body)).json()
    assert served.engine.sent == [] and served.async_llm.requests == {}
    assert (rendered["prompt"], rendered["model"]) == (chat_prompt("hi"), MODEL)
    assert rendered["prompt_token_ids"] == list(chat_prompt("hi").encode())
    await served.http.post("/v1/chat/completions", json=body)
    (request,) = served.engine.sent
    assert rendered["prompt_token_ids"] == request.prompt_token_ids
    assert rendered["sampling_params"]["max_tokens"] == request.params.max_tokens == 3
    assert rendered["sampling_params"]["stop"] == ["x"]


async def test_errors_are_those_of_the_chat_route(http):
    for body in (
        {"messages": []},
        {"messages": user("hi"), "top_p": 3},
        {"messages": user("hi"), "max_tokens": 9999},
    ):
        rendered = await http.post(URL, json=body)
        refused = await http.post("/v1/chat/completions", json=body)
        assert rendered.status_code == 400
        assert rendered.json() == refused.json()


# ---- `speculative: false`, from every route that generates ----

ROUTES = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"]


@pytest.mark.parametrize("url", ROUTES)
async def test_a_request_says_whether_it_is_drafted_for(served: Served, url):
    for fields in ({}, {"speculative": False}, {"speculative": True}):
        answer = await served.http.post(url, json=VALID[url] | fields)
        assert answer.status_code == 200 and "X-Servd-Ignored" not in answer.headers
    sent = [request.params.speculative for request in requests_sent(served.engine)]
    assert sent == [True, False, True]


async def test_anything_but_yes_or_no_is_refused(http):
    answer = await http.post(CHAT, json=VALID[CHAT] | {"speculative": 4})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "speculative"
