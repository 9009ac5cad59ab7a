"""ModelServer: the gateway's view of a model's server."""

import asyncio
import math
import time

import httpx

from servd.base.errors import Unavailable
from servd.gateway.forward import connect
from servd.gateway.models import GatewayModel
from servd.ipc.child import Child

SLEEP_TIMEOUT = 90.0  # seconds for /sleep and /wake_up, which wait for the engine for up to 60
ASK_TIMEOUT = 2.0  # seconds for queries about the server itself


class ModelServer:
    """A model, and its server if it runs.

    `is_awake`: the server should hold weights; see `has_weights`. `loading_since`: when the server
    began to start or wake up; None once it can serve. `is_leaving`: the server will sleep when its
    requests have ended. `num_unanswered` counts requests whose response has not begun.
    """

    def __init__(self, model: GatewayModel, secret: str) -> None:
        self.model = model
        self.name = model.name
        self.headers = {"authorization": f"Bearer {secret}"}  # of the gateway's own requests
        self.child: Child | None = None
        self.http: httpx.AsyncClient | None = None
        self.is_awake = self.has_started = self.is_leaving = False
        self.loading_since: float | None = None
        self.num_open = self.num_unanswered = 0
        self.has_answered = asyncio.Event()  # a request
        self.used_at = self.retry_at = float("-inf")
        self.failure = ""  # why it could not be started
        self.rest_timer: asyncio.TimerHandle | None = None  # puts it to sleep when it has been idle

    @property
    def runs(self) -> bool:
        return self.child is not None and self.child.exit_code is None

    @property
    def has_weights(self) -> bool:
        return self.runs and self.is_awake

    @property
    def may_serve(self) -> bool:
        return self.state == "awake" and not self.is_leaving

    @property
    def state(self) -> str:
        if not self.runs:
            return "stopped"
        if not self.is_awake:
            return "asleep"
        return "awake" if self.loading_since is None else "loading"

    async def connect(self, path: str) -> None:
        if self.http is not None:
            await self.http.aclose()
        self.http = connect(path)

    async def ask(
        self, path: str, method: str = "GET", timeout: float = ASK_TIMEOUT
    ) -> httpx.Response | None:
        """Send a request and return the server's response; None unless its status is 200."""
        assert self.http is not None
        try:
            answer = await self.http.request(method, path, headers=self.headers, timeout=timeout)
        except httpx.HTTPError:
            return None
        return answer if answer.status_code == 200 else None

    async def is_asleep(self, path: str) -> bool | None:
        """POST to /sleep or /wake_up, and return whether the server is asleep; None on failure."""
        answer = await self.ask(path, "POST", SLEEP_TIMEOUT)
        return None if answer is None else answer.json()["is_sleeping"]

    def fail(self, why: str, seconds: float) -> None:
        """Record the reason of a failed start, and prevent another start for `seconds`."""
        self.failure = why
        self.retry_at = time.monotonic() + seconds

    def check(self) -> None:
        """Raise Unavailable if the server failed to start recently."""
        if (seconds := self.retry_at - time.monotonic()) > 0:
            message = f"the model {self.name} {self.failure}"
            raise Unavailable(message, retry_after=math.ceil(seconds))


class Visit:
    def __init__(self, server: ModelServer) -> None:
        assert server.http is not None
        self.server = server
        self.http = server.http
        self.is_answered = False
        server.num_open += 1
        server.num_unanswered += 1

    def answered(self) -> None:
        """Record that the response has begun, so the server has the whole request."""
        if not self.is_answered:
            self.is_answered = True
            self.server.num_unanswered -= 1
            self.server.has_answered.set()
