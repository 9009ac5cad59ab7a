"""`servd chat`: its commands, its prompt in a terminal, and its Markdown."""

import io
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from rich.live import Live

from servd.base.errors import ContextTooLong, ServdError
from servd.terminal.api_client import Client
from servd.terminal.conversation import NAMES, Conversation
from servd.terminal.markdown import AnswerView, find_open_block
from servd.terminal.prompt import TerminalPrompt


class EchoClient(Client):
    """A server that answers with the number of messages it got."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.bodies: list[dict[str, Any]] = []
        self.card: dict[str, Any] = {"id": "m"}
        self.room = 10_000  # tokens

    def get(self, path: str) -> Any:
        assert path == "/v1/models"
        return {"data": [{"id": "other"}, self.card]}

    def stream(self, path: str, body: dict[str, Any]):
        if body.get("temperature", 0) > 2:
            raise ServdError("temperature is too high")
        if body.get("max_tokens", 0) > self.room:
            raise ContextTooLong("too long")
        self.bodies.append(json.loads(json.dumps(body)))
        yield {"choices": [{"delta": {"content": f"answer to {len(body['messages'])}"}}]}


@pytest.fixture
def client() -> EchoClient:
    return EchoClient()


@pytest.fixture
def chat(client: EchoClient) -> Conversation:
    return Conversation(client, "be brief", {"model": "m"})


def test_a_long_prompt_shows_its_progress(chat: Conversation, client: EchoClient):
    pieces: list[tuple[str, bool | None]] = []

    def stream(path: str, body: dict[str, Any]):
        assert body["return_progress"] is True
        for processed in (50, 200):
            report = {"total": 200, "cache": 0, "processed": processed, "time_ms": 1.0}
            yield {"choices": [], "prompt_progress": report}
        yield {"choices": [{"delta": {"content": "yes"}}]}

    client.stream = stream
    chat.open_answer = lambda: nullcontext(lambda *piece: pieces.append(piece))
    chat.ask("hello")
    assert [is_reasoning for _, is_reasoning in pieces] == [None, None, False]
    assert "25%" in pieces[0][0] and "100%" in pieces[1][0]
    assert chat.messages[-1]["content"] == "yes"


def roles(chat: Conversation) -> str:
    return "".join(message["role"][0] for message in chat.messages)


def test_settings_are_parameters_of_the_next_request(chat: Conversation, client: EchoClient):
    for line in ("/set temperature 0.5", "/set max_tokens 9", "/set think off", "/set seed 1"):
        assert chat.obey(line)
    chat.obey("/set seed")
    chat.ask("hello")
    body = client.bodies[-1]
    assert (body["temperature"], body["max_tokens"], "seed" in body) == (0.5, 9, False)
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    chat.obey("/set system be long")
    assert roles(chat) == "sua" and chat.messages[0]["content"] == "be long"
    for line in ("/set temprature 1", "/set seed x", "/set think maybe"):
        with pytest.raises(ServdError, match="/set"):
            chat.obey(line)
    with pytest.raises(ServdError, match="did you mean temperature"):
        chat.obey("/set temprature 1")


def test_all_settings_are_shown_with_the_numbers_that_hold(
    chat: Conversation, client: EchoClient, capsys
):
    numbers = {"temperature": 0.8, "top_k": 40, "presence_penalty": 0.0}
    client.card |= {"max_model_len": 2048, "default_parameters": numbers}
    chat.obey("/set temperature 0.5")
    chat.obey("/set")
    lines = capsys.readouterr().out.splitlines()
    assert {"temperature = 0.5", "top_k = 40 (default)", "max_tokens = 1024 (default)"} < {*lines}
    assert {"presence_penalty = 0.0 (default)", "seed = random (default)"} < {*lines}
    assert "system = be brief" in lines


@pytest.mark.parametrize(
    ("card", "longest"),
    [
        ({"max_model_len": 2048}, 1024),
        ({"max_model_len": 40960}, 4096),
        ({"max_model_len": None}, 4096),
        ({"max_model_len": 2048, "default_parameters": {"max_tokens": 7}}, 7),
        ({"id": "another server's"}, 4096),
    ],
)
def test_an_answer_has_a_limit(chat: Conversation, client: EchoClient, card: Any, longest: int):
    client.card |= card
    chat.ask("one")
    assert client.bodies[-1]["max_tokens"] == longest
    client.room = 5  # the conversation is long
    chat.ask("two")
    assert "max_tokens" not in client.bodies[-1] and roles(chat) == "suaua"
    chat.obey("/set max_tokens 9")
    with pytest.raises(ContextTooLong):
        chat.ask("three")


def test_a_failed_message_is_not_part_of_the_conversation(chat: Conversation):
    chat.ask("one")
    chat.obey("/set temperature 3")
    for attempt in (lambda: chat.ask("two"), lambda: chat.obey("/regenerate")):
        with pytest.raises(ServdError):
            attempt()
        assert roles(chat) == "sua"


def test_regenerate_answers_the_same_messages_again(chat: Conversation, client: EchoClient):
    chat.obey("/regenerate")
    assert roles(chat) == "s"
    chat.ask("one")
    chat.obey("/regenerate")
    first, second = client.bodies
    assert first == second and roles(chat) == "sua"


def test_a_conversation_is_saved_and_loaded(chat: Conversation, tmp_path: Path):
    chat.ask("one")
    chat.obey(f"/save {tmp_path}/chat.json")
    chat.obey(f"/save {tmp_path}/chat.md")
    messages = chat.messages
    chat.obey("/system other")
    assert roles(chat) == "s"
    chat.obey(f"/load {tmp_path}/chat.json")
    assert chat.messages == messages
    chat.obey("/reset")
    assert chat.messages == messages[:1]
    assert "## User\n\none\n" in (tmp_path / "chat.md").read_text()
    (tmp_path / "wrong.json").write_text('{"messages": [{"role": "x"}]}')
    for name in ("wrong.json", "none.json", ""):
        with pytest.raises(ServdError, match="/load"):
            chat.obey(f"/load {tmp_path / name}")
    assert chat.messages == messages[:1]


def test_an_unknown_command_has_a_hint_and_changes_nothing(chat: Conversation, capsys):
    assert chat.obey("/regnerate")
    assert "/regenerate" in capsys.readouterr().out
    assert not chat.obey("/exit")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ("hello\r", ["hello"]),
        ("\x1b[200~one\ntwo\n\nthree\x1b[201~\rnext\r", ["one\ntwo\n\nthree", "next"]),
        ('"""one\rtwo\r"""\rnext\r', ["one\ntwo", "next"]),
        ('"""one"""\r', ["one"]),
        ("half\x03whole\r", ["", "whole"]),
        ("\x04", [None]),
    ],
)
def test_messages_are_read_as_they_were_meant(state: Path, keys: str, messages: list[str | None]):
    with create_pipe_input() as pipe, create_app_session(pipe, DummyOutput()):
        pipe.send_text(keys)
        prompt = TerminalPrompt(NAMES)
        assert [prompt.read() for _ in messages] == messages


def test_the_history_is_kept_and_private(state: Path):
    with create_pipe_input() as pipe, create_app_session(pipe, DummyOutput()):
        pipe.send_text("a secret\r")
        assert TerminalPrompt(NAMES).read() == "a secret"
        assert [*TerminalPrompt(NAMES).session.history.load_history_strings()] == ["a secret"]
    [file] = (state / "servd").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("/reg", {"/regenerate"}), ("/s", {"/set", "/system", "/save"}), ("x", set())],
)
def test_commands_are_completed(state: Path, typed: str, offered: set[str]):
    with create_pipe_input() as pipe, create_app_session(pipe, DummyOutput()):
        completer = TerminalPrompt(NAMES).session.completer
    assert completer is not None
    completions = completer.get_completions(Document(typed), CompleteEvent())
    assert {completion.text for completion in completions} == offered


def test_without_a_place_for_the_history_the_prompt_works(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    with create_pipe_input() as pipe, create_app_session(pipe, DummyOutput()):
        pipe.send_text("hello\r")
        assert TerminalPrompt(NAMES).read() == "hello"


MARKDOWN = """\
# Title

A *paragraph*
of two lines.

1. one

   inside of one

2. two

````python
x = 1

```
y = 2
````

The end."""


def test_blocks_are_divided_outside_of_code_and_lists():
    blocks: list[str] = []
    text = ""
    for piece in MARKDOWN:
        text += piece
        end = find_open_block(text)
        blocks += [text[:end]] if end else []
        text = text[end:]
    assert "".join([*blocks, text]) == MARKDOWN
    firsts = [block.split("\n")[0] for block in [*blocks, text]]
    assert firsts == ["# Title", "A *paragraph*", "1. one", "2. two", "````python", "The end."]


def test_an_answer_longer_than_the_screen_is_shown_once_and_whole():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=8, color_system=None)
    lines = [f"line {number}" for number in range(40)]
    written: list[str] = []
    with Live(console=console, transient=True, auto_refresh=False) as live:
        answer = AnswerView(live)
        for piece in ("```", *(f"\n{line}" for line in lines), "\n```\n\n", "Done\x1b[2J.\n"):
            before = len(file.getvalue())
            answer.add(piece, False)
            live.refresh()
            written.append(file.getvalue()[before:])
        answer.finish(len(answer.text))
    *frames, whole = written
    assert max(frame.count("\n") for frame in frames) < 8
    assert re.findall(r"line \d+", whole) == lines
    assert "\x1b[2J" not in file.getvalue()


def test_a_picture_goes_before_the_text_of_the_next_message(
    chat: Conversation, client: EchoClient, tmp_path: Path
):
    (tmp_path / "a.png").write_bytes(b"pixels")
    chat.obey(f"/image {tmp_path / 'a.png'}")
    chat.obey("/image https://images.example.com/b.png")
    chat.ask("what is it?")
    chat.ask("and?")
    *_, message, _, last = client.bodies[-1]["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert message["content"][0]["image_url"]["url"] == "data:;base64,cGl4ZWxz"
    assert last["content"] == "and?"
    chat.save(tmp_path / "chat.json")
    chat.load(tmp_path / "chat.json")
    assert chat.messages[1]["content"] == message["content"]
    chat.save(tmp_path / "chat.md")
    assert "[picture]\n\n[picture]\n\nwhat is it?" in (tmp_path / "chat.md").read_text()


def test_a_picture_that_is_not_there_is_an_error(chat: Conversation, tmp_path: Path):
    with pytest.raises(ServdError, match=r"none\.png: No such file"):
        chat.obey(f"/image {tmp_path / 'none.png'}")
    assert chat.pictures == []
