"""Config: every option, its default, its bounds, its description; a file for each section but the
model's, which is here.

One definition: command-line flags (`--field-name`), `--config` files and docs/config.md all come
from these annotations. Field names are unique over the sections, so flags stay flat and equal to
vLLM's where the meaning is equal. A Config is frozen; what is learned at run time travels in
messages, not here.
"""

from __future__ import annotations

import functools
import logging
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from servd import peers, plugins
from servd.config._section import NotNegative, Positive, Section, about, plain
from servd.config.access import AccessConfig
from servd.config.batches import BatchConfig
from servd.config.cache import CacheConfig
from servd.config.lora import LoRAConfig
from servd.config.observability import ObservabilityConfig
from servd.config.parallel import ParallelConfig
from servd.config.scheduler import SchedulerConfig
from servd.config.server import ServerConfig
from servd.config.several_models import ModelsConfig
from servd.errors import ConfigError
from servd.hf import GenerationDefaults
from servd.sizes import parse_bytes
from servd.speculative import SpeculativeConfig, gather

log = logging.getLogger("servd.config")


class ModelConfig(Section, frozen=True):
    """Which model, and how it is loaded."""

    model: Annotated[
        str | None,
        about("Hugging Face id (`Qwen/Qwen3-0.6B`) or local folder. Default: the demo model."),
    ] = None
    served_model_name: Annotated[
        list[str],
        about(
            "Names that clients may use; the first is shown. Default: MODEL and its folder's name."
        ),
    ] = []
    tokenizer: Annotated[
        str | None, about("Folder or Hugging Face id of the tokenizer, if not the model's own.")
    ] = None
    revision: Annotated[str | None, about("Branch, tag or commit of the model on the hub.")] = None
    download_dir: Annotated[
        str | None, about("Cache folder for downloads. Default: the Hugging Face cache.")
    ] = None
    trust_remote_code: Annotated[
        bool, about("Run Python code that comes with the tokenizer when it has to be converted.")
    ] = False
    hf_overrides: Annotated[
        dict[str, Any] | None,
        about(
            "What to change in the model's config.json, as JSON. For contexts four times as long: "
            '`{"rope_scaling": {"rope_type": "yarn", "factor": 4}}`.'
        ),
    ] = None
    model_impl: Annotated[
        Literal["auto", "servd", "transformers"],
        about(
            "Who computes the layers: servd's own file for the model_type, or transformers with "
            "servd's attention, linear layers and loader. auto: servd's file, if there is one."
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        about(
            "Type of weights and activations. auto: the checkpoint's on CUDA, float32 on a CPU. A "
            "CPU computes in float32 whatever it is: 16 bits are how it stores weights and KV "
            "cache. But with bfloat16, matrix products by AMX or AVX512_BF16 round the activations "
            "to it."
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        about(
            "Round the weights as they are loaded. int8: 8 bits and a scale per output. int4: 4 "
            "bits, a scale and an offset per group of 32, 8 in the vocabulary's table. fp8: 8-bit "
            "floats, activations too, which Hopper multiplies twice as fast as 16 bits.",
            extra={"plugins": "servd.worker.quantization"},
        ),
    ] = None
    quantization_imatrix: Annotated[
        str | None,
        about(
            "Importance matrix for --quantization int4, a GGUF file of llama.cpp's "
            "`llama-imatrix`: it tells which weights are to be rounded with less error."
        ),
    ] = None
    cpu_activation_dtype: Annotated[
        Literal["auto", "int8"],
        about(
            "What a CPU with AMX or AVX-512 VNNI may round activations to where the weights have 4 "
            "or 8 bits. auto: nothing that float32 would not. int8: a scale per token, or per 1024 "
            "numbers of it, or 32 with weights in groups; prompts and batches are faster."
        ),
    ] = "auto"
    max_model_len: Annotated[
        Positive | None,
        about("Longest prompt plus output, in tokens. Default: what the model allows."),
    ] = None
    shorten_max_model_len: Annotated[
        bool | None,
        about(
            "Go on with a shorter context if the KV cache cannot hold max_model_len tokens, "
            "rather than refuse to start. Default: on unless --max-model-len is given."
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "pt", "dummy"],
        about(
            "auto: safetensors. pt: pytorch_model*.bin, of which only tensors are unpickled. "
            "dummy: seeded random weights, for tests."
        ),
    ] = "auto"
    seed: Annotated[
        NotNegative, about("Seed of everything random: dummy weights, requests without a seed.")
    ] = 0
    generation_config: Annotated[
        str,
        about(
            "Default sampling parameters: `auto` (the model's generation_config.json), `vllm` "
            "(neutral ones) or a folder that holds a generation_config.json."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        GenerationDefaults | None,
        about(
            'Default sampling parameters that win over those, as JSON: `{"temperature": 0.6}`. '
            "`max_new_tokens` is for who names no number, and in vLLM the most for all."
        ),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig | None,
        about(
            "Draft tokens ahead of the model, as JSON: "
            '`{"method": "ngram", "num_speculative_tokens": 4}`, keys as in vLLM. Outputs stay as '
            "they are, and come faster where the drafts are right. `demo` is the demo model's head."
        ),
    ] = None
    spec_method: Annotated[
        str | None,
        about(
            "How to draft: `method` of --speculative-config. Default: by the name of the draft.",
            extra={"plugins": "servd.worker.spec_decode"},
        ),
    ] = None
    spec_model: Annotated[
        str | None,
        about("Folder or Hugging Face id of the draft: `model` of --speculative-config."),
    ] = None
    spec_tokens: Annotated[
        Positive | None,
        about("Most drafts in a step: `num_speculative_tokens` of --speculative-config."),
    ] = None
    enforce_eager: Annotated[bool, about("Never use CUDA graphs, nor programs on a CPU.")] = False
    compile: Annotated[
        bool,
        about("Let torch.compile fuse the layers, in place of servd's own kernels. Needs CUDA."),
    ] = False
    batch_invariant: Annotated[
        bool,
        about("On CUDA, give a request the same bits whatever else is in its steps. Slower."),
    ] = False
    check_vectors: Annotated[
        bool,
        about(
            "Compare an embedding model, or one with a classification head, with transformers when "
            "it starts, and refuse to serve it where they differ."
        ),
    ] = True


class Config(Section, frozen=True):
    """All sections. Build one with `Config.load`, which checks every value."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()
    access: AccessConfig = AccessConfig()
    lora: LoRAConfig = LoRAConfig()
    batches: BatchConfig = BatchConfig()
    models: ModelsConfig = ModelsConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def num_steps_in_flight(self) -> int:
        """One for each stage, and one that is scheduled meanwhile. Resolved."""
        return self.parallel.pipeline_parallel_size + bool(self.scheduler.async_scheduling)

    @property
    def num_turns(self) -> int:
        """Steps in flight that must not have the same requests: see `Turns`."""
        return self.num_steps_in_flight if self.parallel.pipeline_parallel_size > 1 else 1

    @classmethod
    def load(cls, options: Mapping[str, Any]) -> Config:
        """Make a Config of flat options, e.g. `{"model": "gpt2", "max_num_seqs": 8}`.

        Strings are converted ("8" to 8, "2GiB" to bytes for kv_cache_memory).

        Raises:
            ConfigError: unknown option or bad value, with the option's name.
        """
        fields = options_by_name()
        nested: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            name, value = peers.translate(name.replace("-", "_"), value)
            if why := peers.why_needless(name):
                log.warning("%s has no effect: %s", flag_of(name), why)
                continue
            if name not in fields:
                raise peers.unknown(name, fields)
            if name == "kv_cache_memory" and isinstance(value, str):
                value = parse_bytes(value)
            section, field = fields[name]
            if isinstance(value, str) and field.default_factory is list:
                value = [value]
            if isinstance(value, str) and _is_object(field) and name != "speculative_config":
                value = _read_object(name, value)
            nested.setdefault(section, {})[name] = value
        gather(nested.get("model", {}))
        try:
            return msgspec.convert(nested, cls, strict=False)
        except msgspec.ValidationError as error:
            raise _explain(error, nested) from None

    def replace(self, **options: Any) -> Config:
        """A copy with some flat options changed; used by `resolve` and by tests."""
        fields = options_by_name()
        changed: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            changed.setdefault(fields[name][0], {})[name] = value
        replace = msgspec.structs.replace
        return replace(self, **{s: replace(getattr(self, s), **v) for s, v in changed.items()})


def _is_object(option: msgspec.structs.FieldInfo) -> bool:
    """Whether its value on a command line is a JSON object."""
    kind, _ = plain(option.type)
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return is_struct or typing.get_origin(kind) is dict


def _read_object(name: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{flag_of(name)} {text}: must be a JSON object: {error}") from None


@functools.cache  # which takes milliseconds, and every configuration asks
def options_by_name() -> Mapping[str, tuple[str, msgspec.structs.FieldInfo]]:
    """Option name -> name of its section in Config, and its field there."""
    return {
        option.name: (section.name, option)
        for section in msgspec.structs.fields(Config)
        for option in msgspec.structs.fields(section.type)
    }


def title_of(section: type) -> str:
    """What a section of Config is about."""
    return (section.__doc__ or "").splitlines()[0].rstrip(".")


def flag_of(option: str) -> str:
    """The command-line spelling of an option."""
    return f"--{option.replace('_', '-')}"


KINDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "text",
    "array": "a list",
}  # fmt: skip


def _explain(
    error: msgspec.ValidationError, nested: Mapping[str, Mapping[str, Any]]
) -> ConfigError:
    """ "Expected `int` >= 1 - at `$.cache.block_size`" as a sentence about a flag."""
    rule, _, path = str(error).partition(" - at `$.")
    section, name, *key = path.rstrip("`").partition("[")[0].split(".")
    kind, value, label = options_by_name()[name][1].type, nested[section][name], flag_of(name)
    for each in key:  # of a JSON object
        kind = typing.get_type_hints(plain(kind)[0], include_extras=True)[each]
        value, label = value[each], f"{label} {each}"
    # No secret in a log; what is wrong with a whole object names its keys.
    shown = "" if name == "api_key" or isinstance(value, Mapping) else f" {value}"
    match = re.match(r"Expected `(\w+)`(?P<length> of length)?(?P<bound> [<>]=? \S+?)?(,|$)", rule)
    if known := choices(kind):
        rule = f"must be one of: {', '.join(known)}"
    elif match and match["length"]:
        rule = "must not be empty"
    elif match:
        rule = f"must be {KINDS.get(match[1], match[1])}{match['bound'] or ''}"
    return ConfigError(f"{label}{shown}: {rule}")


def choices(hint: Any) -> tuple[str, ...]:
    """What an option may be: the values of the Literal inside its annotation, or the files of the
    package of plugins that its Meta names. A plugin may also come from elsewhere, as
    "module:attribute".
    """
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if isinstance(hint, Meta):
        extra = hint.extra or {}
        names = plugins.names(extra["plugins"]) if "plugins" in extra else []
        return (*extra.get("beside", ()), *names)
    parts = (*typing.get_args(hint), *getattr(hint, "__metadata__", ()))
    return next(filter(None, map(choices, parts)), ())
