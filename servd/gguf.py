"""GGUF: one file with weights, tokenizer and chat template, read as the folder that it would be.

The folder has what Hugging Face's would, made of the file's metadata, and a link to the file. Its
weights are read by servd/worker/quantization/gguf.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from servd.errors import ModelNotFound, UnsupportedModel

WEIGHTS = "model.gguf"  # the link in the folder
# general.architecture -> model_type and class.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# What values of another kind than expected, or out of range, make of the code that uses them.
DAMAGED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, struct.error)
STRING, ARRAY = 8, 9
MAX_LENGTH = 1 << 22  # values in a list: each takes up to 100 bytes once it is read
MAX_DIMS = 4
# By the number of a metadata value's type.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
AFTER_NUMBERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> how text is cut before the merges: an expression, or what precedes GPT-2's.
CUTS: dict[str, str | list[dict[str, Any]]] = {
    "gpt-2": [],
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "llama-bpe": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{AFTER_NUMBERS}",
    "qwen2": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{AFTER_NUMBERS}",
}


class TensorInfo(NamedTuple):
    """Where a tensor is."""

    shape: list[int]  # outermost dimension first
    type: int
    offset: int  # bytes from the beginning of the file


class Header:
    """What stands before the weights.

    Raises:
        ModelNotFound: the file is missing, not GGUF, or torn.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with self._data:
                self._at = 0
                self._read()
        except (OSError, *DAMAGED) as error:
            raise ModelNotFound(
                f"{path} cannot be read as GGUF, it may be cut off or damaged: {error}"
            ) from None

    def _read(self) -> None:
        magic, version = self._data[:4], self._numbers("4xI")[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}; expected 2 or 3")
        num_tensors, num_values = self._numbers("QQ")
        for _ in range(num_values):
            key = self._string()
            self.metadata[key] = self._value(self._numbers("I")[0])
        found = {}
        for _ in range(num_tensors):
            name, (num_dims,) = self._string(), self._numbers("I")
            if num_dims > MAX_DIMS:
                raise ValueError(f"tensor {name[:100]} of {num_dims} dimensions")
            *dims, kind, offset = self._numbers(f"{num_dims}QIQ")
            found[name] = TensorInfo(dims[::-1], kind, offset)
        alignment = self.metadata.get("general.alignment", 32)
        start = -(-self._at // alignment) * alignment
        self.tensors = {n: t._replace(offset=start + t.offset) for n, t in found.items()}
        if any(tensor.offset >= len(self._data) for tensor in self.tensors.values()):
            raise ValueError("it ends before its weights do")

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (size,) = self._numbers("Q")
        self._at += size
        return self._data[self._at - size : self._at].decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._numbers(NUMBERS[kind])[0]
        item, length = self._numbers("IQ")
        if item == ARRAY or length > MAX_LENGTH:
            raise ValueError(f"a list of {length} values of type {item}")
        if item == STRING:
            return [self._string() for _ in range(length)]
        return list(self._numbers(f"{length}{NUMBERS[item]}"))


def find_file(model: str) -> Path | None:
    """The GGUF file that MODEL names: itself, or of a folder by a part of its name,
    "folder:Q4_K_M"; None: it names none.

    Raises:
        ModelNotFound: the folder has no such file, or several.
    """
    if model.endswith(".gguf") and os.path.isfile(model):
        return Path(model).resolve()
    folder, _, tag = model.rpartition(":")
    if not folder or not os.path.isdir(folder):
        return None
    files = sorted(Path(folder).glob("*.gguf"))
    found = [file for file in files if tag.lower() in file.name.lower()]
    if len(found) != 1:
        names = ", ".join(file.name for file in found or files) or "no .gguf file"
        raise ModelNotFound(f"{model} names {len(found)} files, there must be one: it has {names}")
    return found[0].resolve()


def as_folder(path: Path) -> Path:
    """A folder with config.json and tokenizer_config.json of a GGUF file, and the file under the
    name `WEIGHTS`; in a cache that all servers share.

    Raises:
        ModelNotFound: see `Header`.
        UnsupportedModel: see `config_of`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "servd", "gguf")
    stat = path.stat()
    key = (
        f"{path} {stat.st_mtime_ns} {stat.st_size} 1"  # raise the number when what is made changes
    )
    target = cache / hashlib.sha256(key.encode()).hexdigest()[:24]
    if target.exists():
        return target
    header = Header(path)
    try:
        config = config_of(header)
        files = {"config.json": config, "tokenizer_config.json": tokenizer_config(header)}
    except DAMAGED as error:
        raise ModelNotFound(f"{path}: its metadata is incomplete or wrong: {error!r}") from None
    num_layers = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    if num_layers != config["num_hidden_layers"]:
        raise ModelNotFound(
            f"{path} has {num_layers} layers, its metadata says {config['num_hidden_layers']}"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        for name, content in files.items():
            (made / name).write_text(json.dumps(content), encoding="utf8")
        (made / WEIGHTS).symlink_to(path)
        try:
            made.rename(target)
        except OSError:  # another server was faster
            if not target.exists():
                raise
    return target


def config_of(header: Header) -> dict[str, Any]:
    """What config.json would say.

    Raises:
        UnsupportedModel: an architecture or a rotation that servd would compute wrongly.
    """
    values, tensors = header.metadata, header.tensors
    arch = values.get("general.architecture")
    if arch not in [*ARCHITECTURES]:
        raise UnsupportedModel(
            f"{header.path}: GGUF of architecture {arch!r} is not supported, only "
            f"{', '.join(ARCHITECTURES)}: serve the original checkpoint"
        )
    if values.get("split.count", 1) > 1:
        raise UnsupportedModel(
            f"{header.path} is one of {values['split.count']} files: join them with "
            "llama-gguf-split --merge"
        )

    def of(key: str, default: Any = None) -> Any:
        return values.get(f"{arch}.{key}", default)

    model_type, model_class = ARCHITECTURES[arch]
    num_heads, hidden_size = of("attention.head_count"), of("embedding_length")
    token_ids = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return {
        "architectures": [model_class],
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": of("attention.head_count_kv", num_heads),
        "head_dim": of("attention.key_length", hidden_size // num_heads),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": _rotation(header, of),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": [*dict.fromkeys(i for i in token_ids if i is not None)],
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf"},
    }


def _rotation(header: Header, of: Any) -> dict[str, Any]:
    theta, kind = of("rope.freq_base", 10000.0), of("rope.scaling.type", "none")
    if kind not in ("none", "linear") or "rope_freqs.weight" in header.tensors:
        scaling = "rope_freqs.weight" if kind in ("none", "linear") else f"rope scaling {kind!r}"
        raise UnsupportedModel(
            f"{header.path} has {scaling}, which is not supported: serve the original checkpoint"
        )
    factor = of("rope.scaling.factor", 1.0)
    if kind == "linear" and math.isfinite(factor) and factor != 1:
        return {"rope_type": "linear", "factor": factor, "rope_theta": theta}
    return {"rope_type": "default", "rope_theta": theta}


def tokenizer_config(header: Header) -> dict[str, Any]:
    values = header.metadata
    tokens = values.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {}
    for name in ("bos", "eos", "unk", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(name, name)
        if (token_id := values.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token_id]
    if template := values.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def write_tokenizer(folder: Path) -> Path:
    """The tokenizer.json of a folder made by `as_folder`, which is made there.

    Raises:
        ModelNotFound: the tokenizer is of a kind that is not known.
    """
    values = Header(folder / WEIGHTS).metadata
    model, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in [*CUTS]:
        raise ModelNotFound(
            f"{(folder / WEIGHTS).resolve()} has a tokenizer {model!r} with pre-tokenizer {pre!r}; "
            f"known are gpt2 with {', '.join(CUTS)}: name the original's with --tokenizer FOLDER"
        )
    try:
        tokenizer = _byte_level_bpe(values, CUTS[pre], pre)
    except DAMAGED as error:
        raise ModelNotFound(f"{folder}: its tokenizer is incomplete or wrong: {error!r}") from None
    file = folder / "tokenizer.json"
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf8") as scratch:
        json.dump(tokenizer, scratch)
    os.replace(scratch.name, file)
    return file


def _byte_level_bpe(
    values: dict[str, Any], cuts: str | list[dict[str, Any]], pre: str
) -> dict[str, Any]:
    tokens = values["tokenizer.ggml.tokens"]
    types = values.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if isinstance(cuts, str):
        split = {"type": "Split", "pattern": {"Regex": cuts}, "behavior": "Isolated"}
        steps = [split | {"invert": False}, by_bytes | {"use_regex": False}]
    else:
        steps = [*cuts, by_bytes | {"use_regex": True}]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    bos_id = values.get("tokenizer.ggml.bos_token_id")
    bos = tokens[bos_id] if values.get("tokenizer.ggml.add_bos_token") else None
    first = [] if bos is None else [{"SpecialToken": {"id": bos, "type_id": 0}}]
    special = {} if bos is None else {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, "special": types[i] == CONTROL, **flags}
            for i, token in enumerate(tokens)
            if types[i] in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*first, sequence],
            "pair": [*first, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": special,
        },
        "decoder": by_bytes | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in values["tokenizer.ggml.merges"]],
        },
    }
