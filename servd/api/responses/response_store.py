"""ResponseStore: the stored responses of one API key, in the memory of one API server."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from servd.api.keys import ApiKeys
from servd.api.protocol.responses import ResponsesRequest, ResponsesResponse
from servd.api.responses.event_log import EventLog
from servd.base.errors import InvalidRequest, Overloaded, RequestError

MAX_BYTES = 256 * 2**20  # for all keys together, unless MIN_BYTES per key is more
MIN_BYTES = 32 * 2**20  # per key


class Stored(msgspec.Struct):
    """A response and its conversation."""

    response: ResponsesResponse
    items: list[dict[str, Any]]  # input and output of earlier turns, and input of this turn
    num_bytes: int  # approximate; items shared by turns count for each
    log: EventLog | None = None  # of a background response
    task: asyncio.Task[None] | None = None  # of a background response

    @property
    def is_running(self) -> bool:
        return self.task is not None and not self.task.done()

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The input and output items of all turns."""
        output = msgspec.to_builtins(self.response.output, enc_hook=msgspec.json.decode)  # of Raw
        return [*self.items, *output]


@dataclass(eq=False)
class ResponseStore:
    """A store of all running and the most recently used finished responses, within limits.

    Every API key has its own store and cannot see other stores.
    """

    max_responses: int  # 0 stores nothing
    max_bytes: int = MAX_BYTES  # of all responses, as JSON

    def __post_init__(self) -> None:
        self.num_bytes = 0
        self._stored: OrderedDict[str, Stored] = OrderedDict()  # least recently used first

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    @property
    def running(self) -> list[Stored]:
        return [stored for stored in self._stored.values() if stored.is_running]

    def check_room(self) -> None:
        """Raise Overloaded if `max_responses` are running already."""
        num_running = len(self.running)
        if num_running >= self.max_responses:
            raise Overloaded(
                f"{num_running} background responses of this API key are running, the most "
                "(--max-stored-responses): retry when one has finished"
            )

    def put(self, stored: Stored) -> None:
        """Store a response or its new state, and evict finished responses beyond the limits."""
        self.pop(stored.response.id)
        if stored.num_bytes > self.max_bytes and not stored.is_running:
            return
        self._stored[stored.response.id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self.max_responses or self.num_bytes > self.max_bytes:
            finished = (name for name, s in self._stored.items() if not s.is_running)
            if (oldest := next(finished, None)) is None:
                return
            self.pop(oldest)

    def get(
        self, response_id: str, missing: type[RequestError], param: str, code: str | None = None
    ) -> Stored:
        """Return a response by its id or X-Request-Id, and mark the response as most recently used.
        Raises `missing`, with `param` and `code`: the response was never stored or was evicted.
        """
        name = response_id if response_id in self._stored else self._name_of(response_id)
        if name is None:
            raise missing(
                f"there is no response {response_id[:200]!r} of this API key. Each API process "
                f"(--api-server-count) keeps the last {self.max_responses} responses of a key "
                "(--max-stored-responses)",
                param=param,
                code=code,
            )
        self._stored.move_to_end(name)
        return self._stored[name]

    def previous_of(self, body: ResponsesRequest) -> Stored | None:
        """Return the response that a request continues, or None. Raise InvalidRequest if it is not
        stored or has no output.
        """
        param = "previous_response_id"
        if body.previous_response_id is None:
            return None
        stored = self.get(
            body.previous_response_id, InvalidRequest, param, "previous_response_not_found"
        )
        if stored.response.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"the previous response is {stored.response.status}: it has no output", param=param
            )
        return stored

    def _name_of(self, request_id: str) -> str | None:
        """Return the id of the newest response to the request with this X-Request-Id, or None."""
        for name in reversed(self._stored):
            unique_id = name.removeprefix("resp_")
            if request_id in (unique_id, unique_id.rpartition("-")[0] or unique_id):
                return name
        return None

    def pop(self, response_id: str) -> Stored | None:
        """Remove and return a response; return None if the response is not stored."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
        return stored


class ResponseStores(dict[str, ResponseStore]):
    def __init__(self, max_responses: int, keys: ApiKeys) -> None:
        super().__init__()
        self.max_responses = max_responses
        self.api_keys = keys

    def __missing__(self, owner: str) -> ResponseStore:
        max_bytes = max(MAX_BYTES // max(len(self.api_keys.current), 1), MIN_BYTES)
        self[owner] = ResponseStore(self.max_responses, max_bytes)
        return self[owner]

    def drop_revoked(self) -> None:
        """Drop the stores of revoked keys in which no response is running."""
        names = {key.name for key in self.api_keys.current}
        for owner in [owner for owner, store in self.items() if not store.running]:
            if owner not in names and self.api_keys.are_needed:
                del self[owner]
