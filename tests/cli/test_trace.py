"""`servd trace`: the calls of one request, under the names that the code has."""

from __future__ import annotations

import ast
import asyncio
import re
from argparse import Namespace
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path

import msgspec
import pytest

import servd
from servd.cli import _calls, _timeline, trace
from servd.cli._calls import Call
from servd.config import Config
from servd.messages import EngineCoreRequest
from servd.tracing import STAGES
from tests.api.harness import chat_prompt, output_text, serve

PROMPT = "Say <b>hi</b>"
NUM_TOKENS = 3


@pytest.fixture(scope="module")
def traced() -> tuple[list[Call], list[trace.Token]]:
    """The demo model, in this process."""
    arguments = Namespace(prompt=PROMPT, raw=False, max_tokens=NUM_TOKENS)
    return trace.ask_here(arguments, Config.load({"model": "demo", "device": "cpu", "seed": 1}))


def walk(call: Call) -> list[Call]:
    return [call, *chain.from_iterable(map(walk, call.calls))]


def named(calls: list[Call], name: str) -> list[Call]:
    return [call for top in calls for call in walk(top) if call.name == name]


def test_the_way_of_a_request(traced):
    """What happens first comes first, thread by thread."""
    calls, _ = traced
    assert [call.name for call in calls] == [
        "API server", "engine, input", "engine, busy loop", "engine, output",
    ]  # fmt: skip
    way = {
        "API server": ["AsyncLLM.prepare", "Processor.process", "Outbox.send"],
        "engine, input": ["Inbox.recv"],
        "engine, busy loop": [
            "EngineCore.handle", "Scheduler.add", "EngineCore.step", "Scheduler.schedule",
            "CPUModelRunner.execute_model", "Qwen3ForCausalLM.forward",
            "CPUModelRunner.sample_tokens", "AsyncOutput.result",
        ],
        "engine, output": ["Outbox.send"],
    }  # fmt: skip
    for call in calls:
        names = [inner.name for inner in walk(call)]
        places = [names.index(name) for name in way[call.name]]
        assert places == sorted(places)
    assert named(calls, "AsyncLLM.generate") and named(calls, "OutputProcessor.process")


def test_calls_take_no_longer_than_the_one_around_them(traced):
    for call in chain.from_iterable(map(walk, traced[0])):
        inner = [each for each in call.calls if not each.name.startswith("AsyncLLM.admit")]
        if call.seconds and not call.name.startswith("AsyncLLM"):  # those are suspended meanwhile
            assert sum(each.seconds for each in inner) <= call.seconds * 1.01 + 1e-4, call.name


def test_messages_and_tokens(traced):
    calls, tokens = traced
    sizes = [
        [call.text for call in named(calls, name) if call.text.startswith("EngineCoreRequest")]
        for name in ("Outbox.send", "Inbox.recv")
    ]
    assert sizes[0] == sizes[1] and re.fullmatch(r"EngineCoreRequest, \d+ bytes", *sizes[0])
    sampled = [int(re.findall(r"\d+", c.text)[0]) for c in named(calls, "AsyncOutput.result")]
    assert sampled == [token.id for token in tokens] and len(tokens) == NUM_TOKENS
    texts = "".join(token.candidates[0][0] for token in tokens)
    told = [c.text.removeprefix("text ") for c in named(calls, "OutputProcessor.process")]
    assert "".join(map(eval, told)) == texts
    first, *_ = named(calls, "Scheduler.schedule")
    prompt = named(calls, "Processor.process")[0].text
    assert f"computes {prompt.split()[0]} tokens, new blocks [" in first.text
    assert [token.seconds for token in tokens] == sorted(token.seconds for token in tokens)


def functions() -> set[str]:
    """Methods with their classes, functions with their modules, of all of servd."""
    found: set[str] = set()
    for path in Path(servd.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
            elif hasattr(node, "name"):
                found.add(f"{path.stem}.{node.name}")
    return found


def test_functions_of_a_timeline_exist():
    tables = _timeline.BEFORE, _timeline.ENGINE, _timeline.AFTER, _timeline.STEP
    named = {name for table in tables for name in table.values()}
    assert named | {"EngineCore.step", "ModelRunner.execute_model", "Outbox.send"} <= functions()
    stages = {stage for table in tables[:3] for stage in table}
    assert stages <= {*STAGES}


@pytest.mark.parametrize("raw", [False, True])
async def test_a_running_server_is_asked(raw):
    sizes: list[int] = []
    async with serve(listen=True, block_size=4) as served:
        tell = served.engine.tell

        def weigh(message):
            sizes.append(len(msgspec.msgpack.encode(message)))
            tell(message)

        served.engine.tell = weigh
        arguments = Namespace(prompt=PROMPT, raw=raw, max_tokens=NUM_TOKENS, url=served.url)
        calls, tokens = await asyncio.to_thread(trace.ask_server, arguments, Config())
        [sent] = [each for each in served.engine.sent if isinstance(each, EngineCoreRequest)]
        [request] = served.async_llm.tracer.recent.values()
    prompt = PROMPT if raw else chat_prompt(PROMPT)
    assert "".join(token.candidates[0][0] for token in tokens) == output_text(prompt, NUM_TOKENS)
    assert [len(token.candidates) for token in tokens] == [5] * NUM_TOKENS
    times = [token.seconds for token in tokens]
    assert times == sorted(times)
    own = sent.prompt_token_ids
    assert [call.text for call in named(calls, "Tokenizer.encode")] == [
        f"{len(own)} prompt tokens {_calls.shorten(own)}"
    ]
    was = msgspec.structs.replace(sent, block_hashes=[], marks=[])  # the engine fills them in
    size = len(msgspec.msgpack.encode(was))
    assert named(calls, "EngineCoreClient.send")[0].text == f"EngineCoreRequest, {size} bytes"
    told = [call.text for call in named(calls, "Outbox.send")]
    assert told == [f"EngineCoreOutputs, {each} bytes" for each in sizes] and len(told) == 3
    [first, *_] = named(calls, "EngineCore.step")
    blocks = request.choices[0].block_ids
    assert len(blocks) == -(-(len(own) + NUM_TOKENS - 1) // 4)
    assert first.text.endswith(f"its blocks in the end: {_calls.shorten(blocks)}")
    assert first.text.startswith(f"step 0: {len(own)} tokens of 1 requests")
    for call in chain.from_iterable(map(walk, calls)):
        assert sum(each.seconds for each in call.calls) <= call.seconds * 1.01 + 1e-4 or (
            call.seconds == 0
        )


def test_a_page_of_it(traced, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "ask_here", lambda *_: traced)
    file = tmp_path / "trace.html"
    arguments = Namespace(html=str(file), url=None, prompt="<b>Hi")
    assert trace.run(arguments) == 0
    text = file.read_text()
    names: list[str] = []

    class Page(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert tag not in ("script", "link", "img") and not {"src", "href"} & dict(attrs).keys()

        def handle_data(self, data):
            names.append(data)

    Page().feed(text)
    assert names.index("<b>Hi") < names.index("Calls") < names.index("Tokens")
    assert "Scheduler.schedule" in names and "url(" not in text
    assert re.search(r"core/scheduler.py:\d+", text)


def test_drawing_folds_what_repeats():
    def step(number: int) -> Call:
        inner = Call("inner", seconds=0.001)
        return Call("step", begin=number, seconds=0.5, text=f"number {number}", calls=[inner] * 3)

    top = Call("loop", calls=[step(1), step(2), step(3), step(4), Call("end", seconds=1.0)])
    lines = [" ".join(line.split()) for line in _calls.draw([top])]
    assert lines == [
        "└─ loop",
        "├─ step 500.000 ms number 1",
        "│ ├─ inner 1.000 ms",
        "│ └─ inner 2.000 ms 2 more, 1.000 ms each",
        "├─ step 500.000 ms number 2",
        "│ ├─ inner 1.000 ms",
        "│ └─ inner 2.000 ms 2 more, 1.000 ms each",
        "├─ step 1000.000 ms 2 more, 500.000 ms each",
        "└─ end 1000.000 ms",
    ]
