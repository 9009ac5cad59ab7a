"""ModelServers: starts a server for each requested model of a folder. It puts servers to sleep or
stops them to stay within the limits of loaded models.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from servd.api.protocol.models import ModelCard, ModelList
from servd.base import log
from servd.base.errors import ConfigError, Unavailable, UnknownModel
from servd.checkpoint import generation_config
from servd.checkpoint.lora import parse_module
from servd.checkpoint.short_names import full_name
from servd.config import Config
from servd.gateway.backend import ModelServer, Visit
from servd.gateway.models import GatewayModel, ModelFolder, adapters_in
from servd.ipc.child import Child
from servd.ipc.start_messages import StartModel

logger = logging.getLogger("servd.api")

GIB = 2**30
MODULE = "servd.launch.model_server"
LOOK_INTERVAL = 0.02  # seconds between polls of a server that starts
STOP_TIMEOUT = 5.0  # seconds from SIGTERM to SIGKILL, beyond --shutdown-timeout
RETRY_AFTER = 10.0  # seconds before a model that failed to start is tried again
LOAD_INTERVAL = 1.0  # seconds between polls of a model's background work
MOST_NAMED = 32  # models listed in an error message


class ModelServers:
    """The servers of all models in a folder. Their sockets are in another, private `folder`."""

    def __init__(self, config: Config, folder: str) -> None:
        assert config.models.models_dir is not None
        self.config = config
        self.folder = Path(folder)
        self.models = ModelFolder(Path(config.models.models_dir))
        self.max_awake = config.models.models_max
        self.max_asleep = config.models.models_asleep
        budget = config.models.models_memory
        self.budget = float("inf") if budget is None else budget * GIB
        self.secret = secrets.token_urlsafe(32)  # the gateway's API key, if keys are required
        self.servers: dict[str, ModelServer] = {}
        self._numbers = 0
        self._is_closed = False
        self._switch = asyncio.Lock()  # first come, first served
        self._stopping: set[asyncio.Task[None]] = set()  # servers that still hold memory
        self._resting: set[asyncio.Task[None]] = set()
        self._scanning = asyncio.Lock()
        self._num_scans = 0  # begun
        self._last_scan = 0  # number of the last one that has ended
        self._take_in(self.models.read())
        names = [*self.servers]
        for adapter in adapters_in(config.lora).values():
            if adapter.owner(names) is None:
                logger.warning(
                    "not serving adapter %s: it was trained for %s, which is not served here; "
                    "set base_model_name in the JSON of --lora-modules",
                    adapter.name,
                    adapter.base or "a model that its files do not name",
                )

    async def scan(self) -> None:
        """Update the models from the folder. The server of a removed model gets no requests. It is
        stopped to make room, or when another model takes its name. Calls that wait share one scan.
        """
        num_begun = self._num_scans
        async with self._scanning:
            if self._last_scan > num_begun:  # one that began after this call has ended
                return
            self._num_scans += 1
            self._take_in(await asyncio.to_thread(self.models.read))
            self._last_scan = self._num_scans

    def _take_in(self, models: dict[str, GatewayModel]) -> None:
        servers = {name: server for name, server in self.servers.items() if server.runs}
        for name, model in models.items():
            server = servers[name] = self.servers.get(name) or ModelServer(model, self.secret)
            if server.model != model and not (server.is_awake and server.model.is_there):
                self._begin_to_stop(server)
            if not server.runs:
                server.model = model
        self.servers = servers

    def default_parameters(self, model: GatewayModel) -> dict[str, int | float]:
        """Return what holds for requests without sampling parameters; {} if a file is invalid."""
        options = self.config.model
        with contextlib.suppress(ConfigError):
            defaults = generation_config.read_generation_defaults(
                model.spec, options.generation_config, options.override_generation_config
            )
            return generation_config.list_parameters(defaults)
        return {}

    def complete(self, card: ModelCard, model: GatewayModel) -> ModelCard:
        """Fill in what requests without sampling parameters get, and what prompts may have."""
        card.default_parameters = self.default_parameters(model)
        if not self.config.multimodal.language_model_only:
            card.input_modalities = model.spec.input_modalities
        return card

    @property
    def there(self) -> list[ModelServer]:
        return [server for server in self.servers.values() if server.model.is_there]

    async def find(self, name: str | None) -> ModelServer:
        """Return the server of the model or adapter with this name. Without a name, return the last
        used server. Raise UnknownModel.
        """
        if name is None and (servers := self.there):
            return max(servers, key=lambda server: server.used_at)
        if (server := self._find_known(name)) is None:
            await self.scan()
            server = self._find_known(name)
        if server is None:
            owner = next((card.parent for card in await self.adapters() if card.id == name), None)
            server = self._find_known(owner)
        if server is not None:
            return server
        where = self.models.path.name
        names = [server.name for server in self.there]
        if not names:
            raise UnknownModel(f"no model is served here: {where} is empty", param="model")
        raise UnknownModel(
            f"the model {(name or '')[:200]!r} is not served here; the folder {where} has "
            f"{', '.join(names[:MOST_NAMED])}",
            param="model",
        )

    def _find_known(self, name: str | None) -> ModelServer | None:
        server = self.servers.get(name or "") or self.servers.get(full_name(name or ""))
        return server if server and server.model.is_there else None

    async def adapters(self) -> list[ModelCard]:
        if not self.config.lora.enable_lora:
            return []
        there = self.there
        running = [server for server in there if server.has_started and server.runs]
        answers = await asyncio.gather(*(server.ask("/v1/models") for server in running))
        lists = [
            msgspec.json.decode(answer.content, type=ModelList) for answer in answers if answer
        ]
        cards = [card for models in lists for card in models.data if card.parent]
        stopped = {server.name: server for server in there if server not in running}
        for adapter in adapters_in(self.config.lora).values():
            if (server := stopped.get(adapter.owner([s.name for s in there]) or "")) is not None:
                name = adapter.name
                length = server.model.spec.max_position_embeddings
                card = ModelCard(name, adapter.created, name, length, parent=server.name)
                cards.append(self.complete(card, server.model))
        return cards

    @contextlib.asynccontextmanager
    async def serving(self, server: ModelServer, keep_alive: float | None) -> AsyncIterator[Visit]:
        """Wake up the model's server. Keep it awake until its response begins, and then for
        `keep_alive` idle seconds (None: forever). To make room, put other servers to sleep when
        their requests have ended. Raise Unavailable if the server cannot start.
        """
        try:
            while not server.may_serve:
                async with self._switch:
                    if not server.may_serve:
                        server.check()
                        await self._make_room(server)
                        await self._wake_up(server)
            async with self.visiting(server) as visit:
                server.used_at = time.monotonic()
                yield visit
        finally:
            self._rest_later(server, keep_alive)

    @contextlib.asynccontextmanager
    async def visiting(self, server: ModelServer) -> AsyncIterator[Visit]:
        """Yield a visit to the server for one request, without waking up the server."""
        visit = Visit(server)
        try:
            yield visit
        finally:
            visit.answered()
            server.num_open -= 1

    async def sleep(self, server: ModelServer) -> None:
        """Put an awake server to sleep after its requests have ended."""
        async with self._switch:
            if server.has_weights:
                await self._put_to_sleep(server)

    def _rest_later(self, server: ModelServer, seconds: float | None) -> None:
        """Put a server to sleep after `seconds`, unless another request uses the server."""
        if server.rest_timer is not None:
            server.rest_timer.cancel()
            server.rest_timer = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            server.rest_timer = loop.call_later(seconds, self._begin_rest, server)

    def _begin_rest(self, server: ModelServer) -> None:
        resting = asyncio.ensure_future(self._rest(server, server.used_at))
        self._resting.add(resting)
        resting.add_done_callback(self._resting.discard)

    async def _rest(self, server: ModelServer, used_at: float) -> None:
        load = await server.ask("/load") if server.may_serve else None
        if load is not None and load.json()["server_load"]:  # in the background
            self._rest_later(server, LOAD_INTERVAL)
            return
        async with self._switch:
            is_idle = not server.num_open and server.used_at == used_at
            if is_idle and server.has_weights:
                await self._put_to_sleep(server)

    async def _make_room(self, server: ModelServer) -> None:
        """Put servers to sleep, and stop the ones asleep longest, to stay within the limits."""
        if self._stopping:
            await asyncio.wait(self._stopping)
        while True:
            awake = [s for s in self.servers.values() if s.has_weights and s is not server]
            num_bytes = sum(other.model.facts.num_bytes for other in [*awake, server])
            if not awake or (len(awake) < self.max_awake and num_bytes <= self.budget):
                break
            await self._put_to_sleep(min(awake, key=lambda s: (s.num_open > 0, s.used_at)))
        asleep = [s for s in self.servers.values() if s.runs and not s.is_awake and s is not server]
        for other in sorted(asleep, key=lambda s: -s.used_at)[self.max_asleep :]:
            await self._stop(other)

    async def _put_to_sleep(self, server: ModelServer) -> None:
        """Make a server free its weights after its engine has finished its requests. A client that
        reads its response slowly delays no other model.
        """
        server.is_leaving = True
        failing_since = None
        try:
            while server.runs:
                while server.num_unanswered:
                    server.has_answered.clear()
                    await server.has_answered.wait()
                if (is_asleep := await server.is_asleep("/sleep")) is True:
                    break
                since = failing_since or server.loading_since or time.monotonic()
                failing_since = None if is_asleep is False else since
                await self._give_up_if_late(server, failing_since, "does not go to sleep")
                await asyncio.sleep(LOOK_INTERVAL)  # a long response, or its engine is restarting
            server.is_awake = False
            server.loading_since = None
            logger.info("%s %s", server.name, "sleeps" if server.runs else "has ended")
        finally:
            server.is_leaving = False

    async def _wake_up(self, server: ModelServer) -> None:
        """Start a server, or make it load its weights again. If the request is cancelled, the next
        request continues to wait. Raise Unavailable if the server ends before it is ready, or takes
        too long.
        """
        if not server.runs:
            if self._is_closed:
                raise Unavailable("the server is shutting down")
            logger.info("starting %s", server.name)
            server.is_awake = server.has_started = False
            await self._launch(server)
        if not server.is_awake:
            server.is_awake = True
            server.loading_since = time.monotonic()
        began = server.loading_since or time.monotonic()
        while not await server.ask("/health") or await server.is_asleep("/wake_up") is not False:
            if not server.runs:
                server.fail("could not be started: the log explains why", RETRY_AFTER)
            await self._give_up_if_late(server, began, "was not ready")
            server.check()
            await asyncio.sleep(LOOK_INTERVAL)
        server.has_started = True
        server.loading_since = None
        logger.info("%s is ready after %.2f s", server.name, time.monotonic() - began)

    async def _give_up_if_late(self, server: ModelServer, since: float | None, what: str) -> None:
        """Stop a server that takes longer than --models-start-timeout to start or to go to sleep.
        Do not start it again for as long, so that other models get a turn.
        """
        timeout = self.config.models.models_start_timeout
        if since is not None and time.monotonic() - since > timeout:
            why = f"{what} within {timeout:g} s (--models-start-timeout)"
            logger.error("%s %s: it is stopped", server.name, why)
            server.fail(why, timeout)
            await self._stop(server)

    async def _launch(self, server: ModelServer) -> None:
        self._numbers += 1
        path = str(self.folder / f"model-{self._numbers}")
        await server.connect(path)
        start = StartModel(self._config_of(server, path))
        # Only the gateway can reach that socket, so its X-Forwarded-For is trusted.
        env = {log.MODEL: server.name, "FORWARDED_ALLOW_IPS": "*"}
        server.child = Child(server.name, MODULE, start, env=env)

    async def _stop(self, server: ModelServer) -> None:
        if (stopping := self._begin_to_stop(server)) is not None:
            await asyncio.shield(stopping)  # its caller may be cancelled

    def _begin_to_stop(self, server: ModelServer) -> asyncio.Future[None] | None:
        server.is_awake = False
        server.loading_since = None
        child, server.child = server.child, None
        if child is None:
            return None
        timeout = self.config.server.shutdown_timeout + STOP_TIMEOUT
        stopping = asyncio.ensure_future(asyncio.to_thread(child.stop, timeout))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        return stopping

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(self._stop(server) for server in self.servers.values()))

    def reload(self, config: Config) -> None:
        self.config = config
        for server in self.servers.values():
            if server.runs and server.child is not None:
                server.child.post(self._config_of(server, ""))

    def _config_of(self, server: ModelServer, path: str) -> Config:
        """Return the options of a model's server. TLS, hosts, CORS and idle sleep are the
        gateway's.
        """
        config = self.config
        access = self.config.access
        lora = self.config.lora
        names = list(self.servers)
        adapters = adapters_in(lora)
        entries = [
            entry
            for entry in lora.lora_modules
            if adapters[parse_module(entry)[0]].owner(names) == server.name
        ]
        return config.replace(
            model=str(server.model.path),
            served_model_name=[server.name],
            uds=path,
            models_dir=None,
            models=[],
            lora_modules=entries,
            sleep_idle_seconds=None,
            api_key=[*access.api_key, self.secret] if access.needs_keys else [],
            ssl_certfile=None,
            ssl_keyfile=None,
            ssl_ca_certs=None,
            ssl_cert_reqs=0,
            allowed_hosts=["*"],
            allowed_origins=[],
        )
