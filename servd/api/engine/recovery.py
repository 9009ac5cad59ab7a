"""Recovery: resends open requests to a restarted engine, except a request that crashes engines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from servd.api.request.request_state import RequestState
from servd.base.tracing import Mark, now_ns
from servd.core.client import EngineCoreClient


@dataclass(eq=False)
class Recovery:
    """A queue of open requests to resend, with their tokens so far, to a restarted engine.

    A request is a suspect if its prompt was being computed at a crash, and it has got no token
    since the previous crash. Suspects are sent after all other requests, newest first and one at a
    time, so that the next crash identifies the cause. `is_trying`: a suspect is running or waits to
    be sent.

    With several engines, requests that cannot have caused the crash need not wait for the restart:
    see `movable`.
    """

    client: EngineCoreClient  # the channel to the engine
    running: Mapping[str, RequestState]  # the engine's requests by id, in order of arrival

    def __post_init__(self) -> None:
        self.is_restarting = False
        self.is_trying = False
        self._at_death: dict[str, int] = {}  # output tokens of open requests at the last crash
        self._computing: set[str] = set()  # requests whose prompts were computed at the last crash
        self._untried: list[str] = []
        self._tried: str | None = None  # suspect that was sent, and has got no token since

    def engine_died(self, generation: int, computing: Iterable[str]) -> RequestState | None:
        """Connect to the next engine. Return the request that caused the crash, if `computing`, the
        engine ids whose prompts were being computed, identifies it.
        """
        had_all = not self.is_restarting
        self.is_restarting = True
        self.client.follow(generation)
        if not had_all:  # the engine died before the requests were resent
            return None
        engine_ids = {*computing}
        open_requests = self._open_requests()
        self._computing = {
            request_id
            for request_id, state in open_requests.items()
            if not engine_ids.isdisjoint(state.request.choice_ids)
        }
        num_tokens = {name: _num_tokens(state) for name, state in open_requests.items()}
        stuck = [
            request_id
            for request_id, count in num_tokens.items()
            if request_id in self._computing and self._at_death.get(request_id) == count
        ]
        guilty = self._tried if self._tried in stuck else None
        self._at_death = num_tokens
        self._untried = [request_id for request_id in stuck if request_id != guilty]
        self._tried = None
        self.is_trying = bool(self._untried)
        return None if guilty is None else open_requests[guilty]

    def engine_ready(self) -> None:
        """Resend the open requests if the engine was restarted."""
        if not self.is_restarting:
            return
        self.is_restarting = False
        self.send(
            state for name, state in self._open_requests().items() if name not in self._untried
        )
        self.try_next()

    def try_next(self) -> None:
        if not self.is_trying or self.is_restarting:
            return
        open_requests = self._open_requests()
        tried = open_requests.get(self._tried or "")
        if tried is not None and _num_tokens(tried) == self._at_death[tried.request_id]:
            return
        self._tried = None
        while self._untried and self._tried is None:
            request_id = self._untried.pop()
            if request_id in open_requests:
                self._tried = request_id
                self.send([open_requests[request_id]])
        self.is_trying = self._tried is not None

    def movable(self) -> list[RequestState]:
        """Return the requests that may move to another engine during a restart: those that did not
        select this engine and cannot have crashed it.
        """
        if not self.is_restarting:
            return []
        return [
            state
            for request_id, state in self._open_requests().items()
            if request_id not in self._computing and state.request.options.rank is None
        ]

    def send(self, states: Iterable[RequestState]) -> None:
        for state in states:
            state.sent_ns = now_ns()
            state.recorded.marks.append(Mark("sent", state.sent_ns))
            outputs = state.open_token_ids()
            self.client.send(msgspec.structs.replace(state.request, output_token_ids=outputs))

    def _open_requests(self) -> dict[str, RequestState]:
        return {name: state for name, state in self.running.items() if state.is_open}


def _num_tokens(state: RequestState) -> int:
    return sum(len(choice.token_ids) for choice in state.choices if choice.is_open)
