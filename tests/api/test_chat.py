"""POST /v1/chat/completions, by HTTP and by the openai client."""

from __future__ import annotations

import math

import msgspec
import openai
import pytest

from servd.checkpoint.hf import FAKE_SPEC
from servd.messages.engine import EngineCoreRequest
from tests.api.harness import MODEL, Served, chat_prompt, events, output_text, serve, user

CHAT = "/v1/chat/completions"


async def ask(http, **body):
    answer = await http.post(CHAT, json={"messages": user("hi"), "max_tokens": 6, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_whole_answer(http):
    answer = await ask(http)
    assert list(answer)[:4] == ["object", "id", "created", "model"]
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["id"].startswith("chatcmpl-") and answer["system_fingerprint"].startswith(
        "servd-"
    )
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": output_text(chat_prompt("hi"), 6)},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    num_prompt = len(chat_prompt("hi"))
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 6,
        "total_tokens": num_prompt + 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


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
    prompt = f"{role.capitalize()}: be\n" + chat_prompt("hi")
    assert answer["choices"][0]["message"]["content"] == output_text(prompt, 6)


async def test_text_parts_equal_a_string(http):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    texts = [
        (await ask(http, messages=user(content)))["choices"] for content in (parts, "one\ntwo")
    ]
    assert texts[0] == texts[1]


async def test_messages_with_tool_calls_names_and_extra_keys(http):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        *user("hi"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "refusal": None,
            "audio": None,
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "f"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for tool_choice in ("auto", "none", None):
        await ask(http, messages=messages, tools=tools, tool_choice=tool_choice)


async def test_a_message_can_be_continued(http):
    messages = [*user("hi"), {"role": "assistant", "content": "I am"}]
    answer = await ask(
        http, messages=messages, add_generation_prompt=False, continue_final_message=True
    )
    assert answer["choices"][0]["message"]["content"] == output_text(chat_prompt("hi") + " I am", 6)


async def test_max_completion_tokens_wins_over_max_tokens(http):
    assert (await ask(http, max_completion_tokens=3))["usage"]["completion_tokens"] == 3
    assert (await ask(http, max_tokens=None, max_completion_tokens=2))["usage"][
        "completion_tokens"
    ] == 2


@pytest.mark.parametrize(("path", "body", "param"), [
    (CHAT, {"messages": user("hi"), "reasoning_effort": "turbo"}, "reasoning_effort"),
    ("/v1/responses", {"input": "hi", "reasoning": {"effort": "turbo"}}, "reasoning.effort"),
    ("/v1/messages", {"messages": user("hi"), "max_tokens": 1, "thinking": {"type": "adaptive"},
                      "output_config": {"effort": "turbo"}}, "output_config.effort"),
])  # fmt: skip
async def test_an_unknown_reasoning_effort_is_refused_with_the_known_ones(http, path, body, param):
    answer = await http.post(path, json={"model": "fake", **body})
    assert answer.status_code == 400 and "'minimal', 'low', 'medium'" in answer.text
    assert path == "/v1/messages" or answer.json()["error"]["param"] == param


async def test_without_a_limit_the_answer_fills_the_context():
    async with serve(max_model_len=64) as served:
        usage = (await ask(served.http, max_tokens=None))["usage"]
        assert usage["total_tokens"] == 64


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
    assert (
        "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    )
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
    names = [10, 256, 10]
    body = {
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    body |= {"logprob_token_ids": names, "n": 2}
    answer = await ask(http, **body)
    for choice in answer["choices"]:
        for token_id, position in zip(
            choice["token_ids"], choice["logprobs"]["content"], strict=True
        ):
            entries = position["top_logprobs"]
            top = {
                int(entry["token"].removeprefix("token_id:")): entry["logprob"] for entry in entries
            }
            assert (
                list(top) == [token_id, token_id + 1, 10, 256]
                and len(position["top_logprobs"]) == 4
            )
            for other, logprob in top.items():  # the fake model's
                assert math.isclose(logprob, -((other - token_id) % 257 + 1) * math.log(2))
    body |= {"messages": user("hi"), "max_tokens": 6, "stream": True}
    chunks = events((await http.post(CHAT, json=body)).text)
    streamed = [
        c["logprobs"]["content"]
        for k in chunks
        for c in k["choices"]
        if c["index"] == 1 and c["logprobs"]
    ]
    assert [position for part in streamed for position in part] == answer["choices"][1]["logprobs"][
        "content"
    ]
    refused = await http.post(CHAT, json={"messages": user("hi"), "logprob_token_ids": [10]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprob_token_ids"
    legacy = {
        "prompt": "hi",
        "max_tokens": 2,
        "logprobs": 0,
        "logprob_token_ids": [65],
        "echo": True,
    }
    (choice,) = (await http.post("/v1/completions", json=legacy)).json()["choices"]
    assert [len(top) if top else top for top in choice["logprobs"]["top_logprobs"]] == [
        None,
        1,
        2,
        2,
    ]
    assert "A" in choice["logprobs"]["top_logprobs"][-1]


async def test_tokens_are_named_by_their_ids_on_demand(http):
    body = {
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    (choice,) = (await ask(http, **body))["choices"]
    content = choice["logprobs"]["content"]
    assert [position["token"] for position in content] == [
        f"token_id:{i}" for i in choice["token_ids"]
    ]
    first, second = content[0]["top_logprobs"]
    assert (first["token"], second["token"]) == (
        content[0]["token"],
        f"token_id:{choice['token_ids'][0] + 1}",
    )
    assert (
        bytes(b for position in content for b in position["bytes"]).decode()
        == choice["message"]["content"]
    )


async def test_the_prompt_text_is_sent_once_on_demand(http):
    body = {"messages": user("hi"), "max_tokens": 3, "n": 2, "return_prompt_text": True}
    assert (await ask(http, **body))["prompt_text"] == chat_prompt("hi")
    chunks = events((await http.post(CHAT, json={**body, "stream": True})).text)
    assert [chunk.get("prompt_text") for chunk in chunks] == [
        chat_prompt("hi"),
        *[None] * (len(chunks) - 1),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_begins_with_the_message_that_is_continued(http, stream):
    parts = [{"type": "text", "text": "Once"}, {"type": "text", "text": "upon"}]
    for content, echoed in (("Once upon", "Once upon"), (parts, "Once\nupon")):
        messages = [*user("hi"), {"role": "assistant", "content": content}]
        body = {
            "messages": messages,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "echo": True,
        }
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
    assert (await ask(http, echo=True))["choices"][0]["message"]["content"] == output_text(
        chat_prompt("hi"), 6
    )


async def test_a_body_may_name_its_request(http):
    answer = await http.post(
        CHAT, json={"messages": user("hi"), "max_tokens": 1, "request_id": "mine"}
    )
    assert answer.headers["x-request-id"] == "mine" and answer.json()["id"].startswith(
        "chatcmpl-mine-"
    )
    body = {"prompt": "hi", "max_tokens": 1, "request_id": "mine"}
    answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "other"})
    assert answer.headers["x-request-id"] == "other" and answer.json()["id"].startswith(
        "cmpl-other-"
    )
    answer = await http.post("/v1/completions", json={**body, "request_id": "two\nlines"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "request_id"


async def test_documents_reach_templates_that_read_them(http):
    documents = [{"title": "Sky", "text": "blue"}]
    answer = await http.post(
        CHAT, json={"messages": user("hi"), "max_tokens": 1, "documents": documents}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "documents"
    template = "{% for d in documents or [] %}{{ d.title }} is {{ d.text }}. {% endfor %}"
    async with serve(chat_template=template + "{{ messages[0].content }}") as served:
        body = {"messages": user("hi"), "max_tokens": 3, "return_prompt_text": True}
        assert (await ask(served.http, **body, documents=documents))[
            "prompt_text"
        ] == "Sky is blue. hi"
        assert (await ask(served.http, **body, documents=[]))["prompt_text"] == "hi"
        counted = await served.http.post(
            "/tokenize", json={"messages": user("hi"), "documents": documents}
        )
        assert counted.json()["count"] == len("Sky is blue. hi")


async def test_sampling_fields_reach_the_engine(served: Served):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.2, "seed": 5, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [256],
        "allowed_token_ids": [97, 98], "logit_bias": {97: 3.5},
    }  # fmt: skip
    body = {
        **fields,
        "logit_bias": {"97": 3.5},
        "priority": 3,
        "cache_salt": "s",
        "n": 2,
        "skip_special_tokens": False,
    }
    await ask(served.http, **body)
    (sent,) = [message for message in served.engine.sent if isinstance(message, EngineCoreRequest)]
    assert (sent.options.priority, sent.options.cache_salt) == (3, "s")
    assert len(sent.choices()) == 2
    for i, request in enumerate(sent.choices()):
        assert {name: getattr(request.params, name) for name in fields} == {**fields, "seed": 5 + i}
        assert (request.options, request.eos_token_ids) == (sent.options, [])


async def test_defaults_come_from_the_generation_config():
    generation = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 9,
        "max_new_tokens": 3,
        "do_sample": True,
    }
    spec = msgspec.structs.replace(FAKE_SPEC, generation=generation)
    async with serve(spec=spec) as served:
        answer = await ask(served.http, max_tokens=None, top_k=4)
        params = next(m for m in served.engine.sent if isinstance(m, EngineCoreRequest)).params
        assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 4)
        assert answer["usage"]["completion_tokens"] == 3


async def test_options_win_over_the_generation_config():
    spec = msgspec.structs.replace(FAKE_SPEC, generation={"temperature": 0.25, "top_k": 9})
    override = '{"temperature": 0, "max_new_tokens": 3}'
    async with serve(spec=spec, override_generation_config=override) as served:
        answer = await ask(served.http, max_tokens=None)
        params = next(m for m in served.engine.sent if isinstance(m, EngineCoreRequest)).params
        assert (params.temperature, params.top_k) == (0, 9)
        assert answer["usage"]["completion_tokens"] == 3


async def test_a_stream_joined_is_the_whole_answer(http):
    fields = {
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        "max_tokens": 12,
    }
    whole = await ask(http, **fields)
    streamed = await http.post(
        CHAT,
        json={
            "messages": user("hi"),
            **fields,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    chunks = events(streamed.text)
    assert {
        (c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks
    } == {
        (
            chunks[0]["id"],
            chunks[0]["created"],
            MODEL,
            "chat.completion.chunk",
            whole["system_fingerprint"],
        )
    }
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 36
    assert all(chunk["usage"] is None for chunk in chunks)
    for expected in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert (
            "".join(choice["delta"].get("content", "") for choice in mine)
            == expected["message"]["content"]
        )
        assert [t for choice in mine for t in choice.get("token_ids", [])] == expected["token_ids"]
        parts = [choice["logprobs"]["content"] for choice in mine if choice["logprobs"]]
        assert [entry for part in parts for entry in part] == expected["logprobs"]["content"]
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [
            expected["finish_reason"]
        ]
        assert mine[-1]["finish_reason"]


async def test_the_openai_client(listening_server: Served):
    async with openai.AsyncOpenAI(
        base_url=f"{listening_server.url}/v1", api_key="any", max_retries=0
    ) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=user("hi"), max_tokens=9
        )
        whole = raw.parse()
        assert whole.choices[0].message.content == output_text(chat_prompt("hi"), 9)
        assert whole._request_id == raw.headers["x-request-id"]
        assert whole.usage and whole.usage.prompt_tokens_details
        text, finish, usage = "", [], None
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=user("hi"),
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish.append(choice.finish_reason)
        assert text == whole.choices[0].message.content
        assert [reason for reason in finish if reason] == ["length"]
        assert usage and usage.completion_tokens == 9
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model=MODEL, messages=user("hi"), top_p=3, stream=True
            )
        assert bad.value.param == "top_p" and bad.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="other", messages=user("hi"))
        assert unknown.value.code == "model_not_found"
