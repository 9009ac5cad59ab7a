"""What a server logs of requests, and the traces that its logs and metrics lead to."""

import io
import json
import logging
import os
import re
import shlex
import threading
import time
from pathlib import Path

import pytest

from servd.api.server import first_steps
from servd.base.errors import ConfigError
from servd.base.log import (
    MAX_PENDING,
    current_request,
    flush,
    resolve_access_log,
    setup,
    take_dropped,
)
from servd.config import Config, ObservabilityConfig
from tests.api.harness import serve, until
from tests.limits import WAIT_SECONDS

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
BODY = {"prompt": "a secret prompt", "max_tokens": 3}


@pytest.fixture
def lines(monkeypatch):
    """Logs as JSON: all lines so far."""
    root, servd = logging.getLogger(), logging.getLogger("servd")
    before = [*root.handlers], root.level, servd.level
    monkeypatch.setattr("sys.stderr", io.StringIO())
    setup("api-0", ObservabilityConfig(log_format="json"))
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    yield lambda: [json.loads(line) for line in handler.stream.getvalue().splitlines()]
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    servd.setLevel(before[2])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_length", [None, 0, 8])
async def test_what_is_asked_is_logged_if_that_is_asked_for(lines, max_length, stream):
    async with serve(enable_log_requests=True, max_log_len=max_length) as served:
        for prompt in (BODY["prompt"], [7, 8, 9]):
            body = {**BODY, "prompt": prompt, "temperature": 0.25, "stop": ["~~"], "stream": stream}
            assert (await served.http.post("/v1/completions", json=body)).status_code == 200
    text, tokens = [line for line in lines() if line["logger"] == "servd.requests"]
    assert text["prompt"] == BODY["prompt"][:max_length] and text["num_prompt_tokens"] == 15
    assert text["prompt_token_ids"] == [*BODY["prompt"].encode()][:max_length]
    assert (tokens["prompt"], tokens["prompt_token_ids"]) == (None, [7, 8, 9][:max_length])
    assert text["params"]["temperature"] == 0.25 and text["params"]["max_tokens"] == 3
    assert text["params"]["stop"] == ["~~"]
    assert text["prompt_id"].endswith(text["request_id"]) and text["prompt_id"] in text["message"]


ASKED = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a secret"}]},
    "/v1/responses": {"input": "a secret"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 3},
    "/v1/embeddings": {"input": "a secret"},
    "/tokenize": {"prompt": "a secret"},
}


async def test_no_other_line_says_what_was_asked(lines):
    async with serve(access_log="all", log_level="debug") as served:
        logging.getLogger("servd").setLevel("DEBUG")
        for path, body in ASKED.items():
            for broken in ({}, {"max_tokens": "a secret"}, {"temperature": -5}):
                url = f"{path}?name=secret"
                await served.http.post(url, json=body | {"user": "secret", **broken})
        await served.http.post("/v1/completions", content=b'{"prompt": "a secret')
    assert len(lines()) > 3 * len(ASKED) and "secret" not in json.dumps(lines())


@pytest.mark.parametrize(
    ("access_log", "logged"),
    [
        ("off", []),
        ("requests", ["/v1/completions", "/nowhere"]),
        ("all", ["/v1/completions", "/health", "/metrics", "/nowhere"]),
    ],
)
async def test_the_access_log(lines, access_log, logged):
    async with serve(access_log=access_log) as served:
        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        await served.http.post("/v1/completions?key=secret", json=BODY, headers=headers)
        await served.http.get("/health")
        await served.http.get("/metrics")
        await served.http.get("/nowhere")
    logged_lines = [line for line in lines() if line["logger"] == "servd.access"]
    assert [line["path"] for line in logged_lines] == logged
    assert "secret" not in json.dumps(logged_lines)
    if logged_lines:
        first, last = logged_lines[0], logged_lines[-1]
        assert (first["request_id"], first["trace_id"]) == ("mine", TRACE)
        assert (first["method"], first["status"], last["status"]) == ("POST", 200, 404)
        assert (first["num_prompt_tokens"], last["num_output_tokens"]) == (len(BODY["prompt"]), 0)
        assert first["num_output_tokens"] == BODY["max_tokens"] and first["key"] == ""
        assert "trace_id" not in last and first["process"] == "api-0" and first["level"] == "info"
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first["time"])


async def test_a_path_cannot_forge_a_line(lines):
    async with serve(access_log="all") as served:
        await served.http.get("/a%0Ab")
    assert [line["path"] for line in lines() if "path" in line] == ["/a%0Ab"]


def test_an_error_is_one_line(lines):
    log = logging.getLogger("servd.api")
    token = current_request.set({"request_id": "r"})
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        log.exception("it failed\non two lines")
    finally:
        current_request.reset(token)
    [line] = [line for line in lines() if line["logger"] == "servd.api"]
    assert line["message"] == "it failed\non two lines" and line["request_id"] == "r"
    assert "ZeroDivisionError" in line["exception"]


@pytest.mark.parametrize("parent", [PARENT, "", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "x"])
async def test_exemplars_lead_to_the_trace(parent):
    async with serve() as served:
        headers = {"traceparent": parent} if parent else {}
        await served.http.post("/v1/completions", json=BODY, headers=headers)
        accept = {"accept": "application/openmetrics-text"}
        text = (await served.http.get("/metrics", headers=accept)).text
        plain = (await served.http.get("/metrics")).text
    exemplar = f'# {{trace_id="{TRACE}"}}'
    metric_names = [line.split("{")[0] for line in text.splitlines() if exemplar in line]
    if parent == PARENT:
        assert "vllm:time_to_first_token_seconds_bucket" in metric_names
        assert "vllm:e2e_request_latency_seconds_bucket" in metric_names
    else:
        assert metric_names == []
    assert TRACE not in plain


@pytest.mark.parametrize("is_terminal", [True, False])
def test_answers_are_logged_at_a_terminal_unless_told_otherwise(monkeypatch, is_terminal):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    options = [ObservabilityConfig(access_log=choice) for choice in ("auto", "off", "all")]
    resolved = {option.access_log: resolve_access_log(option) for option in options}
    assert resolved == {"auto": "requests" if is_terminal else "off", "off": "off", "all": "all"}


@pytest.mark.parametrize("options", [{}, {"api_key": ["k"]}, {"console": False}])
async def test_the_lines_after_ready_can_be_used(options):
    async with serve(**options) as served:
        lines = first_steps("http://test", Config.load(options), is_causal=True)
        by_name = dict(line.split(": ", 1) for line in lines)
        assert ("console" in by_name) == options.get("console", True)
        for name in by_name.keys() - {"try"}:
            path, _, with_key = by_name[name].removeprefix("http://test").partition(" ")
            headers = {"accept": "text/html"}
            if with_key:
                headers["authorization"] = "Bearer k"
            assert (await served.http.get(path, headers=headers)).status_code == 200
        words = shlex.split(by_name["try"].replace("KEY", "k"))
        headers = dict(words[i + 1].split(": ") for i, word in enumerate(words) if word == "-H")
        [url] = [word for word in words if word.startswith("http")]
        body = json.loads(words[words.index("-d") + 1]) | {"max_tokens": 1}
        path = url.removeprefix("http://test")
        assert (await served.http.post(path, json=body, headers=headers)).status_code == 200


# ---- a log that nobody reads ----


class Pipe:
    """A pipe whose reader reads when the test wants it to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.readable, writable = os.pipe()
        self.stream = open(writable, "w", encoding="utf8")
        self.lines: list[str] = []

    def setup(self, log_format: str = "text") -> None:
        """Log into the pipe. In the test itself, as pytest sets its own stderr for each phase."""
        self.monkeypatch.setattr("sys.stderr", self.stream)
        setup("api-0", ObservabilityConfig(log_format=log_format))

    def read(self) -> None:
        def collect() -> None:
            with open(self.readable, encoding="utf8") as file:
                self.lines.extend(file)

        threading.Thread(target=collect, daemon=True).start()


@pytest.fixture
def pipe(monkeypatch):
    """Logs that go into a pipe, without a reader at first."""
    root, servd = logging.getLogger(), logging.getLogger("servd")
    before = [*root.handlers], root.level, servd.level
    yield Pipe(monkeypatch)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    servd.setLevel(before[2])


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("size", [1000, 100_000])
async def test_a_log_that_nobody_reads_delays_nobody(pipe: Pipe, log_format, size):
    pipe.setup(log_format)
    logger = logging.getLogger("servd.api")
    num_lines = 4 * MAX_PENDING // size
    async with serve(access_log="all") as served:
        for number in range(num_lines):
            logger.info("%06d %s", number, "x" * size)
        assert (await served.http.get("/health")).status_code == 200
    num_dropped = take_dropped()
    assert 0 < num_dropped < num_lines and take_dropped() == 0
    pipe.read()
    await until(lambda: any("were dropped" in line for line in pipe.lines))
    dropped_line = next(line for line in pipe.lines if "were dropped" in line)
    assert f"{num_dropped} log lines were dropped" in dropped_line
    logger.info("it flows again")
    await until(lambda: "it flows again" in pipe.lines[-1])
    numbers = [int(match[1]) for line in pipe.lines if (match := re.search(r"\b(\d{6}) x", line))]
    assert numbers == sorted({*numbers})
    assert num_lines <= len(numbers) + num_dropped <= num_lines + 5  # a few lines are the server's


async def test_dropped_lines_are_counted():
    async with serve() as served:
        assert "servd:dropped_log_lines_total{" in (await served.http.get("/metrics")).text


def test_a_log_whose_reader_has_gone_costs_nothing(pipe: Pipe):
    pipe.setup()
    os.close(pipe.readable)
    begin = time.thread_time()
    for number in range(100):
        logging.getLogger("servd.api").info("line %d", number)
    flush()
    assert take_dropped() == 100 and time.thread_time() - begin < 1


def test_the_last_lines_are_written_before_the_end(pipe: Pipe):
    pipe.setup()
    pipe.read()
    for number in range(1000):
        logging.getLogger("servd.api").info("line %d", number)
    flush()
    deadline = time.monotonic() + WAIT_SECONDS
    while len(pipe.lines) < 1000 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pipe.lines[-1].endswith("line 999\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_of_any_kind_reaches_the_log(pipe: Pipe, log_format, monkeypatch):
    pipe.setup(log_format)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger = logging.getLogger("servd.api")
    logger.info("%d", "no number")  # the logger's mistake costs a line, not the request
    logger.info("fields", extra={"fields": {"name": "a\udc80", "path": Path("/")}})
    logger.info("%s!", "x" * (MAX_PENDING + 1))
    pipe.read()
    flush()
    deadline = time.monotonic() + WAIT_SECONDS
    while "x!" not in "".join(pipe.lines) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "fields" in pipe.lines[0] and len(pipe.lines) == 2
    assert take_dropped() == 0


NAMES = ["a\nb", "a\rb", "\x1b[31mred", "a\x9bb", "a\u2028b", "a\x85b", "\udcf6", "a\x7fb", "\0"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_name_can_neither_forge_a_line_nor_steer_a_terminal(monkeypatch, log_format, name):
    root = logging.getLogger()
    before = [*root.handlers]
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    setup("servd", ObservabilityConfig(log_format=log_format))
    try:
        raise ConfigError(f"not serving {name}")
    except ConfigError:
        logging.getLogger("servd.api").exception("not serving %s", name)
    finally:
        root.handlers[:] = before
    text = stream.getvalue()
    text.encode()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", text)
    if log_format == "json":
        expected = name.encode(errors="backslashreplace").decode()
        assert json.loads(text)["message"] == f"not serving {expected}"
    else:
        printable = name.encode(errors="backslashreplace").decode() if "\udcf6" in name else name
        escaped = printable if printable.isprintable() else ascii(printable)[1:-1]
        assert text.splitlines()[0].endswith(f"not serving {escaped}")
