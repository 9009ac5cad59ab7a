"""ResponseStore: responses that may be asked for again, in the memory of one API server."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import msgspec

from servd.api.event_log import EventLog
from servd.api.protocol.responses import Response
from servd.errors import RequestError

MAX_BYTES = 256 * 2**20


class Stored(msgspec.Struct):
    """A response and the conversation that it answers."""

    response: Response
    items: list[
        dict[str, Any]
    ]  # the conversation: input and output of earlier turns, and this one's input
    num_bytes: int  # about what it holds; items that turns share count for each
    log: EventLog | None = None  # of a response that is made in the background
    task: asyncio.Task[None] | None = None  # the same

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """Input and output of all turns."""
        return [*self.items, *msgspec.to_builtins(self.response.output)]


class ResponseStore:
    """Keeps the responses that were used last, within bounds of count and size.

    Args:
        max_responses: 0 stores nothing.
        max_bytes: over all responses, as JSON.
    """

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()  # least recently used first

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def put(self, stored: Stored) -> None:
        """Keep a response, or its new state, and forget the ones that were not used for longest."""
        self.pop(stored.response.id)
        if stored.num_bytes > self.max_bytes:
            return
        self._stored[stored.response.id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self.max_responses or self.num_bytes > self.max_bytes:
            forgotten = self.pop(next(iter(self._stored)))
            if forgotten and forgotten.task:
                forgotten.task.cancel()

    def get(
        self, response_id: str, missing: type[RequestError], param: str, code: str | None = None
    ) -> Stored:
        """The response, which counts as used.

        Raises:
            RequestError: it was never stored, or is forgotten; made of the other arguments.
        """
        if response_id not in self._stored:
            raise missing(
                f"there is no response {response_id[:200]!r} in the memory of this API server "
                f"process. It keeps the "
                f"last {self.max_responses} (--max-stored-responses), and of several "
                f"(--api-server-count) each its own",
                param=param,
                code=code,
            )
        self._stored.move_to_end(response_id)
        return self._stored[response_id]

    def pop(self, response_id: str) -> Stored | None:
        """Forget a response; returns it."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
        return stored
