"""Suspects: which of the open requests ends engines."""

from __future__ import annotations

from collections.abc import Mapping


class Suspects:
    """Requests that two engines in a row died with, and that got no token in between, are sent to
    the next one after all others and one at a time, newest first: the one that is tried when it
    dies is at fault.

    Where `num_tokens` is asked for: of each open request, in order of arrival.
    """

    def __init__(self) -> None:
        self._at_death: dict[str, int] = {}  # their tokens when the last engine died
        self._untried: list[str] = []
        self._tried: str | None = None  # sent, but without a token since

    @property
    def is_active(self) -> bool:
        """Whether any is tried, or is to be."""
        return bool(self._untried or self._tried)

    def engine_died(self, num_tokens: Mapping[str, int]) -> str | None:
        """An engine that had all of them is gone. Returns the one at fault, if that is known."""
        stuck = [each for each, count in num_tokens.items() if self._at_death.get(each) == count]
        guilty = self._tried if self._tried in stuck else None
        self._at_death = dict(num_tokens)
        self._untried = [request_id for request_id in stuck if request_id != guilty]
        self._tried = None
        return guilty

    def holds(self, request_id: str) -> bool:
        """Whether a request has to wait until those before it were tried."""
        return request_id in self._untried

    def next(self, num_tokens: Mapping[str, int]) -> str | None:
        """The one to be sent now; None while one is tried, and after the last."""
        if self._tried is not None and num_tokens.get(self._tried) == self._at_death[self._tried]:
            return None
        self._tried = None
        while self._untried and self._tried is None:
            request_id = self._untried.pop()
            self._tried = request_id if request_id in num_tokens else None
        return self._tried
