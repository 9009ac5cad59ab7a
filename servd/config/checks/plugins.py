"""Checks that the plugins which options name exist."""

from servd.base import plugins
from servd.base.errors import ConfigError
from servd.checkpoint import quantization_config
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config, choices, flag_of, options_by_name
from servd.config.checks.model import check_activations


def check_plugins(config: Config, spec: ModelSpec) -> None:
    """Check that plugins exist, before the processes that use them import anything."""
    for name, (section, option) in options_by_name().items():
        value = getattr(getattr(config, section), name)
        allowed = choices(option.type)
        if allowed and value is not None and ":" not in value:
            if value.replace("-", "_") not in allowed:
                there_are = ", ".join(allowed)
                raise ConfigError(f"{flag_of(name)} {value!r} is unknown; there are: {there_are}")
    quantization_config.quant_method_of(spec.folder, config.model.quantization)
    check_activations(config, spec)
    if config.model.quantization_imatrix and config.model.quantization != "int4":
        raise ConfigError("--quantization-imatrix only works with 4 bits: add --quantization int4")
    if speculative := config.model.speculative_config:
        flag = "--speculative-config:"
        size = speculative.draft_tensor_parallel_size
        plugins.check(f"{flag} method", "servd.worker.spec_decode", speculative.method)
        if size not in (None, config.parallel.tensor_parallel_size):
            raise ConfigError(
                f"{flag} draft_tensor_parallel_size {size}: the draft uses the model's "
                f"{config.parallel.tensor_parallel_size} devices; leave it out"
            )
