"""`servd trace`: the functions that ran, in the phases of a start and of a request."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import servd
from servd.cli import main
from servd.trace.phases import divide
from servd.trace.recorder import FunctionCall, Process

PACKAGE = Path(servd.__file__).parent
LINE = re.compile(r"[│├└─ ]*[├└]─ (\S+)(?: \(see .+\))? +[\d.]+ ms(?: x\d+)? +(\S+):(\d+)")


@pytest.mark.parametrize(
    ("options", "runner"),
    [
        (["--executor", "fake"], "FakeExecutor"),
        pytest.param(["demo", "--device", "cpu"], "CPUModelRunner", marks=pytest.mark.slow),
    ],
)
def test_every_phase_has_its_functions_with_their_places(capsys, options, runner):
    with pytest.raises(SystemExit, match="0"):
        main(["trace", "Hi", *options, "--max-tokens", "4"])
    text = capsys.readouterr().out
    phases = dict(re.findall(r"^\d\. (.+?): (.*?)(?=^\d\. |^answer)", text, re.M | re.S))
    assert [*phases] == [
        *("command", "processes", "API server", "AsyncLLM", "engine"),
        *("request", "generate", "step", "output"),
    ]
    names = {phase: {match[1] for match in LINE.finditer(lines)} for phase, lines in phases.items()}
    assert {"main", "run_server"} <= names["command"]
    assert "CoreEngineProcManager.start" in names["processes"]
    assert "build_app" in names["API server"]
    assert "EngineClient.start" in names["AsyncLLM"]
    assert "EngineCoreProc.load" in names["engine"]
    assert "OpenAIServingChat.create_chat_completion" in names["request"]
    assert {"Processor.process_inputs", "AsyncLLM.add_request"} <= names["generate"]
    assert {"EngineCore.step", "Scheduler.schedule"} <= names["step"]
    assert "OutputProcessor.process_outputs" in names["output"]
    assert runner in phases["step"]
    places = [match.groups() for match in LINE.finditer(text)]
    assert len(places) > 100
    for name, file, line in places:  # the line of the function, or of its first decorator
        source = (PACKAGE / file).read_text().splitlines()[int(line) - 1 :]
        head = next(text for text in source if text.lstrip().startswith(("def ", "async def ")))
        assert f"def {name.rpartition('.')[2]}(" in head.replace("[T]", "")


def test_a_page_has_all_calls_and_nothing_from_elsewhere(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVD_API_KEY", "a-key-for-another-server")
    file = tmp_path / "trace.html"
    with pytest.raises(SystemExit, match="0"):
        main(["trace", "<b>Hi</b>", "--executor", "fake", "--html", str(file)])
    page = Page()
    page.feed(file.read_text())
    assert not page.open_tags and page.text.count("<b>Hi</b>") == 1
    assert "AsyncLLM.admit" in page.text and "url(" not in page.text


class Page(HTMLParser):
    """A page without scripts or links, whose elements are closed in order."""

    def __init__(self):
        super().__init__()
        self.open_tags = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img") and not {"src", "href"} & dict(attrs).keys()
        if tag != "meta":
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_a_call_that_begins_another_phase_is_shown_without_its_calls():
    tokens = call("api/text/tokenizer.py", "Tokenizer.encode", 2)
    generate = call("api/engine/async_llm.py", "AsyncLLM.generate", 5, tokens)
    http = call("api/http/middleware.py", "RequestContext.__call__", 9, generate)
    earlier = call("api/http/middleware.py", "RequestContext.__call__", 7, is_request=False)
    start = call("api/server.py", "main", 30, earlier, http, is_request=False)
    phases = {
        phase.name: phase for phase in divide([Process("api", [FunctionCall("", calls=[start])])])
    }
    [(process, request)] = phases["request"].calls
    assert process == "api" and request.took_ns == 9 and request.own_ns == 4
    assert [(inner.phase, inner.calls) for inner in request.calls] == [("generate", [])]
    [(_, whole)] = phases["generate"].calls
    assert whole.calls == [tokens]
    [(_, server)] = phases["API server"].calls
    assert [inner.phase for inner in server.calls] == ["request"]


def call(file, name, took_ns, *calls, is_request=True):
    return FunctionCall(name, file, 1, is_request, took_ns=took_ns, calls=[*calls])
