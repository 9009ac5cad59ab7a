"""The parent process of `servd serve`: finds the model, resolves the options, starts processes."""

import logging
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from servd.api.responses.database import open_database
from servd.base import log, plugins
from servd.base.errors import ConfigError, UnsupportedModel
from servd.checkpoint import account, config_json, generation_config, hub, model_spec, pooling
from servd.checkpoint.model_spec import FAKE_SPEC, ModelSpec
from servd.config import Config
from servd.config.checks.multimodal import choose_modalities
from servd.config.data_parallel import Decision
from servd.config.keys import read_keys, tls_context
from servd.config.machine import Machine, look_at_machine
from servd.config.resolve import decide
from servd.core.client import identity
from servd.core.executor import load_executor
from servd.launch.accounts import accounts_of
from servd.launch.api_servers import url_of
from servd.launch.process_tree import ProcessTree
from servd.launch.sockets import (
    check_engine,
    inherited_listener,
    listen,
    open_batch_dir,
    socket_folder,
)

logger = logging.getLogger("servd.launch")


def run_server(read_config: Callable[[], Config]) -> int:
    """Serve as the options say, which `read_config` reads at start and at each SIGHUP. Return the
    exit code: 0 after a signal, 1 if engines or API servers keep failing, 2 after a ConfigError in
    a child. Raise ConfigError before any child has started.
    """
    started_at = time.monotonic()
    config = read_config()
    read_keys(config.access)
    tls_context(config.access)
    log.setup("servd", config.observability)
    raise_file_limit()
    if (folder := config.batches.batch_dir) is not None:
        open_batch_dir(folder)
    if config.server.response_db is not None:
        open_database(config.server.response_db, is_first=True).close()
    has_models = config.models.models_dir is not None or bool(config.models.models)
    if config.server.headless and not has_models:
        return run_headless(config, read_config, started_at)
    listener, is_inherited = setup_server(config)
    try:
        if has_models:
            from servd.gateway import server as gateway_server  # the others import no HTTP server

            gateway_server.check(config)
            logger.info("listening on %s", url_of(listener, config.access))
            return gateway_server.serve(read_config, listener)
        return run_multi_api_server(config, read_config, started_at, listener, is_inherited)
    finally:
        if config.server.uds and not is_inherited:
            Path(config.server.uds).unlink(missing_ok=True)


def setup_server(config: Config) -> tuple[socket.socket, bool]:
    """Return the socket that all API servers accept from, and whether a parent passed it on."""
    inherited = inherited_listener()
    return inherited or listen(config), inherited is not None


def run_headless(config: Config, read_config: Callable[[], Config], started_at: float) -> int:
    """Run engines without API servers. Return the exit code."""
    return run_multi_api_server(config, read_config, started_at, None, is_inherited=False)


def run_multi_api_server(
    config: Config,
    read_config: Callable[[], Config],
    started_at: float,
    listener: socket.socket | None,
    is_inherited: bool,
) -> int:
    """Run one or more API servers on `listener`, or none without it, and the engines unless the API
    servers attach to the engines of another process tree. Return the exit code.
    """
    config, spec, decided = find_and_resolve(config)
    config = config.with_absolute_paths()
    with socket_folder(config) as ipc_dir:
        if config.server.attach:
            check_engine(ipc_dir, identity(config, spec))
        tree = ProcessTree(config, spec, decided, ipc_dir, listener, read_config, is_inherited)
        try:
            tree.start(started_at)
            return tree.run()
        finally:
            tree.stop()


def raise_file_limit() -> None:
    """Raise the soft limit of open files, often 1024, to the hard limit, for many connections."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def find_and_resolve(
    config: Config, machine: Machine | None = None
) -> tuple[Config, ModelSpec, dict[str, Decision]]:
    """Find the model's metadata, downloading its small files or GGUF file; resolve every "auto".
    Return the resolved Config, the model's architecture, and the decisions by option. Raise
    ConfigError if the model does not exist, its architecture is not supported, or options conflict.
    """
    # "auto" becomes an executor that needs weights, like uniproc.
    executor = load_executor(config.parallel.executor or "uniproc")
    if config.model.model is None and not executor.needs_weights:
        spec = FAKE_SPEC
    else:
        config = config.replace(model=config.model.model or hub.DEMO_MODEL)
        model = config.model
        assert model.model is not None
        folder = hub.find_model(model.model, model.revision, model.download_dir)
        if (drafted := of_speculators(config, folder)) is not None:
            return find_and_resolve(drafted, machine)
        _refuse_head(model.model, folder)
        spec = model_spec.read_spec(folder, model.hf_overrides)
    if not executor.needs_weights:  # nothing limits its positions
        positions = max(spec.max_position_embeddings, config.model.max_model_len or 0)
        spec = msgspec.structs.replace(spec, max_position_embeddings=positions)
    if config.model.model_impl == "servd" and not pooling.has_file(spec):
        raise UnsupportedModel(
            f"--model-impl servd: servd has no file for model_type {spec.model_type!r}, only for "
            f"{', '.join(plugins.names(pooling.MODELS))}; leave the option out"
        )
    if executor.needs_weights:
        config = find_draft(config)
    elif speculative := config.model.speculative_config:
        logger.warning(
            "--executor %s makes its own drafts: method %s does not run",
            config.parallel.executor,
            speculative.method,
        )
        config = config.replace(speculative_config=speculative.with_heads(None))
    config, decided = decide(config, spec, machine or look_at_machine())
    spec = msgspec.structs.replace(spec, multimodal=choose_modalities(config, spec))
    model = config.model
    generation_config.read_generation_defaults(
        spec, model.generation_config, model.override_generation_config
    )
    account.check(accounts_of(config, spec), config.model.allow_unknown_keys)
    return config, spec, decided


def _refuse_head(model: str, folder: Path) -> None:
    """Raise ConfigError if the model is only a draft head, such as EAGLE's."""
    architecture = str(config_json.read_json(folder / "config.json").get("architectures"))
    methods = {"Eagle3": "eagle3", "Eagle": "eagle", "Medusa": "medusa"}
    method = next((methods[part] for part in methods if part in architecture), None)
    if method is not None:
        raise ConfigError(
            f"{model} is a draft head ({architecture}), not a model: serve its model with "
            "--speculative-config "
            f'''\'{{"method": "{method}", "model": "{model}"}}\''''
        )


def of_speculators(config: Config, folder: Path) -> Config | None:
    """Return the options for the target model of a draft in *speculators* format, with this draft.
    None if the model is not such a draft.
    """
    draft = config_json.read_json(folder / "config.json")
    speculators = draft.get("speculators_config")
    if config.model.speculative_config or not isinstance(speculators, dict):
        return None
    target = (speculators.get("verifier") or {}).get("name_or_path")
    if not target:
        return None
    methods = speculators.get("proposal_methods") or [{}]
    keys = {"model": config.model.model, "method": draft.get("speculators_model_type")}
    keys |= {"num_speculative_tokens": methods[0].get("speculative_tokens")}
    made = Config.load({"speculative_config": keys}).model.speculative_config
    logger.info("model: %s, drafted for by %s", target, config.model.model)
    return config.replace(model=target, speculative_config=made)


def find_draft(config: Config) -> Config:
    """Return options with the draft model's metadata, if any. In *speculators* format, the metadata
    names the method. Raise ModelNotFound if the draft does not exist.
    """
    speculative = config.model.speculative_config
    if speculative is None or speculative.model is None:
        return config
    folder = hub.find_model(speculative.model, speculative.revision, config.model.download_dir)
    keys = config_json.read_json(folder / "config.json")
    method = keys.get("speculators_model_type")
    if method and speculative.method == "draft_model":
        speculative = msgspec.structs.replace(speculative, method=method)
    speculative = speculative.with_heads(keys.get("num_heads") or keys.get("medusa_num_heads"))
    return config.replace(speculative_config=speculative)
