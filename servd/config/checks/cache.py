"""Checks the options of the KV cache."""

from servd.base.errors import ConfigError
from servd.config import Config
from servd.config.keys import read_token


def check_cache(config: Config) -> None:
    """Raise ConfigError if options of the KV cache are incompatible."""
    config.cache.validate()
    if config.cache.kv_transfer_config is not None:
        read_token(config)
    kept = config.cache.kv_cache_dtype
    if config.parallel.device == "cuda" and kept not in ("auto", "fp8", config.model.dtype):
        raise ConfigError(
            f"--kv-cache-dtype {kept} is for CPUs: on a GPU, use fp8 (8 bits) or auto"
        )
