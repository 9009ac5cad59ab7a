"""GPT-OSS's channels through parsers, routes and grammars, the markers as text and as tokens."""

import json
import time
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from servd.api.output.incremental import Content, Reasoning, ToolCallArguments, ToolCallStart
from servd.api.output.output_parser import ExpectedOutput, OutputParser
from servd.api.output.reasoning_parsers import harmony as reasoning
from servd.api.output.tool_parsers import harmony as tools
from servd.api.output.tool_parsers._harmony import MARKERS
from servd.api.text.chat_template import ChatTemplate
from servd.api.text.prompt import Chat, ToolOptions
from servd.api.text.tokenizer import Tokenizer
from servd.checkpoint.model_spec import FAKE_SPEC, ModelSpec
from servd.config import Config
from servd.core.structured_output.grammar import Grammar
from servd.core.structured_output.vocabulary import load_vocabulary
from servd.messages.engine import EngineCoreRequest
from tests.api.harness import events, requests_sent, serve, user

CHAT = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
TEMPLATE = """\
{%- for message in messages %}
{%- if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking
    + '<|end|>' }}{% endif %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
ANALYSIS = "<|channel|>analysis<|message|>They ask for Rome.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
FINAL = "<|channel|>final<|message|>Sunny ☀️."

words = st.text(st.sampled_from("ab {}<|é\n"), min_size=1, max_size=8).filter(str.strip)
messages = st.lists(
    st.tuples(st.sampled_from(["analysis", "final", "commentary", "call"]), words), max_size=5
)


def written(kind: str, text: str) -> str:
    if kind != "call":
        return f"<|channel|>{kind}<|message|>{text}<|end|>"
    header = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    return f"{header}{json.dumps({'a': text})}<|call|>"


def expecting(offered: list[dict[str, Any]], **fields: Any) -> ExpectedOutput:
    """A reply of a model that reasons and has these tools."""
    parsers = {
        "reasoning_parser": reasoning.HarmonyReasoningParser,
        "tool_parser": tools.HarmonyToolParser,
    }
    return ExpectedOutput(tool_options=ToolOptions(offered), **parsers, **fields)


@given(messages, st.data())
def test_any_messages_in_any_pieces(said, data):
    text = "<|start|>assistant".join(written(*message) for message in said)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = expecting([{"type": "function", "function": {"name": "f"}}])
    parser = OutputParser(expected)
    thoughts, content, calls = "", "", []
    for delta in [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish():
        match delta:
            case Reasoning(text=text):
                thoughts += text
            case Content(text=text):
                content += text
            case ToolCallStart(name=name):
                calls.append([name, ""])
            case ToolCallArguments(text=text):
                calls[-1][1] += text
    of = {kind: [text for k, text in said if k == kind] for kind in ("analysis", "call")}
    assert thoughts == "\n\n".join(text.strip() for text in of["analysis"])
    assert calls == [["f", json.dumps({"a": text})] for text in of["call"]]
    visible = [text for kind, text in said if kind in ("final", "commentary")]
    assert "".join(content.split()) == "".join("".join(visible).split())


def parsed(text: str) -> tuple[str, list[list[str]]]:
    parser = OutputParser(expecting(TOOLS))
    content, calls = "", []
    for delta in [delta for piece in text for delta in parser.feed(piece)] + parser.finish():
        match delta:
            case Content(text=more):
                content += more
            case ToolCallStart(name=name):
                calls.append([name, ""])
            case ToolCallArguments(text=more):
                calls[-1][1] += more
    return content, calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", ['{"a": 1}']),
        (" to=functions.f<|channel|>commentary<|message|>{}<|end|>" + FINAL, "Sunny ☀️.", ["{}"]),
        (" to=nobody\nand more", " to=nobody\nand more", []),
        (" to", " to", []),
        ("<|channel|>final<|message|> to=you", " to=you", []),
    ],
)
def test_the_recipient_may_be_first(text, content, calls):
    assert parsed(text) == (content, [["f", arguments] for arguments in calls])


def test_many_messages_are_read_once():
    text = "<|channel|>analysis<|message|>a<|end|>"
    expected = expecting(TOOLS, table={0: text.encode()})
    whole, streamed = OutputParser(expected), OutputParser(expected)
    began = time.perf_counter()
    whole.feed(text * 24_000, [0] * 24_000)
    for _ in range(24_000):  # with usage in each chunk
        streamed.feed(text, [0])
        assert streamed.num_reasoning_tokens <= 24_000
    # Half a second. Read again with each delta, it is minutes: the square of the messages.
    assert time.perf_counter() - began < 30
    assert whole.num_reasoning_tokens == streamed.num_reasoning_tokens


@pytest.fixture
def spec(tmp_path) -> ModelSpec:
    """The fake model with the markers as special tokens; a call ends the output, as in GPT-OSS."""
    backend = Tokenizer.bytes()._backend
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    ends = [FAKE_SPEC.eos_token_ids[0], *map(backend.token_to_id, ("<|return|>", "<|call|>"))]
    fields = {"vocab_size": 257 + len(MARKERS), "eos_token_ids": ends}
    return msgspec.structs.replace(FAKE_SPEC, folder=str(tmp_path), **fields)


def tokens(text: str, spec: ModelSpec) -> list[int]:
    return Tokenizer.load(spec.folder).encode(text, add_special_tokens=False)


@pytest.mark.parametrize("end", ["", "<|call|>", "<|return|>"])
async def test_the_markers_are_tokens(spec, end):
    answer = CALL if end == "<|call|>" else FINAL
    script = tokens(ANALYSIS + answer + end, spec)
    async with serve(script=script, spec=spec, chat_template=TEMPLATE) as served:
        body = {"messages": user("hi"), "tools": TOOLS, "max_tokens": len(script)}
        whole = (await served.http.post(CHAT, json=body)).json()
        message = whole["choices"][0]["message"]
        assert message["reasoning"] == "They ask for Rome."
        assert message["content"] == (None if end == "<|call|>" else "Sunny ☀️.")
        calls = [call["function"] for call in message.get("tool_calls", [])]
        called = [{"name": "get_weather", "arguments": '{"city": "Rome"}'}]
        assert calls == (called if end == "<|call|>" else [])
        used = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert used == len("They ask for Rome.")  # one per byte
        streamed = await served.http.post(CHAT, json={**body, "stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in events(streamed.text)]
        for name in ("reasoning", "content"):
            text = "".join(delta.get(name) or "" for delta in deltas)
            assert text == (message[name] or "")


async def sent(spec: ModelSpec, **body: object) -> tuple[EngineCoreRequest, httpx.Response]:
    async with serve(script=[], spec=spec, chat_template=TEMPLATE) as served:
        body = {"messages": user("hi"), "max_tokens": 1, **body}
        answer = await served.http.post(CHAT, json=body)
        (request,) = requests_sent(served.engine)
        return request, answer


async def test_a_form_begins_with_the_answer(spec):
    request, _ = await sent(spec, response_format={"type": "json_object"})
    form = request.params.structured_output
    assert form.starts_after == tokens("<|channel|>final<|message|>", spec)


async def test_calls_that_must_come_may_have_reasoning_before(spec):
    request, _ = await sent(spec, tools=TOOLS, tool_choice="required")
    form = request.params.structured_output
    assert form.starts_after == []
    grammar = Grammar(form, load_vocabulary(Config(), spec))

    def allows(text: str) -> bool:
        matcher = grammar.matcher()
        for token_id in tokens(text, spec):
            if not matcher.bitmask()[token_id // 8] >> token_id % 8 & 1:
                return False
            matcher.accept(token_id)
        return matcher.is_complete

    for before in ("", ANALYSIS, ANALYSIS * 2):
        assert allows(before + CALL + "<|call|>")
        assert not allows(before + FINAL + "<|return|>")
        assert not allows(before + CALL.replace("Rome", "Oslo") + "<|call|>")
    assert not allows(ANALYSIS.removesuffix("<|end|><|start|>assistant") + "<|return|>")


async def test_a_thinking_budget_is_refused(spec):
    async with serve(script=[], spec=spec, chat_template=TEMPLATE) as served:
        body = {"messages": user("hi"), "thinking_token_budget": 9}
        answer = await served.http.post(CHAT, json=body)
        assert answer.status_code == 400 and "not one token" in answer.json()["error"]["message"]


def test_reasoning_is_what_the_template_calls_thinking():
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "reasoning": "Hm.", "content": ""}
    template = ChatTemplate(TEMPLATE)
    assert "analysis<|message|>Hm." in template.render(Chat(messages=[said]))
    with_call = Chat(messages=[{**said, "tool_calls": [call]}])
    assert "analysis<|message|>Hm." in template.render(with_call)
    both = {**said, "content": "I look.", "tool_calls": [call]}
    assert "Hm." not in template.render(Chat(messages=[both]))  # GPT-OSS's own refuses this
