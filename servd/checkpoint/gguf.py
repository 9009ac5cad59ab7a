"""GGUF: one file with weights, tokenizer and chat template, served as a Hugging Face folder.
`servd/worker/quantization/gguf.py` reads the weights.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servd.base import compat
from servd.base.errors import ModelNotFound, UnsupportedModel
from servd.checkpoint.cached_folder import make_cached_folder

if TYPE_CHECKING:
    from gguf import GGUFReader

WEIGHTS = "model.gguf"  # the link in the folder
ARCHITECTURES = ("llama", "qwen2", "qwen3")
# Exceptions that a damaged file raises in gguf, or its values in the code that uses them.
DAMAGED = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
    struct.error,
)
MAX_LENGTH = 1 << 21  # values in a list: each takes up to 200 bytes in memory
# tokenizer.ggml.token_type
CONTROL = 3
USER_DEFINED = 4
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
AFTER_NUMBERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre -> the expression that cuts text before the merges. None: GPT-2's.
CUTS = {
    "gpt-2": None,
    "smollm": None,  # and each digit is alone
    "llama-bpe": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{AFTER_NUMBERS}",
    "qwen2": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{AFTER_NUMBERS}",
}


def open_file(path: Path) -> tuple[GGUFReader, dict[str, Any]]:
    """Map a file; return its reader and its metadata. Raises ModelNotFound if the file is missing,
    not GGUF, or damaged; UnsupportedModel if the package `gguf` is not installed.
    """
    try:
        reader_class = compat.make_gguf_reader(MAX_LENGTH)
    except ImportError:
        raise UnsupportedModel(
            f'{path}: reading GGUF needs the package gguf: pip install "servd[gguf]"'
        ) from None
    try:
        reader = reader_class(path, "c")  # torch warns of memory that it could not write to
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except (OSError, *DAMAGED) as error:
        raise ModelNotFound(
            f"{path} cannot be read as GGUF, it may be cut off or damaged: {error}"
        ) from None


def find_file(model: str) -> Path | None:
    """Return the GGUF file that MODEL names: a path, or a folder and a part of the file name,
    "folder:Q4_K_M"; None if MODEL names no GGUF file. Raises ModelNotFound if the folder has no
    such file, or several.
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
        raise ModelNotFound(
            f"{model} matches {len(found)} files, must match one; the folder has {names}"
        )
    return found[0].resolve()


def as_folder(path: Path) -> Path:
    """Return a folder with config.json and tokenizer_config.json of a GGUF file, and a link to the
    file, `WEIGHTS`. The folder is in a cache that all servers share.

    Raises UnsupportedModel if servd would compute the model wrongly, and like `open_file`.
    """
    stat = path.stat()
    # Raise the last number when what is made changes.
    key = f"{path} {stat.st_mtime_ns} {stat.st_size} 1"
    return make_cached_folder("gguf", key, partial(_make_folder, path))


def _make_folder(path: Path, folder: Path) -> None:
    reader, values = open_file(path)
    try:
        shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
        config = make_config(path, values, shapes)
        files = {"config.json": config, "tokenizer_config.json": make_tokenizer_config(values)}
    except DAMAGED as error:
        raise ModelNotFound(f"{path}: its metadata is incomplete or wrong: {error!r}") from None
    num_layers = len({name.split(".")[1] for name in shapes if name.startswith("blk.")})
    if num_layers != config["num_hidden_layers"]:
        raise ModelNotFound(
            f"{path} has {num_layers} layers, but its metadata has {config['num_hidden_layers']}"
        )
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf8")
    (folder / WEIGHTS).symlink_to(path)


def make_config(path: Path, values: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    """Return config.json from the metadata and the shapes of the tensors, innermost dimension
    first. Errors name the path.
    """
    arch = values.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{path}: GGUF of architecture {arch!r} is not supported, only "
            f"{', '.join(ARCHITECTURES)}: serve the original checkpoint"
        )
    if values.get("split.count", 1) > 1:
        raise UnsupportedModel(
            f"{path} is one of {values['split.count']} files: join them with "
            "llama-gguf-split --merge"
        )
    own = {name.removeprefix(f"{arch}."): value for name, value in values.items()}
    scaling = own.get("rope.scaling.type", "none")
    factor = own.get("rope.scaling.factor", 1.0)
    if scaling not in ("none", "linear") or "rope_freqs.weight" in shapes:
        what = "rope_freqs.weight" if scaling in ("none", "linear") else f"rope scaling {scaling!r}"
        raise UnsupportedModel(
            f"{path} has {what}, which is not supported: serve the original checkpoint"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": own.get("rope.freq_base", 1e4)}
    if scaling == "linear" and math.isfinite(factor) and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    num_heads = own["attention.head_count"]
    hidden_size = own["embedding_length"]
    token_ids = [values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return {
        "architectures": [f"{arch.capitalize()}ForCausalLM"],
        "model_type": arch,
        "vocab_size": shapes["token_embd.weight"][-1],
        "hidden_size": hidden_size,
        "intermediate_size": own.get("feed_forward_length"),
        "num_hidden_layers": own.get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.get("attention.head_count_kv", num_heads),
        "head_dim": own.get("attention.key_length") or hidden_size // num_heads,
        "max_position_embeddings": own.get("context_length"),
        "rms_norm_eps": own.get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": rope,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": [*dict.fromkeys(i for i in token_ids if i is not None)],
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf"},
    }


def make_tokenizer_config(values: dict[str, Any]) -> dict[str, Any]:
    tokens = values.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := values.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token_id]
    if template := values.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def read_facts(path: Path) -> tuple[int, str, str]:
    """Return the number of parameters, the type of most, such as "Q4_K_M", and the license."""
    reader, values = open_file(path)
    from gguf import LlamaFileType

    names = {each.value: each.name.removeprefix("MOSTLY_") for each in LlamaFileType}
    kind = names.get(values.get("general.file_type", -1), "gguf")
    count = sum(int(tensor.n_elements) for tensor in reader.tensors)
    return count, kind, str(values.get("general.license", ""))


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json into a folder that `as_folder` made; return its path. Raises
    ModelNotFound if the tokenizer is of an unknown kind or damaged.
    """
    _, values = open_file(folder / WEIGHTS)
    model = values.get("tokenizer.ggml.model")
    pre = values.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in [*CUTS]:
        raise ModelNotFound(
            f"{(folder / WEIGHTS).resolve()} has a tokenizer {model!r} with pre-tokenizer "
            f"{pre!r}; supported is gpt2 with {', '.join(CUTS)}: set --tokenizer to the original "
            "model's folder"
        )
    try:
        content = make_tokenizer(values, pre)
    except Exception as error:  # what tokenizers raises has no class of its own
        raise ModelNotFound(f"{folder}: its tokenizer is incomplete or wrong: {error!r}") from None
    file = folder / "tokenizer.json"
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf8") as scratch:
        scratch.write(content)
    os.replace(scratch.name, file)
    return file


def make_tokenizer(values: dict[str, Any], pre: str) -> str:
    """Return tokenizer.json of a byte-level BPE tokenizer."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    from tokenizers.processors import TemplateProcessing

    tokens = values["tokenizer.ggml.tokens"]
    types = values.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        made.normalizer = normalizers.NFC()
    cuts = CUTS[pre]
    steps: list[Any] = [Digits(individual_digits=True)] if pre == "smollm" else []
    if cuts is not None:
        steps.append(Split(Regex(cuts), "isolated"))
    made.pre_tokenizer = Sequence([*steps, ByteLevel(False, use_regex=cuts is None)])
    made.decoder = decoders.ByteLevel()
    if values.get("tokenizer.ggml.add_bos_token"):
        bos_id = values["tokenizer.ggml.bos_token_id"]
        bos = tokens[bos_id]
        made.post_processor = TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, bos_id)]
        )
    for kind, add in ((CONTROL, made.add_special_tokens), (USER_DEFINED, made.add_tokens)):
        add(
            [
                AddedToken(token, special=kind == CONTROL, normalized=False)
                for token, each in zip(tokens, types, strict=True)
                if each == kind
            ]
        )
    return made.to_str()
