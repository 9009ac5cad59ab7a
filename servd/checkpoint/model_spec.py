"""ModelSpec: the facts about a model that servd needs, from its config.json."""

import logging
from pathlib import Path
from typing import Any

import msgspec

from servd.base.errors import UnsupportedModel
from servd.checkpoint.account import AccountTable, read_tables
from servd.checkpoint.config_json import read_config, read_json
from servd.checkpoint.multimodal_config import MultiModalSpec, multimodal_spec
from servd.checkpoint.overrides import override

log = logging.getLogger("servd.hf")

WITHOUT_ATTENTION = ("mamba2",)  # model types
STATE_LAYERS = ("conv", "linear_attention", "mamba")  # in layer_types
MAX_SIZE = 2**31 - 1  # of any size in config.json


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a model that servd needs: config.json with uniform names."""

    folder: str  # "" for the fake model
    model_type: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    max_model_len: int | None = None  # of requests, if less
    dtype: str  # of the checkpoint: float32 | bfloat16 | float16
    eos_token_ids: list[int]
    # config.json, or its text part; model files read their own keys from it.
    config: dict[str, Any]
    generation: dict[str, Any] = {}  # generation_config.json, or its keys in config.json
    multimodal: MultiModalSpec | str = "it is a text model"  # a text: why it reads no pictures

    @property
    def keeps_state(self) -> bool:
        """Whether layers have a recurrent state besides the KV cache, or in place of it."""
        return not self.num_heads or len(self.layers_with_cache) < self.num_layers

    @property
    def layers_with_cache(self) -> list[int]:
        """The numbers of the layers that have a KV cache. The others keep a state instead."""
        kinds = self.config.get("layer_types") or [""] * self.num_layers
        return [layer for layer, kind in enumerate(kinds) if kind not in STATE_LAYERS]

    @property
    def input_modalities(self) -> list[str]:
        return ["text"] if isinstance(self.multimodal, str) else ["text", "image"]

    @property
    def embed_size(self) -> int:
        """The numbers that a vision tower computes for an image token."""
        multimodal = self.multimodal
        num_features = 1 if isinstance(multimodal, str) else 1 + multimodal.num_deepstack
        return num_features * self.hidden_size

    @property
    def embed_bytes(self) -> int:
        """The bytes of these numbers, at most: the worker computes in up to 32 bits."""
        return 4 * self.embed_size

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        numbers = 2 * self.num_kv_heads * self.head_dim
        if (latent := self.config.get("kv_lora_rank")) is not None:  # MLA caches only this
            numbers = latent + self.config["qk_rope_head_dim"]
        return len(self.layers_with_cache) * numbers * dtype_bytes


# A model for `--executor fake`: one token per byte plus an end-of-sequence token.
FAKE_SPEC = ModelSpec(
    folder="",
    model_type="fake",
    architecture="Fake",
    vocab_size=257,
    hidden_size=16,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    max_position_embeddings=8192,
    dtype="float32",
    eos_token_ids=[256],
    config={},
)


def read_spec(folder: Path | str, overrides: dict[str, Any] | None = None) -> ModelSpec:
    """Return the spec of a model folder, from config.json with `--hf-overrides` and
    generation_config.json. Raises ModelNotFound if config.json is missing or broken;
    UnsupportedModel if a key is missing; ConfigError if the overrides do not apply to this model.
    """
    folder = Path(folder)
    config = override(read_config(folder), overrides or {})
    aliases = read_tables()["config"].aliases
    generation = read_json(folder / "generation_config.json", _generation_in(config))

    def wrong(why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{folder}/config.json: {why}")

    def find(name: str, default: Any = None) -> Any:
        names = [name, *aliases.get(name, [])]
        value = next((config[key] for key in names if config.get(key) is not None), default)
        if value is None:
            raise wrong(
                f"it has none of: {', '.join(names)}; docs/reference/models.md lists what servd "
                "runs"
            )
        return value

    def size(name: str, default: int | None = None) -> int:
        value = find(name, default)
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise wrong(f"{name} {value!r:.50} is not a size")
        return value

    model_type = find("model_type")
    if not isinstance(model_type, str):
        raise wrong(f"model_type {model_type!r:.50} is no name")
    if reason := read_tables().get(f"config.{model_type}", AccountTable()).refused:
        raise wrong(f"model_type {model_type} is not supported: {reason}")
    has_attention = model_type not in WITHOUT_ATTENTION
    num_heads = size("num_attention_heads") if has_attention else 0
    hidden_size = size("hidden_size")
    architectures = find("architectures", [""])
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise wrong("architectures must be a list of names")
    vocab_size = size("vocab_size")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    head_dim = size("head_dim", hidden_size // num_heads or 1) if has_attention else 0
    # Multi-head latent attention has sizes of its own.
    has_sizes = not has_attention or config.get("head_dim") or config.get("kv_lora_rank")
    if not has_sizes and hidden_size % num_heads:
        raise wrong(f"hidden_size {hidden_size} is no multiple of {num_heads} heads")
    num_layers = size("num_hidden_layers")
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and len(types) == num_layers):
        raise wrong(f"layer_types {types!r:.50} is no list of {num_layers} types")
    return ModelSpec(
        folder=str(folder),
        model_type=model_type,
        architecture=architectures[0] if architectures else "",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads) if has_attention else 0,
        head_dim=head_dim,
        max_position_embeddings=size("max_position_embeddings"),
        dtype=find("dtype", "float32"),
        eos_token_ids=_read_eos(folder, eos, vocab_size),
        config=config,
        generation=generation,
        multimodal=multimodal_spec(folder, read_json(folder / "config.json"), vocab_size),
    )


def _generation_in(config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of generation_config.json that older models have in config.json."""
    table = read_tables()["generation"]
    keys = config.keys() & {*table.used, *table.only} - {"eos_token_id"}
    return {key: config[key] for key in keys if config[key] != table.defaults.get(key)}


def _read_eos(folder: Path, eos: Any, vocab_size: int) -> list[int]:
    """Return the tokens that end an answer, without those that the model cannot write."""
    token_ids = [] if eos is None else eos
    token_ids = token_ids if isinstance(token_ids, list) else [token_ids]
    if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
        raise UnsupportedModel(
            f"{folder}: eos_token_id {eos!r:.50} is not the number of a token, or a list of them: "
            "correct it in generation_config.json and config.json"
        )
    if beyond := [token_id for token_id in token_ids if token_id >= vocab_size]:
        words = "%s: eos_token_id %s is ignored: it is beyond the vocabulary of %d tokens"
        log.warning(words, folder, beyond, vocab_size)
    return [token_id for token_id in token_ids if token_id < vocab_size]
