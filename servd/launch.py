"""The process tree of `servd serve`: start, watch, drain, stop."""

from __future__ import annotations

import logging
import os
import queue
import resource
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from servd import hf, ipc, log, plugins
from servd.access import AccessConfig, read_keys, tls_context
from servd.api.start import ENGINE_IS_DEAD, Start
from servd.child import Child
from servd.config import Config
from servd.core.client import EngineCoreClient, identity
from servd.core.executor import EXECUTORS
from servd.errors import ConfigError, UnsupportedModel
from servd.messages import EngineDead
from servd.resolve import Decision, decide, look_at_machine

logger = logging.getLogger("servd.launch")

ENGINE_MODULE = "servd.core.engine_core_proc"
API_MODULE = "servd.api.server"
LONGEST_SOCKET_NAME = f"client-{2**31 - 1}"

DEATH_GRACE = 1.0  # seconds that API servers get to answer open requests after the engine died
API_STOP_TIMEOUT = 3.0  # seconds from SIGTERM, the second one at that, to SIGKILL
ATTACH_TIMEOUT = 5.0  # seconds for an engine's first word
ENGINE_STOP_TIMEOUT = 3.0  # the same for the engine


def serve(read_config: Callable[[], Config]) -> int:
    """Run engine and API servers until a signal (0) or until one of them ends by itself (its code,
    or 1).

    Args:
        read_config: reads the options of the server, now and at each SIGHUP.

    Raises:
        ConfigError: before anything was started.
    """
    started_at = time.monotonic()
    config = read_config()
    check_access(config.access)
    log.setup("servd", config.observability)
    raise_file_limit()
    listener = None if config.server.headless else listen(config)
    try:
        config, spec, decided = find_and_resolve(config)
        with SocketFolder(config) as ipc_dir:
            if config.server.attach:
                check_engine(ipc_dir, identity(config, spec))
            tree = ProcessTree(config, spec, decided, ipc_dir, started_at, read_config)
            try:
                tree.start(listener)
                return tree.watch()
            finally:
                tree.stop()
    finally:
        if listener is not None and config.server.uds:
            Path(config.server.uds).unlink(missing_ok=True)


def check_access(access: AccessConfig) -> None:
    """Check that the files of keys and certificates can be read.

    Raises:
        ConfigError: one cannot.
    """
    read_keys(access)
    tls_context(access)


def has_terminal() -> bool:
    """Whether this process belongs to a terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def raise_file_limit() -> None:
    """Let this process and its children open as many files as the system's administrator allows.

    The default is often 1024 or fewer, and every connection is a file.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def find_and_resolve(config: Config) -> tuple[Config, hf.ModelSpec, dict[str, Decision]]:
    """Find the model's metadata (downloading these small files if needed) and decide every "auto".
    What was decided is in the Config, too.

    Raises:
        ConfigError: no such model, an architecture that servd does not have, options that do not
            fit.
    """
    # What "auto" will be drives workers, which need weights.
    executor = plugins.load(EXECUTORS, config.parallel.executor or "uniproc", "Executor")
    if config.model.model is None and not executor.needs_weights:
        spec = hf.FAKE_SPEC
    else:
        config = config.replace(model=config.model.model or hf.DEMO_MODEL)
        model = config.model
        assert model.model is not None
        folder = hf.find_model(model.model, model.revision, model.download_dir)
        if (drafted := of_speculators(config, folder)) is not None:
            return find_and_resolve(drafted)
        spec = hf.read_spec(folder)
    supported = plugins.names("servd.worker.models")
    if executor.needs_weights and spec.model_type not in supported:
        raise UnsupportedModel(
            f"model_type {spec.model_type!r} is not supported; servd has: {', '.join(supported)}"
        )
    if executor.needs_weights:
        config = find_draft(config)
    elif speculative := config.model.speculative_config:
        config = config.replace(speculative_config=speculative.with_heads(None))
    decided = decide(config, spec, look_at_machine())
    values = {name: decision.value for name, decision in decided.items()}
    return config.replace(**values), spec, decided


def of_speculators(config: Config, folder: Path) -> Config | None:
    """The model that a draft in *speculators* format names as its own, drafted for by it, where
    such a draft is given as the model.
    """
    draft = hf.read_json(folder / "config.json")
    speculators = draft.get("speculators_config") or {}
    target = (speculators.get("verifier") or {}).get("name_or_path")
    if config.model.speculative_config or not target:
        return None
    methods = speculators.get("proposal_methods") or [{}]
    keys = {"model": config.model.model, "method": draft.get("speculators_model_type")}
    keys |= {"num_speculative_tokens": methods[0].get("speculative_tokens")}
    made = Config.load({"speculative_config": keys}).model.speculative_config
    logger.info("model: %s, drafted for by %s", target, config.model.model)
    return config.replace(model=target, speculative_config=made)


def find_draft(config: Config) -> Config:
    """Find the metadata of the draft, if that is a model; in *speculators* format they name the
    method.

    Raises:
        ModelNotFound: there is no such draft.
        ConfigError: it is the demo model's, and the model another one.
    """
    speculative = config.model.speculative_config
    if speculative is None or speculative.model is None:
        return config
    draft = speculative.model
    if draft == hf.DEMO_MODEL and speculative.method == "medusa":
        model = config.model.model
        assert model is not None
        if hf.local_folder(model) != hf.DEMO_FOLDER:
            raise ConfigError(
                "--speculative-config demo: that head drafts for servd's demo model, and the model "
                f'is {model}; use e.g. \'{{"method": "ngram"}}\', or train a head: '
                "docs/speculative-decoding.md"
            )
        draft = str(hf.DEMO_HEAD)
        speculative = msgspec.structs.replace(speculative, model=draft)
    folder = hf.find_model(draft, speculative.revision, config.model.download_dir)
    keys = hf.read_json(folder / "config.json")
    method = keys.get("speculators_model_type")
    if method and speculative.method == "draft_model":
        speculative = msgspec.structs.replace(speculative, method=method)
    speculative = speculative.with_heads(keys.get("num_heads") or keys.get("medusa_num_heads"))
    return config.replace(speculative_config=speculative)


def start_engine(config: Config, spec: hf.ModelSpec, ipc_dir: str, started_at: float) -> Child:
    """Start the engine process; it listens in `ipc_dir`."""
    from servd.core.engine_core_proc import Start

    return Child(
        "engine",
        ENGINE_MODULE,
        Start(config, spec, ipc_dir, started_at),
        env={ipc.PARENT_DIR: ipc_dir},
    )


def listen(config: Config) -> socket.socket:
    """Open the port (or Unix socket) at once: what comes before the servers are up waits in the
    backlog.

    Raises:
        ConfigError: the port is taken or not allowed.
    """
    server = config.server
    if server.uds:
        return listen_uds(server.uds)
    try:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        return socket.create_server((server.host, server.port), family=family, backlog=2048)
    except OSError as error:
        remedy = "choose another with --port" if error.errno == 98 else "check --host and --port"
        raise ConfigError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror}; {remedy}"
        ) from None


def listen_uds(path: str) -> socket.socket:
    """Bind a Unix socket, taking over a file that no process listens on any more."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(
                    f"--uds {path}: this is not a socket; choose another path, or remove it"
                )
            if somebody_listens(path):
                raise ConfigError(f"--uds {path}: another process listens there")
            os.unlink(path)
        listener.bind(path)
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(f"--uds {path}: {error.strerror or error}") from None
    return listener


def somebody_listens(path: str) -> bool:
    """Whether a process has this Unix socket open, rather than having left its file behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


def url_of(listener: socket.socket, access: AccessConfig) -> str:
    """What a person types to reach the server."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if access.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_private(folder: str, flag: str) -> None:
    """Check that nobody else can reach the sockets in a folder: who can drives the engine.

    Raises:
        ConfigError: it belongs to another user, or others may enter it.
    """
    status = os.stat(folder)
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{flag} {folder}: this folder belongs to another user")
    if status.st_mode & 0o077:
        raise ConfigError(f"{flag} {folder}: other users may enter this folder; chmod 700 it")


def check_engine(ipc_dir: str, identity: str) -> None:
    """Check that the engine that listens in a folder takes an API server of this identity.

    Raises:
        ConfigError: it is of another version or model.
    """
    client = EngineCoreClient(ipc_dir, secrets.randbits(31), identity)
    try:
        answer = client.recv(ATTACH_TIMEOUT)  # None from one that has just begun: asked again
    finally:
        client.close()
    if isinstance(answer, EngineDead):
        raise ConfigError(f"--attach {ipc_dir}: {answer.reason}; start both with the same options")


class SocketFolder:
    """The folder of the sockets: --attach's, --ipc-dir, or a private one, removed at the end."""

    def __init__(self, config: Config) -> None:
        server = config.server
        self.is_private = not (server.attach or server.ipc_dir)
        self.path = server.attach or server.ipc_dir or str(ipc.private_dir())
        longest = len(os.fsencode(os.path.join(self.path, LONGEST_SOCKET_NAME)))
        if longest > ipc.MAX_SOCKET_PATH:
            raise ConfigError(
                f"--ipc-dir {self.path}: too long by {longest - ipc.MAX_SOCKET_PATH} bytes for "
                f"the path of a socket"
            )
        if server.attach and os.path.isdir(self.path):
            check_private(self.path, "--attach")
        has_engine = somebody_listens(os.path.join(self.path, "engine"))
        if server.attach and not has_engine:
            raise ConfigError(
                f"--attach {server.attach}: no engine listens there; start one with --headless"
            )
        if server.ipc_dir and has_engine:
            raise ConfigError(
                f"--ipc-dir {server.ipc_dir}: another engine listens there; choose another folder"
            )
        if server.ipc_dir:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            check_private(self.path, "--ipc-dir")
        self.has_engine = not server.attach

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, *_: object) -> None:
        if self.is_private:
            shutil.rmtree(self.path, ignore_errors=True)
        elif self.has_engine:  # its socket would make --attach believe in it
            Path(self.path, "engine").unlink(missing_ok=True)


class ProcessTree:
    """This process's children, and what happens when one of them, or it, has to end."""

    def __init__(
        self,
        config: Config,
        spec: hf.ModelSpec,
        decided: dict[str, Decision],
        ipc_dir: str,
        started_at: float,
        read_config: Callable[[], Config],
    ) -> None:
        self.config = config
        self.read_config = read_config
        self.had_terminal = has_terminal()
        self.spec = spec
        self.reasons = {name: decision.why for name, decision in decided.items()}
        self.ipc_dir = ipc_dir
        self.started_at = started_at
        self.engine: Child | None = None
        self.api_servers: list[Child] = []
        self.inboxes: list[Path] = []  # sockets of our API servers
        self.metrics_dir: str | None = None
        self.events: queue.SimpleQueue[Child | signal.Signals] = queue.SimpleQueue()

    def start(self, listener: socket.socket | None) -> None:
        """Start the children; `listener` is handed to every API server and closed here."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
                signal.signal(signum, self.on_signal)
        if listener is not None:
            logger.info("listening on %s", url_of(listener, self.config.access))
            self.start_api_servers(listener)
            listener.close()
        if not self.config.server.attach:
            self.engine = start_engine(self.config, self.spec, self.ipc_dir, self.started_at)
        for child in self.children:
            child.on_exit(self.events.put)

    def start_api_servers(self, listener: socket.socket) -> None:
        """One or several; the kernel hands each connection of their shared socket to one."""
        count = self.config.server.api_server_count
        env: dict[str, str] = {}
        if count > 1:  # each of them must be able to answer /metrics for all
            self.metrics_dir = tempfile.mkdtemp(prefix="metrics-", dir=self.ipc_dir)
            env["PROMETHEUS_MULTIPROC_DIR"] = self.metrics_dir
        for i in range(count):
            # A random number rather than an index: servers of several launchers may attach to one
            # engine.
            client = secrets.randbits(31)
            self.inboxes.append(Path(self.ipc_dir, f"client-{client}"))
            start = Start(
                self.config,
                self.spec,
                self.reasons,
                self.ipc_dir,
                client,
                f"api-{i}",
                listener.fileno(),
                url_of(listener, self.config.access) if i == 0 else None,
            )
            self.api_servers.append(Child(start.name, API_MODULE, start, [listener.fileno()], env))

    @property
    def children(self) -> list[Child]:
        """API servers first: they are stopped first."""
        return [*self.api_servers, *([self.engine] if self.engine else [])]

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Signal handlers only leave a note; SimpleQueue.put is allowed in one."""
        self.events.put(signal.Signals(signum))

    def watch(self) -> int:
        """Wait for the first event that ends the tree; return the exit code."""
        event = self.events.get()
        # The hang-up of a terminal ends what was started in it.
        while event is signal.SIGHUP and not (self.had_terminal and not has_terminal()):
            self.reload()
            event = self.events.get()
        if isinstance(event, signal.Signals):
            seconds = self.config.server.shutdown_timeout
            logger.info(
                "%s: finishing open requests, at most %g s; a second one stops at once",
                event.name,
                seconds,
            )
            self.drain()
            return 0
        if self.engine is not None and event.exit_code == ENGINE_IS_DEAD:
            # The engine's own code says more.
            self.engine.wait(ENGINE_STOP_TIMEOUT)
            event = self.engine if self.engine.exit_code is not None else event
        if event.exit_code == 2:  # a ConfigError, which the child has printed
            return 2
        logger.error("%s ended by itself with code %s: stopping", event.name, event.exit_code)
        self.report_death(f"{event.name} ended unexpectedly with code {event.exit_code}")
        self.wait_for_api_servers(DEATH_GRACE)
        return 1

    def reload(self) -> None:
        """Read again what may change while the server runs, and have the children take it over."""
        try:
            new = self.read_config()
            check_access(new.access)
        except ConfigError as error:
            logger.error("SIGHUP: %s: nothing has changed", error)
            return
        log.set_level(new.observability)
        self.config = self.config.replace(
            log_level=new.observability.log_level, **msgspec.structs.asdict(new.access)
        )
        for child in self.children:
            child.send(self.config)
        logger.info("SIGHUP: keys, their limits, certificates and log level were read again")

    def report_death(self, reason: str) -> None:
        """Have the API servers answer every open request with an error, and end."""
        # With --headless the API servers are other launchers' children, found by their sockets.
        folder = Path(self.ipc_dir)
        inboxes = folder.glob("client-*") if self.config.server.headless else self.inboxes
        for inbox in inboxes:
            outbox = ipc.Outbox(f"ipc://{inbox}")
            outbox.send(EngineDead(reason))
            outbox.close()

    def drain(self) -> None:
        """Let the API servers finish their open requests; a second signal cuts this short."""
        for child in self.api_servers:
            child.terminate()
        # The API servers keep to the timeout themselves; the extra second is for their exit.
        self.wait_for_api_servers(self.config.server.shutdown_timeout + 1)

    def wait_for_api_servers(self, timeout: float) -> None:
        """Until all have ended, `timeout` seconds are over, or a signal arrives."""
        deadline = time.monotonic() + timeout
        while any(child.exit_code is None for child in self.api_servers):
            try:
                event = self.events.get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                return
            if isinstance(event, signal.Signals) or event is self.engine:
                return

    def stop(self) -> None:
        """End whatever still runs: the API servers first, which need the engine to the end."""
        for child in self.api_servers:
            child.terminate()
        for child in self.api_servers:
            child.stop(API_STOP_TIMEOUT)
        if self.engine is not None:
            self.engine.stop(ENGINE_STOP_TIMEOUT)
        if self.metrics_dir is not None:
            shutil.rmtree(self.metrics_dir, ignore_errors=True)
