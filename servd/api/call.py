"""Call: what HTTP knows of a request: its client, its deadline and its response headers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.requests import HTTPConnection

from servd.api.keys import CALL
from servd.api.request.timeline import Timeline
from servd.base.errors import ServdError
from servd.base.tracing import Mark
from servd.config.keys import ANYONE, Key
from servd.messages.adapter import Adapter

if TYPE_CHECKING:
    from servd.api.observability.otel import RequestSpan  # an extra

MAX_IGNORED = 32  # names in the header


@dataclass(slots=True, eq=False)
class Call:
    """One HTTP request. The middleware creates it, and `call_of` returns it. Requests of the server
    itself have an empty one.
    """

    route: str = ""  # the path; "": no client sent it
    request_id: str = ""  # X-Request-Id, which the client may have chosen
    unique_id: str = ""  # unique even if the client chose `request_id`
    client: str = (
        ""  # takes turns with other clients: the key's owner or, without keys, the address
    )
    address: str = ""  # of the client; empty on a Unix socket
    span: RequestSpan | None = None
    since_ns: int = 0  # when the gateway received the request; 0 without gateway
    priority_class: int = 0  # see RequestOptions
    blocked: deque[Mark] = field(default_factory=deque)  # times when writes waited for the client
    refusal: ServdError | None = None  # why the connection may send no requests
    key: Key = ANYONE
    owner: str = ANYONE.name  # name of the key
    timeout: float | None = None  # from the header X-Request-Timeout, in seconds
    deadline: float | None = None  # on the clock of the event loop
    headers: dict[str, str] = field(default_factory=dict)  # of the response
    # The header X-Servd-Ignored, if fields of the body have no effect.
    ignored: Sequence[str] = ()  # names of fields and query parameters without effect
    model: str = ""  # the model's name in the response
    adapter: Adapter | None = None
    received_ns: int = 0  # 0 until the whole body has arrived
    parsed_ns: int = 0
    adapted_ns: int = 0  # when its adapter was loaded; 0 without one
    num_bytes: int = 0  # of the body
    timelines: list[Timeline] = field(default_factory=list)  # which end with this call
    is_logged: bool = False  # another process writes the access log

    def open_timeline(self, request_id: str) -> Timeline:
        """Return the timeline of a new request, which the middleware ends."""
        marks: list[Mark] = []
        if self.since_ns:
            marks = [Mark("received", self.since_ns), Mark("passed_on", self.received_ns)]
        elif self.received_ns:
            marks = [Mark("received", self.received_ns)]
        if self.parsed_ns:
            marks.append(Mark("parsed", self.parsed_ns))
        if self.adapted_ns:
            marks.append(Mark("adapted", self.adapted_ns))
        timeline = Timeline(
            request_id, self.owner, self.route[:200], self.model, marks, http_id=self.request_id
        )
        self.timelines.append(timeline)
        return timeline


def list_names(names: Sequence[str]) -> str:
    """Return the value of X-Servd-Ignored for these names."""
    return ", ".join(quote(name[:64], safe="") for name in names[:MAX_IGNORED])


def call_of(request: HTTPConnection) -> Call:
    return request.scope[CALL]
