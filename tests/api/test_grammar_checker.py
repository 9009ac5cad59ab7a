"""GrammarChecker, over fake processes that die at awkward moments."""

import contextlib
import itertools
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from unittest.mock import Mock

import msgspec
import pytest

from servd.api.engine import grammar_checker, limited_process
from servd.api.engine.grammar_checker import GrammarChecker
from servd.api.engine.limited_process import FairLock
from servd.base.errors import InvalidRequest, Overloaded
from servd.checkpoint.model_spec import FAKE_SPEC
from servd.config import AccessConfig, Config
from servd.core.structured_output.manager import Compiled
from servd.ipc.start_messages import Reply, StartLimitedProcess
from servd.messages.params import StructuredOutput
from tests.core.engines import Log, make_engine, make_request
from tests.limits import WAIT_SECONDS

FORMS = [StructuredOutput("regex", letter) for letter in "abc"]


class FakeProcess:
    """Answers that it is ready, then as many grammars as `lives` says for this process, and ends.

    A life of -1 ends before it is ready, one of -2 never answers, one of -3 answers without an end,
    None means that the process cannot be started.
    """

    lives: list[int | None] = []
    num_started = 0

    def __init__(
        self, name: str, module: str, start: StartLimitedProcess, pass_fds: list[int], env: None
    ) -> None:
        life = FakeProcess.lives[FakeProcess.num_started]
        FakeProcess.num_started += 1
        assert start.config.access.api_key == []
        if life is None:
            raise BlockingIOError("fork: resource temporarily unavailable")
        self.channel = socket.socket(fileno=os.dup(start.channel))
        threading.Thread(target=self.serve, args=[life], daemon=True).start()

    def serve(self, life: int) -> None:
        verdict = msgspec.json.encode(Reply()) + b"\n"
        with (
            contextlib.suppress(OSError),  # nobody took the last answer
            self.channel,
            self.channel.makefile("rwb", buffering=0) as file,
        ):
            if life != -1:
                file.write(verdict)
            for _ in range(life):
                if file.readline():
                    file.write(verdict)
            if life >= 0:
                file.readline()  # the grammar of which it dies
            while life == -2 and file.readline():
                pass
            if life == -3:
                file.readline()
            while life == -3:
                self.channel.send(bytes(65536))

    def terminate(self) -> None:
        with contextlib.suppress(OSError):  # it has ended by itself
            self.channel.shutdown(socket.SHUT_RDWR)

    def stop(self, timeout: float) -> None:
        pass

    def cpu_seconds(self) -> float:
        return 0.0


@pytest.fixture
def make(monkeypatch):
    """A checker whose processes live as long as the numbers say."""
    monkeypatch.setattr(limited_process, "Child", FakeProcess)
    monkeypatch.setattr(FakeProcess, "num_started", 0)

    made: list[GrammarChecker] = []

    def start(*lives: int | None) -> GrammarChecker:
        monkeypatch.setattr(FakeProcess, "lives", lives)
        config = msgspec.structs.replace(Config(), access=AccessConfig(api_key=["secret"]))
        made.append(GrammarChecker(config, FAKE_SPEC))
        return made[-1]

    yield start
    for checker in made:
        checker.close()


def test_a_checker_that_dies_between_grammars_refuses_none(make):
    checker = make(1, 9)
    checker.check(FORMS[0])
    checker.check(FORMS[1])
    assert FakeProcess.num_started == 2


def test_a_grammar_that_kills_every_checker_is_refused_and_remembered(make):
    checker = make(0, 0, 9)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="too complex"):
            checker.check(FORMS[0])
    checker.check(FORMS[1])
    assert FakeProcess.num_started == 3


def test_a_process_that_a_grammar_took_over_cannot_fill_the_memory(make):
    checker = make(-3, 9)
    checker.check(FORMS[0])
    assert FakeProcess.num_started == 2


@pytest.mark.parametrize("had_cpu", [True, False])
def test_only_a_check_that_had_the_cpu_gives_a_verdict_of_too_slow(make, monkeypatch, had_cpu):
    seconds = itertools.count(0, 5 if had_cpu else 0)
    monkeypatch.setattr(FakeProcess, "cpu_seconds", lambda self: next(seconds))
    monkeypatch.setattr(grammar_checker, "TIME_LIMIT", 0.2)
    checker = make(-2, 9)
    with pytest.raises(InvalidRequest if had_cpu else Overloaded, match="CPU|too complex"):
        checker.check(FORMS[0])
    monkeypatch.setattr(grammar_checker, "TIME_LIMIT", 60.0)
    with pytest.raises(InvalidRequest) if had_cpu else contextlib.nullcontext():
        checker.check(FORMS[0])


@pytest.mark.parametrize("life", [None, -1])
def test_a_process_that_cannot_start_is_tried_again_by_the_next_request(make, life):
    checker = make(life, 9)
    with pytest.raises(Overloaded):
        checker.check(FORMS[0])
    checker.check(FORMS[0])


class Vanishing(OrderedDict):
    """Verdicts that another thread drops after any look."""

    def __contains__(self, key: object) -> bool:
        return self.pop(key, self) is not self

    def get(self, key: object, default: object = None) -> object:
        return self.pop(key, default)


async def test_a_verdict_that_another_thread_drops_does_not_hold_up_the_loop(served, monkeypatch):
    grammars = served.async_llm.processor.grammars
    grammars._verdicts = Vanishing({("regex", "[a-z]"): None, ("regex", "("): "no"})
    monkeypatch.setattr(grammars, "_verdict", Mock(side_effect=AssertionError("it blocks")))
    body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "[a-z]"}}
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    body["structured_outputs"] = {"regex": "("}
    answer = await served.http.post("/v1/completions", json=body)
    assert answer.status_code == 400


def test_closing_does_not_wait_for_a_check(make, monkeypatch):
    monkeypatch.setattr(grammar_checker, "TIME_LIMIT", 60.0)
    checker = make(-2, 9)
    has_asked = threading.Event()
    receive = checker._process._receive

    def tell(channel: socket.socket) -> Reply:
        if checker._process._is_ready:
            has_asked.set()
        return receive(channel)

    checker._process._receive = tell
    errors: list[Exception] = []

    def check() -> None:
        try:
            checker.check(StructuredOutput("regex", "a"))
        except Overloaded as error:
            errors.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    assert has_asked.wait(WAIT_SECONDS)
    checker.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive() and len(errors) == 1
    assert FakeProcess.num_started == 1


def test_clients_take_turns_whoever_came_first():
    """Ten grammars of one client do not delay another one's by more than one of them."""
    turns, order = FairLock("grammars"), []

    def wait(client: str) -> None:
        with turns.take(client):
            order.append(client)
            time.sleep(0.01)

    with turns.take("greedy"):
        threads = [threading.Thread(target=wait, args=[name]) for name in [*10 * ["greedy"], "b"]]
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda number=number: len(turns._waiting) == number + 1)
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert order == ["b", *10 * ["greedy"]]


def test_a_client_that_has_used_its_share_waits_with_one_grammar(monkeypatch):
    monkeypatch.setattr(limited_process, "SHARE", 0.0)
    turns, done = FairLock("grammars"), threading.Event()

    def hold(client: str) -> None:
        with turns.take(client):
            done.wait(WAIT_SECONDS)

    threads = [threading.Thread(target=hold, args=[name]) for name in ("greedy", "greedy", "b")]
    for number, thread in enumerate(threads):
        thread.start()
        wait_until(lambda number=number: len(turns._waiting) == number)
    turns._seconds["greedy"] = 1.0  # by earlier ones
    with pytest.raises(Overloaded, match="your"), turns.take("greedy"):
        pass
    done.set()
    with turns.take("c"):
        pass
    for thread in threads:
        thread.join(WAIT_SECONDS)


def test_a_client_that_waits_too_long_is_refused_and_forgotten():
    turns = FairLock("grammars")
    with turns.take("a"):
        with pytest.raises(Overloaded, match="retry"), turns.take("b", timeout=0.01):
            pass
        assert not turns._waiting
    with turns.take("b", timeout=0.01):
        pass


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def chain(num_rules: int) -> StructuredOutput:
    """Rules within rules."""
    rules = [f"r{i}: r{i + 1}" for i in range(num_rules)]
    lark = "\n".join(["start: r0", *rules, f'r{num_rules}: "a"'])
    return StructuredOutput("grammar", lark)


def test_grammars_that_overflow_the_stack_are_refused():
    """A real process. A rule takes about 2 kB, so 3,500 of them would end an engine's thread."""
    checker = GrammarChecker(Config(), FAKE_SPEC)
    try:
        with pytest.raises(InvalidRequest, match="2 MB of stack"):
            checker.check(chain(3500))
        checker.check(chain(500))
    finally:
        checker.close()
    request = make_request("a", [1], structured_output=chain(1000))  # twice as deep
    news: queue.SimpleQueue[Compiled] = queue.SimpleQueue()
    engine = make_engine()
    engine.grammars.on_compiled = news.put
    engine.handle(request)
    engine.handle(news.get(timeout=WAIT_SECONDS))
    assert Log().run(engine).token_ids("a") == [ord("a")]


def test_the_memory_of_the_process_is_limited():
    code = "from servd.ipc.child import limit_memory\nlimit_memory({} << 20)\nbytearray(64 << 20)"
    for megabytes, fits in ((16, False), (128, True)):
        command = [sys.executable, "-c", code.format(megabytes)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode == 0) is fits and ("MemoryError" in done.stderr) is not fits
