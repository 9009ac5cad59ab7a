"""Recovery: resends open requests to a restarted engine, except a request that crashes engines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from servd.api.request.request_state import RequestState
from servd.base.tracing import Mark, now_ns
from servd.core.client import AsyncMPClient


@dataclass(eq=False)
class Recovery:
    """A queue of open requests to resend, with their tokens so far, to a restarted engine.

    A request is a suspect if it was being computed at a crash. Suspects are sent after all other
    requests, newest first, and each when the one before has got a token. So the next crash
    identifies the cause, which is not sent a third time.

    With several engines, requests that cannot have caused the crash need not wait for the restart:
    see `movable`.
    """

    client: AsyncMPClient  # the channel to the engine
    running: Mapping[str, RequestState]  # the engine's requests by id, in order of arrival

    def __post_init__(self) -> None:
        self.is_restarting = False
        self._at_death: dict[str, int] = {}  # output tokens of the suspects at the last crash
        self._computing: set[str] = set()  # requests whose prompts were computed at the last crash
        self._unsent: list[str] = []  # suspects

    @property
    def is_trying(self) -> bool:
        """Whether suspects wait to be sent."""
        return bool(self._unsent)

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
        stuck = [name for name in self._computing if self._at_death.get(name) == num_tokens[name]]
        guilty = stuck[0] if len(stuck) == 1 else None
        suspects = {*self._unsent, *self._computing} - {guilty}
        self._at_death = {
            name: count for name, count in num_tokens.items() if count or name in suspects
        }
        self._unsent = [name for name in self._at_death if name != guilty]
        return None if guilty is None else open_requests[guilty]

    def engine_ready(self) -> None:
        """Resend the open requests if the engine was restarted."""
        if not self.is_restarting:
            return
        self.is_restarting = False
        self.send(
            state for name, state in self._open_requests().items() if name not in self._unsent
        )
        self.try_next()

    def try_next(self) -> None:
        """Send the next suspect, unless another has got no token since it was sent again."""
        open_requests = self._open_requests()
        while self._unsent and not self.is_restarting:
            sent = self._at_death.keys() & open_requests.keys() - {*self._unsent}
            if any(_num_tokens(open_requests[name]) == self._at_death[name] for name in sent):
                return
            request_id = self._unsent.pop()
            if request_id in open_requests:
                self.send([open_requests[request_id]])

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
            state.timeline.marks.append(Mark("sent", state.sent_ns))
            outputs = state.open_token_ids()
            self.client.send(msgspec.structs.replace(state.request, output_token_ids=outputs))

    def _open_requests(self) -> dict[str, RequestState]:
        return {name: state for name, state in self.running.items() if state.is_open}


def _num_tokens(state: RequestState) -> int:
    return sum(len(choice.token_ids) for choice in state.choices if choice.is_open)
