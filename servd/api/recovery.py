"""Recovery: resends open requests when an engine is restarted, but not the one that crashes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from servd.api.output_processor import OutputProcessor
from servd.api.running import Running
from servd.core.client import EngineCoreClient
from servd.tracing import Mark, now_ns


@dataclass(eq=False)
class Recovery:
    """Sends open requests, with their tokens so far, to the engine that replaces a dead one.

    Requests whose prompts were being computed at a crash, and that have got no token since the
    crash before it, are suspects: they are sent after all others, newest first and one at a time,
    so that at the next crash the one being tried is at fault.

    With several engines, requests that cannot have caused the crash need not wait for the restart:
    see `movable`.

    Attributes:
        is_restarting: the engine has died, and the next one is not ready.
        is_trying: a suspect runs, or is still to be sent.
    """

    client: EngineCoreClient  # the channel to the engine
    outputs: OutputProcessor  # has the tokens so far
    running: Mapping[str, Running]  # open requests by id, in order of arrival

    def __post_init__(self) -> None:
        self.is_restarting = False
        self.is_trying = False
        self._at_death: dict[str, int] = {}  # output tokens of open requests at the last crash
        self._computing: set[str] = set()  # requests whose prompts were computed at the last crash
        self._untried: list[str] = []
        self._tried: str | None = None  # suspect that was sent, and has got no token since

    def engine_died(self, incarnation: int, computing: Iterable[str]) -> str | None:
        """Attach to the next engine. Returns the request at fault, if that is known.

        Args:
            incarnation: of the next engine.
            computing: engine ids of the prompts that were being computed at the crash.
        """
        had_all, self.is_restarting = not self.is_restarting, True
        self.client.follow(incarnation)
        if not had_all:  # it died before the requests were resent
            return None
        num_tokens, engine_ids = self.num_tokens(), {*computing}
        self._computing = {
            each
            for each in num_tokens
            if not engine_ids.isdisjoint(self.running[each].prepared.request.choice_ids)
        }
        stuck = [
            each
            for each, count in num_tokens.items()
            if each in self._computing and self._at_death.get(each) == count
        ]
        guilty = self._tried if self._tried in stuck else None
        self._at_death = num_tokens
        self._untried = [request_id for request_id in stuck if request_id != guilty]
        self._tried = None
        self.is_trying = bool(self._untried)
        return guilty

    def engine_ready(self) -> None:
        """Resend the open requests, if the engine replaces a dead one."""
        if not self.is_restarting:
            return
        self.is_restarting = False
        self.send(request_id for request_id in self.num_tokens() if request_id not in self._untried)
        self.try_next()

    def try_next(self) -> None:
        if not self.is_trying or self.is_restarting:
            return
        num_tokens = self.num_tokens()
        if self._tried is not None and num_tokens.get(self._tried) == self._at_death[self._tried]:
            return
        self._tried = None
        while self._untried and self._tried is None:
            request_id = self._untried.pop()
            self._tried = request_id if request_id in num_tokens else None
        self.is_trying = self._tried is not None
        self.send([self._tried] if self._tried is not None else [])

    def num_tokens(self) -> dict[str, int]:
        return {
            request_id: sum(map(len, outputs.values()))
            for request_id in self.running
            if (outputs := self.outputs.outputs(request_id))
        }

    def movable(self) -> list[str]:
        """Requests that may move to another engine while this one restarts: those that did not ask
        for this engine, and that cannot have crashed it.
        """
        if not self.is_restarting:
            return []
        return [
            request_id
            for request_id, running in self.running.items()
            if request_id not in self._computing
            and running.prepared.request.options.rank is None
            and self.outputs.is_open(request_id)
        ]

    def send(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            running, outputs = self.running[request_id], self.outputs.outputs(request_id)
            running.sent_ns = now_ns()
            running.timeline.marks.append(Mark("sent", running.sent_ns))
            request = running.prepared.request
            self.client.send(msgspec.structs.replace(request, output_token_ids=outputs))
