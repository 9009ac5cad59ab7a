"""GrammarChecker, over fake processes that die at awkward moments."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import OrderedDict

import msgspec
import pytest

from servd.api import grammar_checker
from servd.api.grammar_checker import GrammarChecker
from servd.config import Config
from servd.errors import InvalidRequest, Overloaded
from servd.hf import FAKE_SPEC
from servd.messages import GrammarVerdict, StartGrammarChecker
from servd.params import StructuredOutput

FORMS = [StructuredOutput("regex", letter) for letter in "abc"]


class FakeProcess:
    """Answers that it is ready, then as many grammars as `lives` says for this process, and ends.

    A life of -1 ends before it is ready, one of -2 never answers, None means that the process
    cannot be started.
    """

    lives: list[int | None] = []
    num_started = 0

    def __init__(
        self, name: str, module: str, start: StartGrammarChecker, pass_fds: list[int]
    ) -> None:
        life = FakeProcess.lives[FakeProcess.num_started]
        FakeProcess.num_started += 1
        if life is None:
            raise BlockingIOError("fork: resource temporarily unavailable")
        self.channel = socket.socket(fileno=os.dup(start.channel))
        threading.Thread(target=self.serve, args=[life], daemon=True).start()

    def serve(self, life: int) -> None:
        verdict = msgspec.json.encode(GrammarVerdict()) + b"\n"
        with self.channel, self.channel.makefile("rwb", buffering=0) as file:
            if life != -1:
                file.write(verdict)
            for _ in range(life):
                if file.readline():
                    file.write(verdict)
            if life >= 0:
                file.readline()  # the grammar of which it dies
            while life == -2 and file.readline():
                pass

    def terminate(self) -> None:
        with contextlib.suppress(OSError):  # it has ended by itself
            self.channel.shutdown(socket.SHUT_RDWR)

    def stop(self, timeout: float) -> None:
        pass


@pytest.fixture
def make(monkeypatch):
    """A checker whose processes live as long as the numbers say."""
    monkeypatch.setattr(grammar_checker, "Child", FakeProcess)
    monkeypatch.setattr(FakeProcess, "num_started", 0)

    made: list[GrammarChecker] = []

    def start(*lives: int | None) -> GrammarChecker:
        monkeypatch.setattr(FakeProcess, "lives", lives)
        made.append(GrammarChecker(Config(), FAKE_SPEC))
        return made[-1]

    yield start
    for checker in made:
        checker.close()


def test_a_process_that_died_between_two_grammars_refuses_none(make):
    checker = make(1, 9)
    checker.check(FORMS[0])
    checker.check(FORMS[1])
    assert FakeProcess.num_started == 2


def test_a_grammar_of_which_every_process_dies_is_refused_and_remembered(make):
    checker = make(0, 0, 9)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="too complex"):
            checker.check(FORMS[0])
    checker.check(FORMS[1])
    assert FakeProcess.num_started == 3


@pytest.mark.parametrize("life", [None, -1])
def test_a_process_that_cannot_start_is_tried_again_by_the_next_request(make, life):
    checker = make(life, 9)
    with pytest.raises(Overloaded):
        checker.check(FORMS[0])
    checker.check(FORMS[0])


def test_it_cannot_start_at_first_or_after_a_death(make):
    checker = make(None, 0, None, 9)
    checker.start()
    with pytest.raises(Overloaded):
        checker.check(FORMS[0])
    checker.check(FORMS[0])


def test_a_verdict_that_another_thread_drops_is_asked_for_again(make):
    class Vanishing(OrderedDict):
        def __contains__(self, key: object) -> bool:
            return self.pop(key, 0) != 0 or super().__contains__(key)

    checker = make(9)
    checker.check(FORMS[0])
    checker._verdicts = Vanishing(checker._verdicts)
    checker.check(FORMS[0])


def test_closing_does_not_wait_for_a_check_and_nothing_starts_afterwards(make, monkeypatch):
    monkeypatch.setattr(grammar_checker, "TIME_LIMIT", 60.0)
    checker = make(-2, 9)
    asked = threading.Event()
    receive = checker._receive

    def tell(channel: socket.socket) -> GrammarVerdict:
        if checker._is_ready:
            asked.set()
        return receive(channel)

    checker._receive = tell
    errors: list[Exception] = []

    def check() -> None:
        try:
            checker.check(StructuredOutput("regex", "a"))
        except Overloaded as error:
            errors.append(error)

    thread = threading.Thread(target=check)
    thread.start()
    assert asked.wait(30)
    checker.close()
    thread.join(30)
    assert not thread.is_alive() and len(errors) == 1
    assert FakeProcess.num_started == 1
