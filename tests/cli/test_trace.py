"""`servd trace`: the calls of one request, under the names that the code has."""

from __future__ import annotations

import re
from argparse import Namespace
from html.parser import HTMLParser
from itertools import chain

import pytest

from servd.cli import _calls, trace
from servd.cli._calls import Call
from servd.config import Config

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
