"""Resolves every "auto" of a Config and validates its options for a model and a machine."""

import logging

from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config, data_parallel
from servd.config.checks.cache import check_cache
from servd.config.checks.lora import check_adapters
from servd.config.checks.model import resolve_computation, resolve_names, resolve_types
from servd.config.checks.observability import check_observability
from servd.config.checks.parallel import check_experts, check_remote, check_stages, resolve_devices
from servd.config.checks.plugins import check_plugins
from servd.config.checks.scheduler import resolve_lengths
from servd.config.data_parallel import Decision
from servd.config.machine import Machine

log = logging.getLogger("servd.resolve")


def resolve(config: Config, spec: ModelSpec, machine: Machine) -> Config:
    """Return `config` with the values that `decide` chooses."""
    return decide(config, spec, machine)[0]


def decide(config: Config, spec: ModelSpec, machine: Machine) -> tuple[Config, dict[str, Decision]]:
    """Choose and log a value for every "auto" and None that needs one; return the resolved config
    and the decisions by option. `attention_backend` stays auto, because only the worker, which has
    torch, knows the supported backends. Raises ConfigError if options are incompatible with each
    other, this machine or this model.
    """
    decided: dict[str, Decision] = {}

    def accept(decisions: dict[str, Decision]) -> None:
        nonlocal config
        decided.update(decisions)
        config = config.replace(**{name: decision.value for name, decision in decisions.items()})

    check_plugins(config, spec)
    accept(data_parallel.divide(config))
    accept(resolve_devices(config, spec, machine))
    accept(resolve_lengths(config, spec))
    accept(resolve_computation(config, spec))
    accept(resolve_types(config, spec.folder))
    check_cache(config)
    check_experts(config, spec)
    check_stages(config, spec)
    accept(resolve_names(config, spec))
    check_adapters(config)
    check_remote(config)
    check_observability(config)
    for name, decision in decided.items():
        log.info("%s: %s (%s)", name, decision.value, decision.why)
    return config, decided
