"""Reads the default sampling parameters from generation_config.json."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from servd.base.errors import ConfigError, ModelNotFound
from servd.checkpoint.account import Account, account_for, without_nulls
from servd.checkpoint.config_json import read_json
from servd.checkpoint.model_spec import MAX_SIZE, ModelSpec
from servd.messages.params import MinP, RepetitionPenalty, SamplingParams, Temperature, TopK, TopP

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
LISTED = ("temperature", "top_p", "top_k", "min_p", *PENALTIES, "max_tokens")


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `--override-generation-config`, as in generation_config.json."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_SIZE)] | None = None


class _Generation(GenerationDefaults, frozen=True, kw_only=True, forbid_unknown_fields=False):
    do_sample: bool | None = None


def _read_generation(spec: ModelSpec, source: str) -> dict[str, Any]:
    """Return the generation_config.json that `--generation-config` names."""
    if source in ("auto", "vllm"):
        return spec.generation if source == "auto" else {}
    try:
        return read_json(Path(source) / "generation_config.json")
    except ModelNotFound as error:
        raise ConfigError(f"--generation-config {source}: {error}") from None


def generation_accounts(spec: ModelSpec, source: str) -> Iterator[Account]:
    """Yield the account of generation_config.json; `source`: `--generation-config`."""
    if generation := _read_generation(spec, source):
        file = "generation_config.json or config.json"
        yield account_for(file, without_nulls(generation), "generation")


def read_generation_defaults(
    spec: ModelSpec, source: str, override: GenerationDefaults | None = None
) -> dict[str, Any]:
    """Return the default sampling parameters from `--generation-config` (auto, vllm for none, or a
    folder), updated with `--override-generation-config`. Raises ConfigError for a value that no
    request could have.
    """
    generation = _read_generation(spec, source)
    try:
        stated = msgspec.convert(generation, _Generation)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"generation_config.json: {error}: correct it, or use --generation-config vllm"
        ) from None
    defaults = without_nulls(msgspec.structs.asdict(stated))
    if defaults.pop("do_sample", True) is False:
        defaults["temperature"] = 0.0  # as in transformers, whatever temperature is beside it
    if override is not None:
        defaults |= without_nulls(msgspec.structs.asdict(override))
    if "max_new_tokens" in defaults:
        defaults["max_tokens"] = defaults.pop("max_new_tokens")
    return defaults


def list_parameters(defaults: dict[str, Any]) -> dict[str, int | float]:
    """Return what holds for requests without sampling parameters. `defaults`: those above."""
    params = SamplingParams(**dict[str, Any](max_tokens=None) | defaults)
    return without_nulls({name: getattr(params, name) for name in LISTED})
