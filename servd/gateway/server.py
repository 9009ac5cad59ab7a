"""The gateway's process: port, signals and shutdown."""

import asyncio
import logging
import shutil
import signal
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from servd.api.http.http_protocol import Connections, settings
from servd.api.keys import ApiKeys
from servd.base.errors import ConfigError
from servd.base.private_dir import private_dir
from servd.checkpoint import hub
from servd.config import Config
from servd.config.keys import check_new_keys, load_certificates, tls_context
from servd.gateway.models import adapters_in
from servd.gateway.pool import ModelServers
from servd.gateway.proxy import create_gateway

logger = logging.getLogger("servd.api")


def serve(read_config: Callable[[], Config], listener: socket.socket) -> int:
    """Serve the models of a folder until a signal, and return the exit code 0."""
    config = read_config()
    folder = private_dir()
    try:
        config = link_models(config.with_absolute_paths(), folder / "models")
        uvloop.run(_serve(config, read_config, listener, str(folder)))
    finally:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def check(config: Config) -> None:
    """Raise ConfigError for options that conflict with serving several models."""
    server = config.server
    if config.models.models and config.models.models_dir:
        raise ConfigError("--models and --models-dir: give one of them")
    if (model := config.model.model) is not None:
        raise ConfigError(
            f"MODEL ({model}) and --models-dir: give one of them; with --models-dir each request "
            "names its model"
        )
    for flag, value in (
        ("--served-model-name", config.model.served_model_name),
        ("--attach", server.attach),
        ("--headless", server.headless),
        ("--ipc-dir", server.ipc_dir),
        ("--batch-dir", config.batches.batch_dir),
    ):
        if value:
            raise ConfigError(f"{flag} does not work with --models-dir: leave one of them out")


def link_models(config: Config, folder: Path) -> Config:
    """Create a folder of links to the models of --models, if any, and return options that serve the
    folder. A hub model keeps its name, a local model gets its file's name. Raise ConfigError if a
    model does not exist, or two have the same name.
    """
    for model in config.models.models:
        local_path = Path(model).expanduser()
        path = local_path.absolute() if local_path.exists() else hub.download_weights(model)
        link = folder / (local_path.absolute().name if local_path.exists() else model)
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.parent.is_symlink():  # the link would be written into that model's folder
            raise ConfigError(f"--models: {model} and {link.parent.name} cannot both be served")
        try:
            link.symlink_to(path)
        except FileExistsError:
            raise ConfigError(f"--models: two have the name {link.name}") from None
    return config.replace(models_dir=str(folder)) if config.models.models else config


class GatewayServer(uvicorn.Server):
    """A uvicorn server that returns after a signal, so that the models' servers are stopped."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


async def _serve(
    config: Config, read_config: Callable[[], Config], listener: socket.socket, folder: str
) -> None:
    try:
        servers = ModelServers(config, folder)
    except OSError as error:
        where = config.models.models_dir
        raise ConfigError(f"--models-dir {where}: {error.strerror or error}") from None
    keys = ApiKeys(config.access)
    options = settings(
        create_gateway(config, servers, keys),
        Connections(config.server),
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(config.server.shutdown_timeout),
    )
    options.load()
    options.ssl = tls_context(config.access)
    on_hangup = partial(reload, read_config, keys, options.ssl, servers)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
    where = servers.models.path
    names = ", ".join(servers.servers)
    if names:
        count = len(servers.servers)
        logger.info(
            "ready to serve %d models, at most %d awake: %s", count, servers.max_awake, names
        )
    else:
        logger.warning(
            "%s has no model yet (NAME/config.json, ORG/NAME/config.json or NAME.gguf): add "
            "one, and name it in a request",
            where,
        )
    try:
        await GatewayServer(options).serve(sockets=[listener])
    finally:
        await servers.close()


def reload(
    read_config: Callable[[], Config],
    keys: ApiKeys,
    tls: ssl.SSLContext | None,
    servers: ModelServers,
) -> None:
    """Reload the options that can change at run time. If one is invalid, change nothing."""
    try:
        config = read_config().with_absolute_paths()
        adapters_in(config.lora)
        check_new_keys(config.access)
        keys.load(config.access)
        if tls is not None:
            load_certificates(tls, config.access)
    except ConfigError as error:
        logger.error("SIGHUP: %s: keeping the previous settings", error)
        return
    servers.reload(config)
