"""ModelServers: a server for each model of a folder, started when it is asked for, and how many of
them hold weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from servd import hf, log
from servd.api.start import StartModel
from servd.child import Child
from servd.config import Config
from servd.errors import ConfigError, Unavailable, UnknownModel

logger = logging.getLogger("servd.api")

GIB = 2**30
MODULE = "servd.model_tree"
WEIGHT_SUFFIXES = (".safetensors", ".gguf")
LOOK_INTERVAL = 0.02  # seconds between two looks at a server that starts
STOP_TIMEOUT = 5.0  # seconds from SIGTERM to SIGKILL, beyond --shutdown-timeout
RETRY_AFTER = 10  # seconds in which a model that could not be started is not tried again
ASK_TIMEOUT = 2.0  # seconds for an answer about the server itself
NO_TIMEOUT = httpx.Timeout(None, connect=10)  # the server of the model has its own


class ModelServer:
    """One model, and its server if that runs.

    Attributes:
        is_awake: whether it may hold weights.
        has_started: whether it has been ready since it was started.
        is_leaving: whether it is to sleep as soon as its requests have ended.
        num_open: requests that it has.
        num_unanswered: those of which it has not said anything yet.
    """

    def __init__(self, name: str, folder: Path, max_model_len: int) -> None:
        self.name = name
        self.folder = folder
        self.max_model_len = max_model_len
        self.created = int((folder / "config.json").stat().st_mtime)
        self.num_bytes = sum(
            file.stat().st_size for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES
        )
        self.child: Child | None = None
        self.http: httpx.AsyncClient | None = None
        self.is_awake = self.has_started = self.is_leaving = False
        self.num_open = self.num_unanswered = 0
        self.has_answered = asyncio.Event()  # a request
        self.used_at = self.failed_at = float("-inf")

    @property
    def runs(self) -> bool:
        """Whether its processes are there."""
        return self.child is not None and self.child.exit_code is None

    @property
    def may_serve(self) -> bool:
        """Whether a request may go to it as it is."""
        return self.runs and self.is_awake and self.has_started and not self.is_leaving

    @property
    def state(self) -> str:
        """For people: what the next request finds."""
        if not self.runs:
            return "stopped"
        return "awake" if self.is_awake else "asleep"


class Visit:
    """A request on its way to a server and back."""

    def __init__(self, server: ModelServer) -> None:
        assert server.http is not None
        self.server, self.http = server, server.http
        self.is_answered = False
        server.num_open += 1
        server.num_unanswered += 1
        server.used_at = time.monotonic()

    def answered(self) -> None:
        """The answer has begun: all of the request is in the server's hands."""
        if not self.is_answered:
            self.is_answered = True
            self.server.num_unanswered -= 1
            self.server.has_answered.set()


class ModelServers:
    """All models of a folder.

    Args:
        config: the options, which hold for each of them.
        folder: a private one, for their sockets.
    """

    def __init__(self, config: Config, folder: str) -> None:
        assert config.models.models_dir is not None
        self.config = config
        self.folder = Path(folder)
        self.models_dir = Path(config.models.models_dir)
        self.most = config.models.models_max
        budget = config.models.models_memory
        self.budget = float("inf") if budget is None else budget * GIB
        self.secret = secrets.token_urlsafe(32)  # with which the front asks, where keys are needed
        self.servers: dict[str, ModelServer] = {}
        self._numbers = 0
        self._switch = asyncio.Lock()  # first come, first served
        self._stopping: set[asyncio.Task[None]] = set()  # they still have memory
        self.scan()

    def scan(self) -> None:
        """Take in the models that the folder has now."""
        for folder in sorted(self.models_dir.iterdir()):
            if folder.name in self.servers:
                continue
            try:
                folder.name.encode()
                if not (folder / "config.json").is_file():
                    continue
                length = hf.read_spec(folder).max_position_embeddings
                self.servers[folder.name] = ModelServer(folder.name, folder, length)
            except (ConfigError, OSError, UnicodeEncodeError) as error:
                logger.warning("%r is not served: %s", folder.name, error)

    def find(self, name: str | None) -> ModelServer:
        """The model of this name; without one, that which was used last.

        Raises:
            UnknownModel: the folder has it not.
        """
        if name is None and self.servers:
            return max(self.servers.values(), key=lambda server: server.used_at)
        if name not in self.servers:
            self.scan()
        if name is None or name not in self.servers:
            raise UnknownModel(
                f"the model {(name or '')[:200]!r} is not served here: {self.models_dir.name} has "
                f"{', '.join(self.servers) or 'none'}",
                param="model",
            )
        return self.servers[name]

    @contextlib.asynccontextmanager
    async def serving(self, server: ModelServer) -> AsyncIterator[Visit]:
        """The model's server stays awake until the visit is answered. Others are put to sleep for
        it once their requests have ended; their later ones wait for their own turn.

        Raises:
            Unavailable: it cannot be started.
        """
        while not server.may_serve:
            async with self._switch:
                if not server.may_serve:
                    await self._make_room(server)
                    await self._wake_up(server)
        visit = Visit(server)
        try:
            yield visit
        finally:
            visit.answered()
            server.num_open -= 1

    async def sleep(self, server: ModelServer) -> None:
        """Put it to sleep once its requests have ended, if it is awake."""
        async with self._switch:
            if server.runs and server.is_awake:
                await self._put_to_sleep(server)

    async def find_sleepers(self) -> None:
        """See which of them sleep by themselves: --sleep-idle-seconds."""
        for server in list(self.servers.values()):
            used_at = server.used_at
            if not server.may_serve or server.num_open:
                continue
            answer = await self.ask(server, "/is_sleeping")
            is_idle = not server.num_open and server.used_at == used_at
            if answer is not None and answer.json()["is_sleeping"] and is_idle:
                server.is_awake = False

    async def ask(self, server: ModelServer, path: str) -> httpx.Response | None:
        """What its server says of itself; None while it cannot, as it starts or ends."""
        assert server.http is not None
        headers = {"authorization": f"Bearer {self.secret}"}
        try:
            answer = await server.http.get(path, headers=headers, timeout=ASK_TIMEOUT)
        except httpx.HTTPError:
            return None
        return answer if answer.status_code == 200 else None

    async def _make_room(self, server: ModelServer) -> None:
        """Have others sleep, and those that have slept for longest stop, up to the limits."""
        if self._stopping:
            await asyncio.wait(self._stopping)
        while True:
            awake = [s for s in self.servers.values() if s.runs and s.is_awake and s is not server]
            num_bytes = sum(other.num_bytes for other in awake) + server.num_bytes
            if not awake or (len(awake) < self.most and num_bytes <= self.budget):
                break
            await self._put_to_sleep(min(awake, key=lambda s: (s.num_open > 0, s.used_at)))
        asleep = [s for s in self.servers.values() if s.runs and not s.is_awake and s is not server]
        for other in sorted(asleep, key=lambda s: s.used_at)[: -self.most]:
            await self._stop(other)

    async def _put_to_sleep(self, server: ModelServer) -> None:
        """Have it free its weights. It does so when its engine has finished what it has; who reads
        the answers slowly holds up nobody.
        """
        server.is_leaving = True
        try:
            is_asleep = False
            while server.runs and not is_asleep:
                while server.num_unanswered:
                    server.has_answered.clear()
                    await server.has_answered.wait()
                with contextlib.suppress(httpx.HTTPError):
                    answer = await self._post(server, "/sleep")
                    is_asleep = answer.status_code == 200 and answer.json()["is_sleeping"]
                if not is_asleep:  # a long answer, or its engine starts again
                    await asyncio.sleep(LOOK_INTERVAL)
            server.is_awake = False
            logger.info("%s sleeps", server.name)
        finally:
            server.is_leaving = False

    async def _wake_up(self, server: ModelServer) -> None:
        """Start its server, or have it load its weights again. If nobody waits for that any more,
        it goes on for the next one.

        Raises:
            Unavailable: it ended before it was ready, now or a short while ago.
        """
        if not server.runs:
            if time.monotonic() - server.failed_at < RETRY_AFTER:
                raise _not_started(server)
            logger.info("starting %s", server.name)
            server.has_started = False
            await self._launch(server)
        server.is_awake = True
        if server.has_started:
            with contextlib.suppress(httpx.HTTPError):
                await self._post(server, "/wake_up")
            return
        began = time.monotonic()
        while not await self._is_ready(server):
            if not server.runs:
                server.failed_at = time.monotonic()
                raise _not_started(server)
            await asyncio.sleep(LOOK_INTERVAL)
        server.has_started = True
        logger.info("%s is ready after %.2f s", server.name, time.monotonic() - began)

    async def _launch(self, server: ModelServer) -> None:
        """Start its processes, and open a channel to them."""
        if server.http is not None:
            await server.http.aclose()
        self._numbers += 1
        path = str(self.folder / f"model-{self._numbers}")
        transport = httpx.AsyncHTTPTransport(uds=path, limits=httpx.Limits(max_connections=None))
        server.http = httpx.AsyncClient(
            base_url="http://model", transport=transport, timeout=NO_TIMEOUT
        )
        start = StartModel(self._config_of(server, path))
        server.child = Child(server.name, MODULE, start, env={log.MODEL: server.name})

    async def _is_ready(self, server: ModelServer) -> bool:
        assert server.http is not None
        try:
            return (await server.http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def _post(self, server: ModelServer, path: str) -> httpx.Response:
        assert server.http is not None
        return await server.http.post(path, headers={"authorization": f"Bearer {self.secret}"})

    async def _stop(self, server: ModelServer) -> None:
        server.is_awake = False
        child, server.child = server.child, None
        if child is not None:
            timeout = self.config.server.shutdown_timeout + STOP_TIMEOUT
            stopping = asyncio.ensure_future(asyncio.to_thread(child.stop, timeout))
            self._stopping.add(stopping)
            stopping.add_done_callback(self._stopping.discard)
            await asyncio.shield(stopping)  # whoever wanted that may leave

    async def close(self) -> None:
        """Stop all servers."""
        await asyncio.gather(*(self._stop(server) for server in self.servers.values()))

    def reload(self, config: Config) -> None:
        """Have all servers take over the options that may change at run time."""
        self.config = config
        for server in self.servers.values():
            if server.runs and server.child is not None:
                server.child.post(self._config_of(server, ""))

    def _config_of(self, server: ModelServer, path: str) -> Config:
        """The options of its server: the front has the port, TLS and what browsers may do."""
        config, access = self.config, self.config.access
        return config.replace(
            model=str(server.folder),
            served_model_name=[server.name],
            uds=path,
            models_dir=None,
            api_key=[*access.api_key, self.secret] if access.needs_keys else [],
            ssl_certfile=None,
            ssl_keyfile=None,
            ssl_ca_certs=None,
            ssl_cert_reqs=0,
            allowed_origins=[],
        )


def _not_started(server: ModelServer) -> Unavailable:
    message = f"the model {server.name} could not be started: the log says why"
    return Unavailable(message, retry_after=RETRY_AFTER)
