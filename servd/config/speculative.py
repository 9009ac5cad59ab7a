"""SpeculativeConfig: how tokens are drafted ahead of the model; keys as in vLLM's JSON."""

import difflib
import json
import typing
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from servd.base.errors import ConfigError
from servd.config.flag_aliases import SPECULATIVE_KEYS

FLAG = "--speculative-config"
MAX_GRAMMAR_TOKENS = 16  # computed with the token before, for one request in one step

MOST_DRAFTS = 64
DEFAULT_DRAFTS = 5
# Not from servd.config, which imports this module.
Positive = Annotated[int, Meta(ge=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
# Part of the draft's name -> its method, the most specific first.
METHODS_BY_NAME = {
    "[ngram]": "ngram",
    "eagle3": "eagle3",
    "eagle-": "eagle",
    "medusa": "medusa",
    "dflash": "dflash",
    "dspark": "dspark",
}
NEEDS_MODEL = {"draft_model", "eagle", "eagle3", "medusa"}
READS_MODEL = NEEDS_MODEL | {"mtp"}
# Beginning of a key -> the methods that read it; a method outside servd may read any key.
READ_BY = {
    "prompt_lookup_": {"ngram"},
    "suffix_decoding_": {"suffix"},
    "model": READS_MODEL,
    "revision": READS_MODEL,
    "quantization": READS_MODEL,
    "max_model_len": READS_MODEL,
    "draft_": READS_MODEL,
}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of `--speculative-config`. `from_keys` fills in "" and 0."""

    method: str = ""  # a file of servd/worker/spec_decode; by default from the name of `model`
    model: str | None = None  # folder or id of the draft; of mtp the model's own, unless given
    # Most drafts of a request in a step; how many it gets is measured. Of medusa it stays 0 until
    # the heads are found.
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MOST_DRAFTS)] = 0

    # Options of a draft that is a model.
    revision: str | None = None
    quantization: str | None = None
    max_model_len: Positive | None = None  # nothing is drafted past it
    draft_tensor_parallel_size: Positive | None = None
    draft_sample_method: Literal["greedy"] = "greedy"  # the likeliest tokens

    # ngram
    prompt_lookup_min: Positive = 0
    prompt_lookup_max: Positive = 0

    # suffix
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=1, le=MOST_DRAFTS)] = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = 10000
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=64)] = 1.0
    suffix_decoding_min_token_prob: Probability = 0.1

    # synthetic, for benchmarks: drafts are kept by chance, at given rates, whatever they are.
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    synthetic_acceptance_rates: list[Probability] | None = None  # that all up to it are kept
    synthetic_acceptance_length: Annotated[float, Meta(ge=1)] | None = None  # mean, with the next

    @classmethod
    def from_keys(cls, keys: Mapping[str, Any]) -> Self:
        """Return the configuration of `keys`, with missing values filled in.

        Raises:
            msgspec.ValidationError: a value has a wrong type or is out of bounds.
            ConfigError: keys contradict each other.
        """
        config = msgspec.convert(keys, cls, strict=False)
        model = config.model
        if not config.method and not model:
            raise ConfigError(
                f'{FLAG}: needs "method", or a "model" whose name contains the method'
            )
        method = config.method or _named_by(model)
        if method in NEEDS_MODEL and not model:
            raise ConfigError(
                f'{FLAG}: method {method} needs "model": the folder or id of its draft'
            )
        depth = DEFAULT_DRAFTS
        if method == "suffix":
            depth = config.suffix_decoding_max_tree_depth
        elif method == "medusa":
            depth = 0  # as many as it has heads: `with_heads`
        low = config.prompt_lookup_min or config.prompt_lookup_max or 5
        high = config.prompt_lookup_max or low
        if low > high:
            raise ConfigError(f"{FLAG}: prompt_lookup_min {low} is above prompt_lookup_max {high}")
        config = msgspec.structs.replace(
            config,
            method=method,
            model=None if model == "[ngram]" else model,
            num_speculative_tokens=config.num_speculative_tokens or depth,
            prompt_lookup_min=low,
            prompt_lookup_max=high,
        )
        config._check_synthetic()
        return config

    @property
    def acceptance_chances(self) -> list[float] | None:
        """The synthetic chance, by position, that a draft is kept if the drafts before it are."""
        if (rates := self.synthetic_acceptance_rates) is not None:
            return [rate / before if before else 0.0 for before, rate in pairwise([1.0, *rates])]
        if (length := self.synthetic_acceptance_length) is None:
            return None
        # the same chance everywhere: 1 + a + a**2 + ... is the length
        low = 0.0
        high = 1.0
        for _ in range(50):
            middle = (low + high) / 2
            is_less = sum(middle**i for i in range(self.num_speculative_tokens + 1)) < length
            low, high = (middle, high) if is_less else (low, middle)
        return [high] * self.num_speculative_tokens

    def with_heads(self, num_heads: int | None) -> Self:
        """Return the configuration for a draft with `num_heads` heads: one draft per head, unless
        another number of drafts is given.
        """
        if self.num_speculative_tokens:
            return self
        return msgspec.structs.replace(self, num_speculative_tokens=num_heads or DEFAULT_DRAFTS)

    def _check_synthetic(self) -> None:
        rates = self.synthetic_acceptance_rates
        length = self.synthetic_acceptance_length
        num_drafts = self.num_speculative_tokens
        num_targets = 2 - [rates, length].count(None)
        if num_targets != (1 if self.rejection_sample_method == "synthetic" else 0):
            raise ConfigError(
                f'{FLAG}: rejection_sample_method "synthetic" needs one of '
                "synthetic_acceptance_rates and synthetic_acceptance_length, which only it reads"
            )
        if rates is not None and (len(rates) != num_drafts or rates != sorted(rates, reverse=True)):
            raise ConfigError(
                f"{FLAG}: synthetic_acceptance_rates must be {num_drafts} numbers, one for each of "
                "num_speculative_tokens, none larger than the one before it"
            )
        if length is not None and length > num_drafts + 1:
            raise ConfigError(
                f"{FLAG}: synthetic_acceptance_length {length} is above num_speculative_tokens + 1 "
                f"= {num_drafts + 1}"
            )


def _named_by(model: str | None) -> str:
    """Return the method that the name of a draft model implies."""
    name = (model or "").lower()
    return next((made for part, made in METHODS_BY_NAME.items() if part in name), "draft_model")


def readers(key: str, method: str) -> set[str]:
    """Return the methods that read `key`; empty if `method` is one of them."""
    of = next((of for start, of in READ_BY.items() if key.startswith(start)), {method})
    return set() if method in of or ":" in method else of


def max_num_samples(max_num_seqs: int, max_num_batched_tokens: int, max_drafts: int) -> int:
    """Return the maximum tokens that a step samples: one per request, one after each draft, and one
    after each forced token of a grammar, which only one request has in a step.
    """
    return min(max_num_seqs * (1 + max_drafts) + MAX_GRAMMAR_TOKENS, max_num_batched_tokens)


# Options -> their keys in --speculative-config.
FLAT = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}


def gather(options: dict[str, Any]) -> None:
    """Replace the option and its flat flags by one `speculative_config`, in the options of a model.

    Raises ConfigError if the value is not a JSON object, a key is unknown or not read by the
    method, or a key is given twice.
    """
    raw = options.pop("speculative_config", None)
    keys = {} if raw is None else read_keys(raw)
    for option, key in FLAT.items():
        if (value := options.pop(option, None)) is not None:
            if key in keys:
                flag = option.replace("_", "-")
                raise ConfigError(f'--{flag} {value}: {FLAG} has "{key}" too; give it once')
            keys[key] = value
    method = keys.get("method") or _named_by(str(keys.get("model") or ""))
    for key, value in keys.items():
        if value != "[ngram]" and (of := readers(key, str(method))):
            raise ConfigError(
                f'{FLAG}: method {method} does not read "{key}", which is only for '
                f"{', '.join(sorted(of))}; leave it out or change the method"
            )
    if keys or raw is not None:
        options["speculative_config"] = keys


def read_keys(value: Any) -> dict[str, Any]:
    """Return the keys of `--speculative-config`, from JSON or a table. Raises ConfigError."""
    if isinstance(value, str) and value.replace("-", "_").isidentifier():
        value = {"method": value}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(
                f"{FLAG} {value}: not JSON ({error}); write e.g. "
                """'{"method": "ngram", "num_speculative_tokens": 4}'"""
            ) from None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"""{FLAG} {value}: must be a JSON object, e.g. '{{"method": "ngram"}}'"""
        )
    fields = typing.get_type_hints(SpeculativeConfig)
    for key in value:
        if reason := SPECULATIVE_KEYS.get(key):
            raise ConfigError(f'{FLAG}: servd has no "{key}": {reason}')
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(fields)}"
            raise ConfigError(f'{FLAG}: unknown key "{key}"; {hint}')
    return {key: item for key, item in value.items() if item is not None}
