"""100 random requests: the stream, joined, is the answer that is not streamed, field by field."""

import json
import random
from typing import Any

import pytest

from servd.api.text.chat_template import DEFAULT_TEMPLATE
from tests.api.harness import events, named_events, serve, user

NUM_SHAPES = 100
PARTS = ("text", "content", "reasoning", "reasoning_content", "arguments")  # joined
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 9}},
    "required": ["a"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("get", "put")
]


def random_body(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Route and body of a request with a random set of fields."""

    def maybe(probability: float, **fields: Any) -> dict[str, Any]:
        return fields if draw.random() < probability else {}

    words = ["one", "two words", "naïve 東京 🙂", "a " * draw.randrange(1, 90), "?"]
    body: dict[str, Any] = {
        **maybe(0.9, max_tokens=draw.randrange(1, 40)),
        **maybe(0.5, n=draw.randrange(1, 5)),
        **maybe(0.5, temperature=draw.choice([0, 0.5, 2.0])),
        **maybe(0.4, seed=draw.randrange(1000)),
        **maybe(0.4, stop=draw.sample(["a", "e ", "  ", "t\0", "zq", "q"], draw.randrange(1, 3))),
        **maybe(0.3, include_stop_str_in_output=True),
        **maybe(0.2, stop_token_ids=[ord("k")]),
        **maybe(0.3, min_tokens=1),
        **maybe(0.4, return_token_ids=True),
        **maybe(0.2, ignore_eos=True),
        **maybe(0.2, skip_special_tokens=draw.random() < 0.5),
        **maybe(0.2, cache_salt="salt"),
        **maybe(0.2, logit_bias={"97": 5}),
    }
    if draw.random() < 0.5:
        prompts: list[Any] = draw.sample(words, draw.randrange(1, 4))
        if draw.random() < 0.3:
            prompts = [list(text.encode()) for text in prompts]
        body["prompt"] = prompts if draw.random() < 0.6 else prompts[0]
        logprobs = maybe(0.4, logprobs=draw.randrange(4))
        body |= logprobs
        if not logprobs:
            body |= maybe(0.4, echo=True)
        return "/v1/completions", body
    roles = [draw.choice(["user", "system"]) for _ in range(2)]
    body["messages"] = [{"role": role, "content": draw.choice(words)} for role in roles]
    body["messages"].append({"role": "user", "content": draw.choice(words)})
    body.setdefault("max_tokens", 16)
    body["max_tokens"] *= draw.choice([1, 5])  # calls take more
    body |= maybe(0.15, response_format={"type": "json_object"}) or maybe(
        0.3, tools=TOOLS, tool_choice="required"
    )
    body |= maybe(0.3, parallel_tool_calls=False)
    if draw.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": draw.randrange(4)}
    return "/v1/chat/completions", body


def join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    """Add a chunk's object to what came before."""
    for name, value in part.items():
        if value is None:
            whole.setdefault(name, None)
        elif name == "tool_calls":
            calls = whole[name] = whole.get(name) or []
            for call in value:
                assert call["index"] in (len(calls), len(calls) - 1)
                calls += [{}] * (call["index"] == len(calls))
                join(calls[-1], {key: value for key, value in call.items() if key != "index"})
        elif isinstance(value, list):
            whole[name] = (whole.get(name) or []) + value
        elif name in PARTS:
            whole[name] = (whole.get(name) or "") + value
        elif isinstance(value, dict):
            whole[name] = whole.get(name) or {}
            join(whole[name], value)
        else:
            assert whole.get(name) in (None, value), f"{name} was {whole[name]!r} and is {value!r}"
            whole[name] = value


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that a stream tells, with the usage of its last chunk."""
    answer: dict[str, Any] = {"choices": {}}
    for chunk in chunks:
        choices, usage = chunk.pop("choices"), chunk.pop("usage")
        join(answer, chunk)
        answer["usage"] = usage or answer.get("usage")
        for choice in choices:
            if "delta" in choice:
                choice["message"] = choice.pop("delta")
            join(answer["choices"].setdefault(choice["index"], {}), choice)
    answer["choices"] = [answer["choices"][index] for index in sorted(answer["choices"])]
    return answer


@pytest.mark.parametrize("part", range(2))
async def test_streams_equal_whole_answers(part):
    draw = random.Random(part)
    num_calls = 0
    # A small budget, so that prompts are computed in chunks and choices are interleaved.
    async with serve(
        max_num_batched_tokens=64, max_num_seqs=8, tool_call_parser="hermes"
    ) as served:
        for _ in range(NUM_SHAPES // 2):
            path, body = random_body(draw)
            if body.get("temperature") != 0:
                body.setdefault("seed", 5)  # else the two answers would differ
            answer = await served.http.post(path, json=body)
            assert answer.status_code == 200, (body, answer.text)
            whole = answer.json()
            options = {"include_usage": True, "continuous_usage_stats": draw.random() < 0.3}
            streamed = {**body, "stream": True, "stream_options": options}
            stream = await served.http.post(path, json=streamed)
            got = joined(events(stream.text))
            usage, streamed_usage = whole["usage"], got["usage"]
            for counts in (usage, streamed_usage):
                del counts[
                    "prompt_tokens_details"
                ]  # the second request finds the first one's prompt
            assert streamed_usage == usage, body
            for name in ("id", "created", "object", "usage"):
                del whole[name], got[name]
            for choice in [*whole["choices"], *got["choices"]]:
                if calls := choice.get("message", {}).get(
                    "tool_calls"
                ):  # whose stream begins with an empty content
                    choice["message"]["content"] = choice["message"]["content"] or None
                for call in calls or ():
                    assert call.pop("id").startswith("call_")
                    num_calls += 1
            assert got == whole, body
        assert served.async_llm.num_unfinished == 0
    assert num_calls


THINKING = DEFAULT_TEMPLATE + "{{ '<think>' if enable_thinking else '<think></think>' }}"


def translated_body(draw: random.Random, path: str) -> dict[str, Any]:
    """A random request for one of the APIs that become a chat."""
    is_message = path == "/v1/messages"
    text = draw.choice(["one", "two words", "naïve 東京 🙂", "a " * draw.randrange(1, 90)])
    body: dict[str, Any] = {"seed": draw.randrange(99), "temperature": draw.choice([0, 0.7, 2.0])}
    max_tokens = draw.randrange(1, 40) * draw.choice([1, 5])
    body |= (
        {"max_tokens": max_tokens, "messages": user(text)}
        if is_message
        else {"max_output_tokens": max_tokens, "input": text}
    )
    more: list[dict[str, Any]] = [
        {"top_k": 4},
        {"min_tokens": 1},
        {"ignore_eos": True},
        {"bad_words": ["e"]},
    ]
    # Not both: with a tokenizer of bytes, where </think> is no token, a form cannot begin after it.
    thinking: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    if is_message:
        thinking = {"thinking": {"type": "enabled"}}
    forms: list[dict[str, Any]] = [{}, thinking]
    if is_message:
        tools = [{"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in TOOLS]
        more += [{"stop_sequences": ["a", "zq"]}, {"system": "be kind"}]
        forms += [{"tools": tools, "tool_choice": {"type": kind}} for kind in ("any", "auto")]
        forms.append({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}})
    else:
        functions = [{"type": "function", **tool["function"]} for tool in TOOLS]
        more += [{"stop": ["a", "zq"]}, {"top_logprobs": 2}, {"instructions": "be kind"}]
        forms += [{"tools": functions, "tool_choice": choice} for choice in ("required", "auto")]
        forms.append({"text": {"format": {"type": "json_object"}}})
        forms.append({"parallel_tool_calls": False, **forms[2]})
    for part in [*draw.sample(more, draw.randrange(4)), draw.choice(forms)]:
        body |= part
    return body


def told_response(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a stream tells by its parts; the last event has settings and usage."""
    output: list[dict[str, Any]] = []
    for event in stream:
        match event["type"]:
            case "response.output_item.added":
                output.append(event["item"])
            case "response.content_part.added":
                output[-1]["content"].append(event["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                part = output[-1]["content"][-1]
                part["text"] += event["delta"]
                if "logprobs" in event:
                    part["logprobs"] += event["logprobs"]
            case "response.function_call_arguments.delta":
                output[-1]["arguments"] += event["delta"]
            case "response.output_item.done":
                output[-1]["status"] = event["item"]["status"]
                assert output[-1] == event["item"]
    assert stream[-1]["response"]["output"] == output
    return stream[-1]["response"]


def told_message(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream tells by its parts."""
    message = stream[0]["message"]
    for event in stream:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"] | {"json": ""})
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                for name in delta.keys() & {"text", "thinking", "signature"}:
                    block[name] += delta[name]
                block["json"] += delta.get("partial_json", "")
            case "content_block_stop":
                block = message["content"][event["index"]]
                text = block.pop("json")
                try:
                    block |= {"input": json.loads(text)} if text else {}
                except ValueError:  # cut off
                    assert event is stream[-3]
                    assert stream[-2]["delta"]["stop_reason"] == "max_tokens"
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without ids, times, and what was in the prefix cache."""
    name = answer["id"].partition("_")[2]
    answer = json.loads(json.dumps(answer).replace(name, "ID"))
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    else:
        del usage["input_tokens_details"], answer["created_at"], answer["completed_at"]
    for item in [*answer.get("output", []), *answer.get("content", [])]:
        item.pop("call_id", None)
        if item["type"] == "tool_use":
            del item["id"]
    return answer


@pytest.mark.parametrize(
    ("path", "read_stream"), [("/v1/responses", told_response), ("/v1/messages", told_message)]
)
async def test_streams_of_other_apis_equal_whole_answers(path, read_stream):
    draw = random.Random(path)
    kinds: set[str] = set()
    options: dict[str, Any] = {
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "chat_template": THINKING,
    }
    async with serve(max_num_batched_tokens=64, max_num_seqs=8, **options) as served:
        for _ in range(NUM_SHAPES // 4):
            body = translated_body(draw, path)
            answer = await served.http.post(path, json=body)
            assert answer.status_code == 200, (body, answer.text)
            stream = await served.http.post(path, json={**body, "stream": True})
            got, whole = (
                comparable(read_stream(named_events(stream.text))),
                comparable(answer.json()),
            )
            assert got == whole, body
            items = [*whole.get("output", []), *whole.get("content", [])]
            kinds |= {item["type"] for item in items}
        assert served.async_llm.num_unfinished == 0
    assert len(kinds) == 3  # texts, reasoning and calls
