"""Chooses which engines of --data-parallel-size run on this host and belong to this server."""

import msgspec

from servd.base.errors import ConfigError
from servd.config import Config

MAX_ENGINES = 32  # of a server


class Decision(msgspec.Struct, frozen=True):
    """The value of an option that was left to servd."""

    value: object
    why: str


def divide(config: Config) -> dict[str, Decision]:
    """Return the options of --data-parallel-size for this server: how many engines it has, how many
    of them run here (--data-parallel-size-local), and the first one's number
    (--data-parallel-start-rank). Raises ConfigError if the options are incompatible.
    """
    parallel = config.parallel
    total = parallel.data_parallel_size
    num_local = parallel.data_parallel_size_local
    rank = parallel.data_parallel_rank
    first = parallel.first_rank
    is_external = parallel.data_parallel_external_lb or rank is not None
    is_hybrid = not is_external and (
        parallel.data_parallel_hybrid_lb or parallel.data_parallel_start_rank is not None
    )
    if is_external:
        if rank is None:
            raise ConfigError("--data-parallel-external-lb needs --data-parallel-rank")
        first = rank
        local = 1
        size = 1
        why = f"number {rank} of {total}, with a balancer before it"
    elif is_hybrid:
        local = size = total - first if num_local is None else num_local
        why = f"from number {first} of {total} on, with a balancer before this server"
    else:
        size = total
        local = parallel.num_engines_here - first
        why = f"from number {first} of {total} on"
    if first + local > total or (is_external and num_local not in (None, 1)):
        num_engines = local if num_local is None else num_local
        raise ConfigError(
            f"--data-parallel-size {total} has no {num_engines} engines from "
            f"number {first} on: numbers are from 0 to {total - 1}"
        )
    if size > MAX_ENGINES:
        raise ConfigError(
            f"--data-parallel-size {size}: a server has at most {MAX_ENGINES} engines; start "
            "several behind a balancer (--data-parallel-hybrid-lb)"
        )
    _check(config, is_external or is_hybrid, local, size)
    decided: dict[str, int] = {}
    if size != total:
        decided["data_parallel_size"] = size
    if num_local is None and local != size:
        decided["data_parallel_size_local"] = local
    if first != parallel.first_rank:
        decided["data_parallel_start_rank"] = first
    return {name: Decision(value, why) for name, value in decided.items()}


def _check(config: Config, has_balancer: bool, local: int, size: int) -> None:
    parallel = config.parallel
    server = config.server
    by_ray = parallel.data_parallel_backend == "ray"
    if server.headless and server.attach:
        raise ConfigError(
            "--headless runs only an engine, and --attach only an API server: give one of them"
        )
    if server.headless and has_balancer:
        raise ConfigError("--headless has no port for a balancer: leave one of them out")
    if server.headless and not server.ipc_dir:
        raise ConfigError(
            "--headless needs --ipc-dir, the folder where API servers of this host find the engine "
            "with --attach"
        )
    if (server.attach or server.headless) and (size > 1 or by_ray):
        flag = "--attach" if server.attach else "--headless"
        raise ConfigError(
            f"{flag} supports one engine on this host, but the options start {size} "
            f"(--data-parallel-backend {parallel.data_parallel_backend}): leave one of them out, "
            "or use --api-server-count"
        )
    if local < size and not by_ray:
        raise ConfigError(
            f"{size - local} of {size} engines are on other hosts: add --data-parallel-backend ray"
        )
    if not local and has_balancer:
        raise ConfigError("--data-parallel-size-local 0: this host would run no engine")
    if not by_ray:
        return
    if has_balancer:
        raise ConfigError(
            "--data-parallel-backend ray works with one server: leave out --data-parallel-rank "
            "and --data-parallel-start-rank"
        )
    if parallel.executor == "ray":
        raise ConfigError(
            "--data-parallel-backend ray keeps each engine on one host: leave out --executor ray"
        )
    if config.cache.kv_transfer_config is not None:
        raise ConfigError(
            "--kv-transfer-config works on one host: leave it out with --data-parallel-backend ray"
        )
    if config.lora.enable_lora:
        raise ConfigError("--enable-lora: engines of other hosts do not get adapters; leave it out")
