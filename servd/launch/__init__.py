"""`servd serve`, the parent of all processes: what it does before it starts them."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from servd import hf, ipc, log, plugins
from servd.config import Config
from servd.core.client import EngineCoreClient, engine_dir, identity
from servd.core.executor import EXECUTORS
from servd.errors import ConfigError, UnsupportedModel
from servd.launch import node
from servd.launch.engine_supervisor import newest_engine, somebody_listens
from servd.launch.process_tree import ProcessTree, check_access, url_of
from servd.messages import EngineDead
from servd.resolve import Decision, decide, look_at_machine

logger = logging.getLogger("servd.launch")

LONGEST_SOCKET_NAME = f"client-{2**31 - 1}"

FIRST_INHERITED = 3  # descriptor of the first socket from systemd
ATTACH_TIMEOUT = 5.0  # seconds for an engine's first word


def serve(read_config: Callable[[], Config]) -> int:
    """Run engine and API servers until a signal (0), or until they cannot be kept alive (1; after
    a ConfigError in one of them 2).

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
    if (folder := config.batches.batch_dir) is not None:
        open_batch_dir(folder)
    inherited = None if config.server.headless else inherited_listener()
    listener = None if config.server.headless else inherited or listen(config)
    try:
        if config.models.models_dir is not None or config.models.models:
            from servd.api import front_server  # the others import no HTTP server

            front_server.check(config)
            assert listener is not None
            logger.info("listening on %s", url_of(listener, config.access))
            return front_server.serve(read_config, listener)
        config, spec, decided = find_and_resolve(config)
        with SocketFolder(config) as ipc_dir:
            if config.server.headless and config.parallel.has_head:
                return node.serve(config, spec, ipc_dir)
            if config.server.attach:
                check_engine(ipc_dir, identity(config, spec))
            tree = ProcessTree(config, spec, decided, ipc_dir, listener, started_at, read_config)
            tree.hands_over = inherited is not None
            try:
                tree.start()
                return tree.watch()
            finally:
                tree.stop()
    finally:
        if listener is not None and config.server.uds and not inherited:
            Path(config.server.uds).unlink(missing_ok=True)


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
        _refuse_head(model.model, folder)
        spec = hf.read_spec(folder, model.hf_overrides)
    natives = plugins.names("servd.worker.models")
    if config.model.model_impl == "servd" and spec.model_type not in natives:
        raise UnsupportedModel(
            f"--model-impl servd: servd has no file for model_type {spec.model_type!r}, only for "
            f"{', '.join(natives)}; leave the option out"
        )
    if executor.needs_weights:
        config = find_draft(config)
    elif speculative := config.model.speculative_config:
        logger.warning(
            "--executor %s drafts by itself: method %s is not run",
            config.parallel.executor, speculative.method,
        )  # fmt: skip
        config = config.replace(speculative_config=speculative.with_heads(None))
    config, decided = decide(config, spec, look_at_machine())
    return config, spec, decided


def _refuse_head(model: str, folder: Path) -> None:
    """Raises ConfigError where a draft that is no model by itself is given as the model."""
    architecture = str((hf.read_json(folder / "config.json").get("architectures") or [""])[0])
    known = {"Eagle3": "eagle3", "Eagle": "eagle", "Medusa": "medusa"}
    method = next((known[part] for part in known if part in architecture), None)
    if method is not None:
        raise ConfigError(
            f"{model} is a head that drafts for a model ({architecture}), and no model: serve the "
            "model that it was trained for with --speculative-config "
            f'''\'{{"method": "{method}", "model": "{model}"}}\''''
        )


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
    if draft == hf.DEMO_MODEL and speculative.method == hf.DEMO_HEAD.name:
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


def inherited_listener() -> socket.socket | None:
    """The socket that whoever started this process listens on, and may hand to its successor: as
    systemd gives it, see sd_listen_fds(3). --host, --port and --uds do not count then.

    Raises:
        ConfigError: there are several, or what is there is none that listens.
    """
    count, pid = (os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_PID"))
    if pid != str(os.getpid()):
        return None
    if count != "1":
        raise ConfigError(f"LISTEN_FDS={count}: servd listens on one socket; give it one")
    try:
        os.set_inheritable(FIRST_INHERITED, False)
        listener = socket.socket(fileno=FIRST_INHERITED)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigError(f"LISTEN_FDS: descriptor {FIRST_INHERITED}: {error.strerror}") from None
    if not listens:
        listener.close()
        raise ConfigError("LISTEN_FDS: the socket does not listen; it must be a ListenStream")
    return listener


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


def check_private(folder: str, flag: str) -> None:
    """Check that no other user can reach what is in a folder: sockets there control the engine.

    Raises:
        ConfigError: it belongs to another user, or others may enter it.
    """
    status = os.stat(folder)
    if status.st_uid != os.geteuid():
        raise ConfigError(f"{flag} {folder}: this folder belongs to another user")
    if status.st_mode & 0o077:
        raise ConfigError(f"{flag} {folder}: other users may enter this folder; chmod 700 it")


def open_batch_dir(folder: str) -> None:
    """Make the folder of batches, unless it is there.

    Raises:
        ConfigError: that is not possible, or see `check_private`.
    """
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--batch-dir {folder}: {error.strerror}") from None
    check_private(folder, "--batch-dir")


def check_engine(ipc_dir: str, identity: str) -> None:
    """Check that the engine that listens in a folder takes an API server of this identity.

    Raises:
        ConfigError: it is of another version or model.
    """
    incarnation = newest_engine(ipc_dir)
    client = EngineCoreClient(ipc_dir, secrets.randbits(31), identity, incarnation)
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
        last_rank = config.parallel.data_parallel_size - 1
        longest_path = os.path.join(engine_dir(self.path, last_rank), LONGEST_SOCKET_NAME)
        longest = len(os.fsencode(longest_path))
        if longest > ipc.MAX_SOCKET_PATH:
            raise ConfigError(
                f"--ipc-dir {self.path}: too long by {longest - ipc.MAX_SOCKET_PATH} bytes for "
                f"the path of a socket"
            )
        if server.attach and os.path.isdir(self.path):
            check_private(self.path, "--attach")
        has_engine = newest_engine(self.path) >= 0
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
            for path in Path(self.path).glob("engine*"):
                path.unlink()
            for folder in Path(self.path).glob("rank-*"):
                shutil.rmtree(folder, ignore_errors=True)
