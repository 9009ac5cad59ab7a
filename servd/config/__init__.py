"""Config: every option with its default, bounds and description; one module per section.

Flags (`--field-name`), `--config` files and docs/reference/options.md are derived from these
annotations, and from the docstring below each field. Field names are unique across sections, so
that flags are flat. They equal vLLM's where the meaning is equal. A Config is frozen; messages
carry the values that are determined at run time.
"""

import functools
import logging
import os
import re
import typing
from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec
from msgspec import Meta

from servd.base import plugins
from servd.base.errors import ConfigError
from servd.base.python_syntax import field_docstrings
from servd.base.sizes import parse_bytes
from servd.checkpoint.short_names import full_name
from servd.config import flag_aliases
from servd.config._section import Section, plain
from servd.config.access import AccessConfig
from servd.config.batches import BatchConfig
from servd.config.cache import CacheConfig
from servd.config.lora import LoRAConfig
from servd.config.model import ModelConfig
from servd.config.multimodal import MultiModalConfig
from servd.config.observability import ObservabilityConfig
from servd.config.parallel import ParallelConfig
from servd.config.scheduler import SchedulerConfig
from servd.config.server import ServerConfig
from servd.config.several_models import ModelsConfig
from servd.config.speculative import SpeculativeConfig, gather

log = logging.getLogger("servd.config")

# Options that name files or folders; some also take text, or a model of the hub.
PATHS = ["model", "tokenizer", "chat_template", "api_key_file", "join_token_file", "attach"]
PATHS += ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "download_dir", "kv_cache_dir"]
PATHS += ["batch_dir", "lora_dir", "ipc_dir", "models_dir", "generation_config", "record_trace"]
PATHS += ["response_db", "fake_script", "allowed_local_media_path"]
SIZES = ("kv_cache_memory", "max_state_memory", "encoder_cache_memory", "response_max_bytes")
# Ends of the names of options whose path may not exist yet.
WRITTEN = ("_dir", "_db", "record_trace")


class Config(Section, frozen=True):
    """All sections. `Config.load` creates a Config and validates every value."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()
    access: AccessConfig = AccessConfig()
    lora: LoRAConfig = LoRAConfig()
    multimodal: MultiModalConfig = MultiModalConfig()
    batches: BatchConfig = BatchConfig()
    models: ModelsConfig = ModelsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def num_steps_in_flight(self) -> int:
        """The number of steps in flight: one per pipeline stage, and one for async scheduling."""
        num_stages = self.parallel.pipeline_parallel_size
        return num_stages + 1 if self.scheduler.async_scheduling else num_stages

    @property
    def num_micro_batches(self) -> int:
        """The number of consecutive steps that must not share requests: see `MicroBatches`."""
        return self.num_steps_in_flight if self.parallel.pipeline_parallel_size > 1 else 1

    @classmethod
    def load(cls, options: Mapping[str, Any]) -> Self:
        """Return a Config from flat options, e.g. `{"model": "gpt2", "max_num_seqs": 8}`.

        Strings are converted ("8" to 8, "2GiB" to bytes for SIZES). Raises ConfigError if
        an option is unknown or its value is invalid.
        """
        fields = options_by_name()
        nested: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            stated = str(value)
            name, value = flag_aliases.translate(name.replace("-", "_"), value)
            if why := flag_aliases.IGNORED_VALUES.get(name, {}).get(stated):
                log.warning("%s %s has no effect: %s", flag_of(name), stated, why)
            if why := flag_aliases.why_ignored(name):
                log.warning("%s has no effect: %s", flag_of(name), why)
                continue
            if name not in fields:
                raise flag_aliases.unknown(name, fields)
            if name == "model" and isinstance(value, str):
                value = full_name(value)
            if name in SIZES and isinstance(value, str):
                value = parse_bytes(value, flag_of(name))
            section, field = fields[name]
            if isinstance(value, str) and field.default_factory is list:
                value = [value]
            if isinstance(value, str) and _is_object(field) and name != "speculative_config":
                value = _read_object(name, value)
            nested.setdefault(section, {})[name] = value
        gather(nested.get("model", {}))
        model = nested.get("model", {})
        if (keys := model.get("speculative_config")) is not None:
            try:
                model = model | {"speculative_config": SpeculativeConfig.from_keys(keys)}
            except msgspec.ValidationError as error:
                text = str(error).replace("`$.", "`$.model.speculative_config.")
                raise _explain(text, nested) from None
        try:
            return msgspec.convert(nested | {"model": model}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise _explain(str(error), nested) from None

    def replace(self, **options: Any) -> Self:
        """Return a copy with some flat options changed. Used by `resolve` and by tests."""
        fields = options_by_name()
        changed: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            changed.setdefault(fields[name][0], {})[name] = value
        replace = msgspec.structs.replace
        return replace(self, **{s: replace(getattr(self, s), **v) for s, v in changed.items()})

    def with_absolute_paths(self) -> Self:
        """Return a copy whose files and folders do not depend on the working folder, which may be
        removed before a process is restarted. Raises ConfigError: it was removed already.
        """
        fields = options_by_name()
        changed: dict[str, Any] = {}
        for name in PATHS:
            value = getattr(getattr(self, fields[name][0]), name)
            if name == "generation_config" and value in ("auto", "vllm"):  # no folders
                continue
            if isinstance(value, str) and (name.endswith(WRITTEN) or os.path.exists(value)):
                try:
                    changed[name] = os.path.abspath(value)
                except FileNotFoundError:
                    hint = "the working folder was removed; give an absolute path"
                    raise ConfigError(f"{flag_of(name)} {value}: {hint}") from None
        draft = self.model.speculative_config
        if draft and draft.model and os.path.exists(draft.model):
            draft = msgspec.structs.replace(draft, model=os.path.abspath(draft.model))
            changed["speculative_config"] = draft
        return self.replace(**changed)


def _is_object(option: msgspec.structs.FieldInfo) -> bool:
    """Return whether the option's value on a command line is a JSON object."""
    kind, _ = plain(option.type)
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return is_struct or typing.get_origin(kind) is dict


def _read_object(name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag_of(name)} {text}: must be a JSON object: {error}") from None


@functools.cache  # takes milliseconds
def options_by_name() -> Mapping[str, tuple[str, msgspec.structs.FieldInfo]]:
    """Return, by option name, the name of its section in Config and the option's field."""
    return {
        option.name: (section.name, option)
        for section in msgspec.structs.fields(Config)
        for option in msgspec.structs.fields(section.type)
    }


@functools.cache  # takes milliseconds
def descriptions() -> Mapping[str, str]:
    """Return the description of each option: the docstring below its field."""
    texts: dict[str, str] = {}
    for section in msgspec.structs.fields(Config):
        texts |= field_docstrings(section.type)
    return texts


def title_of(section: type) -> str:
    """Return the title of a section of Config."""
    return (section.__doc__ or "").splitlines()[0].rstrip(".")


def flag_of(option: str) -> str:
    """Return the command-line spelling of an option."""
    return f"--{option.replace('_', '-')}"


KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
}


def _explain(text: str, nested: Mapping[str, Mapping[str, Any]]) -> ConfigError:
    """Return "Expected `int` >= 1 - at `$.cache.block_size`" as an error about a flag."""
    rule, _, path = text.partition(" - at `$.")
    section, name, *key = path.rstrip("`").partition("[")[0].split(".")
    kind = options_by_name()[name][1].type
    value = nested[section][name]
    label = flag_of(name)
    for part in key:  # of a JSON object
        kind = typing.get_type_hints(plain(kind)[0], include_extras=True)[part]
        value = value[part]
        label = f"{label} {part}"
    # Do not log secrets; an error about a whole object names its keys.
    value_text = "" if name == "api_key" or isinstance(value, Mapping) else f" {value}"
    match = re.match(r"Expected `(\w+)`(?P<length> of length)?(?P<bound> [<>]=? \S+?)?(,|$)", rule)
    if allowed := choices(kind):
        rule = f"must be one of: {', '.join(allowed)}"
    elif match and match["length"]:
        rule = "must not be empty"
    elif match:
        rule = f"must be {KINDS.get(match[1], match[1])}{match['bound'] or ''}"
    return ConfigError(f"{label}{value_text}: {rule}")


def choices(hint: Any) -> tuple[str, ...]:
    """Return the choices of an option: the values of the Literal in its annotation, or the modules
    of the plugin package in its Meta. External plugins are given as "module:attribute".
    """
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if isinstance(hint, Meta):
        extra = hint.extra or {}
        names = plugins.names(extra["plugins"]) if "plugins" in extra else []
        return (*extra.get("beside", ()), *names)
    parts = (*typing.get_args(hint), *getattr(hint, "__metadata__", ()))
    return next(filter(None, map(choices, parts)), ())
