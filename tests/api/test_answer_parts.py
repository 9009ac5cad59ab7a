"""The parts of an answer in all APIs: stop strings, calls in the reasoning, text beside calls."""

from typing import Any

import msgspec
import pytest

from servd.api.output.incremental import Content, Reasoning, ToolCallArguments
from servd.api.output.output_parser import ExpectedOutput, OutputAnswerFinder, OutputParser
from servd.api.output.reasoning_parser import ReasoningParser
from servd.api.output.tool_parser import ToolParser
from servd.api.text.detokenizer import Detokenizer
from servd.api.text.prompt import ToolOptions
from servd.api.text.tokenizer import Tokenizer
from servd.base import plugins
from servd.messages.params import SamplingParams
from tests.api.harness import CITY, Served, events, named_events, serve, user

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OPEN = "{{ messages[0].content }}<think>\n"


async def answers(
    served: Served, stop: list[str] | None, **more: Any
) -> dict[str, tuple[str, str, Any]]:
    """Reasoning, content and reason of the end, by API, streamed too."""
    by_api = {}
    for stream in (False, True):
        name = ", streamed" * stream
        body: Any = {"messages": user("hi"), "stream": stream, "stop": stop, "tools": [TOOL]}
        answer = await served.http.post("/v1/chat/completions", json=body | more)
        parts = events(answer.text) if stream else [answer.json()]
        choices = [choice for part in parts for choice in part["choices"]]
        texts = [choice["delta" if stream else "message"] for choice in choices]
        by_api[f"chat{name}"] = (
            "".join(text.get("reasoning") or "" for text in texts),
            "".join(text.get("content") or "" for text in texts),
            choices[-1]["stop_reason"],
        )
        body = {"messages": user("hi"), "stream": stream, "max_tokens": 500}
        body |= {"tools": [{"name": "weather", "input_schema": CITY}], "stop_sequences": stop or []}
        answer = await served.http.post("/v1/messages", json=body)
        if stream:
            parts = named_events(answer.text)
            ends = parts[-2]["delta"]
            texts = [part["delta"] for part in parts if part["type"] == "content_block_delta"]
        else:
            ends = answer.json()
            texts = ends["content"]
        thinking = "".join(text.get("thinking", "") for text in texts)
        content = "".join(text.get("text", "") for text in texts)
        by_api[f"messages{name}"] = (thinking, content, ends["stop_sequence"])
    body = {"messages": user("hi"), "stream": False, "options": {"stop": stop}, "tools": [TOOL]}
    message = (await served.http.post("/api/chat", json=body)).json()["message"]
    reason = by_api["chat"][2]  # Ollama does not say which one
    by_api["ollama"] = (message.get("thinking", ""), message["content"], reason)
    return by_api


def thinking(script: str, **options: Any) -> Any:
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    return serve(listen=True, script=script, **parsers | options)


STOPS = {
    "in the reasoning": ("<think>a user</think>\n\nan answer", ["user"], "a user", "an answer"),
    "in both": ("<think>a user</think>\n\nTo user x", ["user"], "a user", "To "),
    "the gap": ("<think>a\n\nb</think>\n\nc\n\nd", ["\n\n"], "a\n\nb", "c"),
    "the tag": ("<think>a</think>b", ["think>", "</"], "a", "b"),
    "across the tag": ("<think>a</think>b", ["a</think>b", "k>b"], "a", "b"),
    "no reasoning": ("a user b", ["user"], "", "a "),
    "like the tag": ("<thin user", ["in"], "", "<th"),
}


@pytest.mark.parametrize("title", STOPS)
async def test_stop_strings_count_after_the_reasoning(title):
    script, stop, reasoning, content = STOPS[title]
    async with thinking(script) as served:
        for api, parts in (await answers(served, stop)).items():
            reason = parts[2] if content != "an answer" else None
            assert parts == (reasoning, content, reason), api


async def test_stop_strings_after_reasoning_that_the_prompt_opened():
    async with thinking("a user</think>\nTo user", chat_template=OPEN) as served:
        for api, parts in (await answers(served, ["user"])).items():
            assert parts == ("a user", "To ", "user"), api


async def test_responses_have_no_stop_strings_but_reasoning():
    async with thinking("<think>a</think>b") as served:
        body = {"input": "hi", "store": False}
        output = (await served.http.post("/v1/responses", json=body)).json()["output"]
    assert [item["content"][0]["text"] for item in output] == ["a", "b"]


BYTES = Tokenizer.bytes()
HARMONY = (
    "<|channel|>analysis<|message|>a stop b<|end|><|start|>assistant"
    "<|channel|>final<|message|>c stop d"
)


@pytest.mark.parametrize(
    ("parser", "text", "stop", "kept"),
    [
        ("harmony", HARMONY, "stop", HARMONY.removesuffix("stop d")),
        ("harmony", HARMONY, "final", HARMONY),
        ("harmony", HARMONY, "d", HARMONY.removesuffix("d")),
        ("harmony", "no channel, stop", "stop", "no channel, "),
        ("gemma4", "<|channel>thought\na, b<channel|>c, d", ", ", None),
        ("granite", "Here is my thought process: a, b Here is my response: c, d", ", ", None),
        ("mistral", "[THINK]a, b[/THINK]c, d", ", ", None),
        ("seed_oss", "<seed:think>a, b</seed:think>c, d", ", ", None),
        ("qwen3", " \n, d", ", ", " \n"),
        ("qwen3", "<think", "k", "<thin"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_stop_strings_of_every_parser_count_in_the_answer(parser, text, stop, kept, size):
    kind = plugins.load_class("servd.api.output.reasoning_parsers", parser, ReasoningParser)
    for min_tokens in (0, 1):
        finder = OutputAnswerFinder(kind(False))
        params = SamplingParams(stop=[stop], min_tokens=min_tokens)
        detokenizer = Detokenizer(BYTES, params, answer=finder)
        ids = list(text.encode())
        text_found = ""
        for i in range(0, len(ids), size):
            if detokenizer.stop_reason is None:
                text_found += detokenizer.push(ids[i : i + size])
        text_found += detokenizer.flush()
        assert text_found == (text.removesuffix(", d") if kept is None else kept)


def parsed(tool_parser: str, text: str, size: int, is_reasoning: bool = False) -> Any:
    """Reasoning, content and arguments of an answer that comes in pieces."""
    tools = plugins.load_class("servd.api.output.tool_parsers", tool_parser, ToolParser)
    name = "harmony" if tool_parser == "harmony" else "qwen3"
    reasoning = plugins.load_class("servd.api.output.reasoning_parsers", name, ReasoningParser)
    parser = OutputParser(ExpectedOutput(None, reasoning, is_reasoning, tools, ToolOptions([TOOL])))
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    return tuple(
        "".join(delta.text for delta in deltas if isinstance(delta, kind))
        for kind in (Reasoning, Content, ToolCallArguments)
    )


ROME = '{"city": "Rome"}'
JSON_CALL = f'{{"name": "weather", "arguments": {ROME}}}'
CALLS = {  # a call of each parser, without spaces around it
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    f"{ROME}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "functiongemma": "<start_function_call>call:weather{city: <escape>Rome<escape>}"
    "<end_function_call>",
    "gemma4": '<|tool_call>call:weather{city: <|"|>Rome<|"|>}<tool_call|>',
    "glm45": "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
    "granite": f"<|tool_call|>[{JSON_CALL}]",
    "hermes": f"<tool_call>{JSON_CALL}</tool_call>",
    "internlm": f"<|action_start|><|plugin|>{JSON_CALL}<|action_end|>",
    "jamba": f"<tool_calls>[{JSON_CALL}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{ROME}<|tool_call_end|><|tool_calls_section_end|>",
    "lfm2": "<|tool_call_start|>[weather(city='Rome')]<|tool_call_end|>",
    "llama3_json": f"<|python_tag|>{JSON_CALL}",
    "minimax": f"<tool_calls>{JSON_CALL}</tool_calls>",
    "minimax_m2": '<minimax:tool_call><invoke name="weather"><parameter name="city">Rome'
    "</parameter></invoke></minimax:tool_call>",
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ROME}",
    "phi4_mini": f"<|tool_call|>[{JSON_CALL}]<|/tool_call|>",
    "qwen3_coder": "<tool_call><function=weather><parameter=city>\nRome\n</parameter></function>"
    "</tool_call>",
    "seed_oss": "<seed:tool_call><function=weather><parameter=city>Rome</parameter></function>"
    "</seed:tool_call>",
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_ends_the_reasoning(name, size):
    call = CALLS[name]
    for begin, is_reasoning in (("<think>", False), ("", True)):
        expected = ("I look.", "", ROME)
        assert parsed(name, f"{begin}\nI look.\n{call}", size, is_reasoning) == expected
        closed = f"{begin}I look.\n{call}\n</think>\n\nIt is."
        assert parsed(name, closed, size, is_reasoning) == ("I look.", "It is.", ROME)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("before", "after"), [("A ", " B"), ("A\n", "\nB"), (" A", "B "), ("", "")]
)
def test_text_beside_calls_is_as_it_was(name, size, before, after):
    between = after and " \n and\n"
    text = f"{before}{CALLS[name]}{between}{CALLS[name]}{after}"
    assert parsed(name, text, size)[1:] == (before + between + after, ROME * 2)


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_in_the_analysis_of_harmony(size):
    text = (
        "<|channel|>analysis<|message|>I look.<|start|>assistant<|channel|>commentary "
        f"to=functions.weather<|message|>{ROME}<|call|>"
    )
    assert parsed("harmony", text, size) == ("I look.", "", ROME)


async def test_a_call_in_the_reasoning_reaches_all_apis():
    async with thinking(f"<think>\nI look.\n{CALL}") as served:
        for api, parts in (await answers(served, None)).items():
            assert parts[:2] == ("I look.", ""), api
        body: Any = {"messages": user("hi"), "tools": [TOOL]}
        answer = (await served.http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        body = {"messages": user("hi"), "tools": [], "max_tokens": 500}
        answer = (await served.http.post("/v1/messages", json=body)).json()
        assert (
            msgspec.json.encode(answer["content"]).count(b"tool_call") == 2
        )  # without tools: text
