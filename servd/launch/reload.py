"""What SIGHUP changes in a running server: keys, limits, certificates, log level and adapters."""

from collections.abc import Sequence

import msgspec

from servd.base.errors import ConfigError
from servd.checkpoint.adapter_store import AdapterStore
from servd.checkpoint.lora import AdapterFiles, parse_module
from servd.config import Config
from servd.config.keys import check_new_keys, tls_context


def reload_config(config: Config, new: Config, ipc_dir: str) -> Config:
    """Return the options with those of `new` that may change. Raise ConfigError, and change
    nothing, if an option or a file is not valid.
    """
    check_new_keys(new.access)
    tls_context(new.access)
    if (new.access.ssl_certfile is None) != (config.access.ssl_certfile is None):
        raise ConfigError("--ssl-certfile: only a restart can turn TLS on or off")
    if config.lora.enable_lora and not config.server.attach:
        config = load_adapters(config, new.lora.lora_modules, ipc_dir)
    access = msgspec.structs.asdict(new.access)
    return config.replace(log_level=new.observability.log_level, **access)


def load_adapters(config: Config, entries: Sequence[str], ipc_dir: str) -> Config:
    """Copy the adapters of --lora-modules, so that a restarted engine finds them unchanged.
    Unload adapters that were removed from the option. Return the options with the copies. Raise
    ConfigError, and change nothing, if an adapter is not valid.
    """
    store = AdapterStore.beside(ipc_dir, config.model.allow_unknown_keys)
    max_rank = config.lora.max_lora_rank
    sources = dict(map(parse_module, entries))
    for source in sources.values():
        AdapterFiles(source, source, store.allow_unknown_keys).check(max_rank, {})
    loaded = [store.load(name, source, max_rank, {}) for name, source in sources.items()]
    for name in dict(map(parse_module, config.lora.lora_modules)).keys() - sources.keys():
        store.unload(name)
    return config.replace(lora_modules=[f"{adapter.name}={adapter.folder}" for adapter in loaded])
