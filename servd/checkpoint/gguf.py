"""GGUF: files with weights, tokenizer and chat template, served as a Hugging Face folder.
`servd/worker/quantization/gguf.py` reads the weights; gguf.toml has the names that they use.
"""

from __future__ import annotations

import json
import os
import re
import struct
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from servd.base import compat
from servd.base.errors import ModelNotFound, UnsupportedModel
from servd.checkpoint.account import Account, account_for
from servd.checkpoint.cached_folder import make_cached_folder
from servd.checkpoint.model_spec import MAX_SIZE
from servd.checkpoint.overrides import FIRST_LENGTH

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

METADATA = "metadata.json"  # in the folder: the file's, without long values
MAX_SHOWN = 100  # characters of a text, values of a list
WEIGHTS = "model.gguf"  # the link in the folder; links to other parts are model-NUMBER.gguf
PART = re.compile(r"-\d+-of-(\d+)(?=\.\w+$)")  # in the name of one of several files
QUANTIZATION = re.compile(r"(?i)(?<![a-z0-9])(?:UD-)?(?:I?Q\d\w*|B?F16|F32|MXFP4\w*)")
MAX_PARTS = 10_000
PROJECTOR = "mmproj"  # begins the name of a file that encodes images
TABLE = tomllib.loads(Path(__file__).with_name("gguf.toml").read_text(encoding="utf8"))
ARCHITECTURES: dict[str, dict[str, Any]] = TABLE["architectures"]
# Exceptions that a damaged file raises in gguf, or its values in the code that uses them.
NO_VALUE = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
DAMAGED = (*NO_VALUE, RecursionError, struct.error)
FLOATS = ("F32", "F16", "BF16")  # types of tensors that are not in blocks
MAX_LENGTH = 1 << 21  # values in a list: each takes up to 200 bytes in memory
HEADER_STEP = 2 << 20  # bytes of a header that are downloaded first
MAX_HEADER = 64 << 20  # bytes that are downloaded in search of its end, and of a text
MAX_NAMED = 8  # files in an error message
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def open_file(
    path: Path, has_texts: bool = True, mode: Literal["r", "c"] = "r"
) -> tuple[GGUFReader, dict[str, Any]]:
    """Map a file; return its reader and its metadata, in which lists of texts are empty without
    `has_texts`. In mode "c", tensors can be written to, as torch wants; Linux refuses that for
    files larger than memory. Raises ModelNotFound if the file is missing, not GGUF, or damaged.
    """
    reader_class = compat.make_gguf_reader(MAX_LENGTH, MAX_HEADER, has_texts)
    try:
        reader = reader_class(path, mode)
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
        return Path(model).absolute()  # a link of the hub's cache has the name, its target has not
    folder, _, tag = model.rpartition(":")
    if not folder or not os.path.isdir(folder):
        return None
    names = [file.name for file in Path(folder).glob("*.gguf")]
    return Path(folder, choose_files(model, names, tag, "the folder")[0]).absolute()


def choose_files(model: str, names: Iterable[str], tag: str, place: str) -> list[str]:
    """Return the file that has `tag` in its name, as a whole word if possible; the files, if the
    model is split. Raises ModelNotFound if there is no such model, or several.
    """
    names = sorted(n for n in names if n.endswith(".gguf") and PROJECTOR not in n)
    matches = [name for name in names if tag.lower() in name.lower()]
    word = re.compile(rf"(?<![a-z0-9_]){re.escape(tag)}(?![a-z0-9_])", re.IGNORECASE)
    matches = [name for name in matches if word.search(name)] or matches
    models = {PART.sub("", name) for name in matches}
    if len(models) != 1:
        listed = ", ".join(matches or names) or "no .gguf file"
        raise ModelNotFound(
            f"{model} matches {len(models)} files, must match one; {place} has {listed}"
        )
    return [name for name in names if PART.sub("", name) in models]


def copy_header(source: BinaryIO, num_bytes: int, path: Path) -> None:
    """Write a file of `num_bytes` with the header and rope factors of `source`, and a hole."""
    error = ModelNotFound(f"{path.name} has no complete header")
    with path.open("wb") as file:
        # Each part doubles the header, because it is read again from its start.
        while file.tell() < MAX_HEADER and file.write(source.read(file.tell() or HEADER_STEP)):
            file.flush()
            os.truncate(path, num_bytes)
            try:  # if the header is incomplete, the reader goes on in the hole
                reader, _ = open_file(path, has_texts=False)
                if reader.data_offset <= file.tell():
                    break
            except ModelNotFound as problem:
                error = problem
        else:
            raise error
        for tensor in reader.tensors:
            if tensor.name in FACTORS:
                source.seek(tensor.data_offset)
                file.seek(tensor.data_offset)
                file.write(source.read(min(tensor.data.nbytes, HEADER_STEP)))


def find_quantization(name: str) -> str:
    """Return the part of a file's name that is its quantization, such as Q4_K_M, or the name."""
    matches = QUANTIZATION.findall(name)
    return matches[-1] if matches else name.removesuffix(".gguf")


def name_parts(path: Path) -> Iterator[Path]:
    """Yield the files of a checkpoint in numbered files, or the one file. They may not exist."""
    part = PART.search(path.name)
    if part is None or not int(part[1]):
        yield path
        return
    total = part[1]
    for number in range(1, min(int(total), MAX_PARTS) + 1):
        yield path.with_name(PART.sub(f"-{number:0{len(total)}}-of-{total}", path.name))


def check_files(files: Sequence[Path]) -> None:
    """Raise ModelNotFound with the names of the files that are missing."""
    if missing := [file.name for file in files if not file.exists()]:
        file_names = ", ".join(missing[:MAX_NAMED])
        raise ModelNotFound(
            f"{files[0].parent} lacks {len(missing)} of {len(files)} weight files: {file_names}; "
            "copy them there, or download the model again"
        )


def as_folder(path: Path) -> Path:
    """Return a folder with config.json and tokenizer_config.json of a GGUF file, and links to the
    file, `WEIGHTS`, and its other parts. The folder is in a cache that all servers share.

    Raises UnsupportedModel if servd would compute the model wrongly, and like `open_file`.
    """
    files = [*name_parts(path)]
    check_files(files)
    # Raise the number when what is made changes.
    return make_cached_folder("gguf", files, "9", partial(make_folder, files))


def make_folder(files: Sequence[Path], folder: Path) -> None:
    """Make the folder that `as_folder` returns."""
    path = files[0]
    opened = [open_file(file) for file in files]
    values = opened[0][1]
    key = "general.architecture"
    name = values.get(key)
    for number, (_, metadata) in enumerate(opened):
        num_files = metadata.get("split.count") or 1
        stated = num_files, metadata.get("split.no", number), metadata.get(key, name)
        if stated != (len(files), number, name):
            raise ModelNotFound(
                f"{files[number]} is one of {num_files} files: name them NAME-00001-of-NUMBER.gguf "
                "and so on, as they were"
            )
    try:
        tensors = {tensor.name: tensor for reader, _ in opened for tensor in reader.tensors}
        if len(tensors) != sum(len(reader.tensors) for reader, _ in opened):
            raise ValueError("two of its files have the same tensor")
        config = make_config(path, values, tensors)
        num_layers = len({name.split(".")[1] for name in tensors if name.startswith("blk.")})
        num_layers -= count_drafts(values)
        if num_layers != config["num_hidden_layers"]:
            raise ValueError(f"{num_layers} layers, not {config['num_hidden_layers']}")
        contents = {
            "config.json": json.dumps(config, allow_nan=False),
            "tokenizer_config.json": json.dumps(make_tokenizer_config(values)),
            "generation_config.json": json.dumps(
                TABLE["default_sampling"]
                | {key: values[name] for key, name in TABLE["sampling"].items() if name in values}
            ),
            METADATA: json.dumps({key: _shorten(value) for key, value in values.items()}),
        }
    except DAMAGED as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ModelNotFound(f"{path}: its metadata is incomplete or wrong: {reason}") from None
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf8")
    for number, file in enumerate(files):
        (folder / (f"model-{number:05}.gguf" if number else WEIGHTS)).symlink_to(file)


def count_drafts(values: dict[str, Any]) -> int:
    """Return the number of the last layers, which draft and which servd does not read."""
    name = values.get("general.architecture")
    has_drafts = ARCHITECTURES.get(str(name), {}).get("may_have_drafts")
    return values.get(f"{name}.nextn_predict_layers", 0) if has_drafts else 0


def _shorten(value: Any) -> Any:
    """Return a value, or of a long text or list its length."""
    is_long = isinstance(value, (list, str)) and len(value) > MAX_SHOWN
    return f"{type(value).__name__} of {len(value)}" if is_long else value


def gguf_accounts(folder: Path | str) -> Iterator[Account]:
    """Yield the account of the metadata of a folder from `as_folder`. Names of the architecture's
    own metadata lack its name.
    """
    if not (file := Path(folder, METADATA)).exists():
        return
    values = json.loads(file.read_text(encoding="utf8"))
    name = values["general.architecture"]
    metadata = {key.removeprefix(f"{name}."): value for key, value in values.items()}
    yield account_for("the GGUF file's metadata", metadata, "gguf", f"gguf.{name}")


def make_config(
    path: Path, values: dict[str, Any], tensors: dict[str, ReaderTensor]
) -> dict[str, Any]:
    """Return config.json from the metadata and the tensors. Errors name the path."""
    name = str(values.get("general.architecture"))
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        raise UnsupportedModel(
            f"{path}: GGUF of architecture {name!r} is not supported, only "
            f"{', '.join(ARCHITECTURES)}: serve the original checkpoint"
        )
    metadata = {key.removeprefix(f"{name}."): value for key, value in values.items()}
    if metadata.get("expert_count"):
        architecture = architecture | architecture.get("with_experts", {})
    config: dict[str, Any] = {
        "architectures": [architecture["class"]],
        "model_type": architecture.get("model_type", name),
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": _find_ends(values, architecture),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "gguf",
            "has_blocks": any(tensor.tensor_type.name not in FLOATS for tensor in tensors.values()),
        },
        **architecture.get("set", {}),
    }
    metadata["block_count"] -= count_drafts(values)
    config |= _read_states(metadata, architecture)
    for key, suffix in architecture.get("has", {"attention_bias": "attn_q.bias"}).items():
        config[key] = any(tensor.endswith(f".{suffix}") for tensor in tensors)
    for key, source in (TABLE["config"] | architecture.get("config", {})).items():
        if source and (metadata.get(source) or source not in TABLE["optional"]):
            config[key] = _number(metadata, source)
    if (heads := config.get("num_attention_heads")) is None:
        return config
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = _make_rope(path, metadata, tensors) | architecture.get("rope", {})
    if (length := rope.get(FIRST_LENGTH)) is not None:  # before the default of the model_type
        config[FIRST_LENGTH] = length
    if (theta := architecture.get("window_rope_theta")) is not None:
        theta = _number({"rope.freq_base_swa": theta} | metadata, "rope.freq_base_swa")
        window = {"rope_type": "default", "rope_theta": theta}
        rope = {"full_attention": rope, "sliding_attention": window}
    config["rope_parameters"] = rope
    if metadata.get("rope.dimension_count", head_dim) != head_dim:
        config["partial_rotary_factor"] = _number(metadata, "rope.dimension_count") / head_dim
    _check_routers(metadata, tensors)
    if (wide := architecture.get("wide_layers")) is not None:
        is_wide = config["num_hidden_layers"] == wide
        config["query_pre_attn_scalar"] = config["hidden_size"] // heads if is_wide else head_dim
    return config


def _check_routers(metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> None:
    for name, router in tensors.items():
        is_router = name.endswith(".ffn_gate_inp.weight")
        count = int(router.shape[-1])
        if is_router and not metadata["expert_used_count"] <= metadata["expert_count"] == count:
            raise ValueError(f"a router of {count} experts")


def _read_states(metadata: dict[str, Any], architecture: dict[str, Any]) -> dict[str, Any]:
    """Return keys of config.json for layers with states, and put numbers for lists in metadata."""
    config: dict[str, Any] = {}
    kind = architecture.get("state_layers")
    if kind and isinstance(counts := metadata.get("attention.head_count_kv"), list):
        config["layer_types"] = ["full_attention" if count else kind for count in counts]
        metadata["attention.head_count_kv"] = max(counts)
    if (are_states := metadata.get("attention.recurrent_layers")) is not None:
        names = ("full_attention", "linear_attention")
        config["layer_types"] = [names[bool(is_state)] for is_state in are_states]
    if (inner := metadata.get("ssm.inner_size")) is not None:
        metadata["ssm.head_dim"] = inner // metadata["ssm.time_step_rank"]
    if architecture.get("may_lack_positions"):
        has_positions = metadata.get("rope.scaling.finetuned", True)
        config["position_embedding_type"] = "rope" if has_positions else "nope"
    return config


def _number(metadata: dict[str, Any], name: str) -> Any:
    """Return a size or another number above 0. Raises LookupError or ValueError."""
    value = metadata[name]
    kinds = (int, float) if name in TABLE["floats"] else (int,)
    if type(value) not in kinds or not 0 < value <= MAX_SIZE:
        raise ValueError(f"{name} is {value!r:.50}")
    return value


def _find_ends(values: dict[str, Any], architecture: dict[str, Any]) -> list[int]:
    """Return the ids of the tokens that end an answer."""
    names = architecture.get("end_ids", ("eos", "eot", "eom"))
    ends = [values.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    tokens = values.get("tokenizer.ggml.tokens", [])
    for name, token_id in zip(names, ends, strict=True):
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise ValueError(f"{name}_token_id is {token_id}, of {len(tokens)} tokens")
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ends += [ids.get(token) for token in architecture.get("ends", TABLE["ends"])]
    return [*dict.fromkeys(token_id for token_id in ends if token_id is not None)]


def _make_rope(
    path: Path, metadata: dict[str, Any], tensors: dict[str, ReaderTensor]
) -> dict[str, Any]:
    """Return rope_parameters. `metadata`: metadata without the architecture's name."""
    factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear")) or 1
    kind = metadata.get("rope.scaling.type", "linear").replace("none", "default")
    if kind == "linear" and factor == 1:
        kind = "default"
    if "rope_factors_long.weight" in tensors:
        kind = "longrope"
    factors = [tensors[name] for name in FACTORS if name in tensors]
    if any(tensor.tensor_type.name != "F32" or not (tensor.data > 0).all() for tensor in factors):
        raise ValueError("rope factors that are no F32 above 0")
    keys = TABLE["rope"].get(kind, {})
    has_factors = "rope_freqs.weight" in tensors
    problems = [] if kind in TABLE["rope"] else [f"rope scaling {kind!r}"]
    unread = [name for name in TABLE["unread"] if name not in keys.values()]
    problems += [name for name in unread if metadata.get(name) not in (None, 1)]
    if kind == "longrope" and factor != 1:
        problems.append(f"rope.scaling.factor beside rope scaling {kind!r}")
    if (mix := metadata.get("rope.scaling.yarn_ext_factor", -1)) not in (-1, float(kind == "yarn")):
        problems.append(f"rope.scaling.yarn_ext_factor {mix}")
    if kind != "default" and has_factors:
        problems.append(f"rope_freqs.weight beside rope scaling {kind!r}")
    if problems:
        raise UnsupportedModel(
            f"{path} has {', '.join(problems)}, which is not supported: serve the original "
            "checkpoint"
        )
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4}
    keys = keys | {"rope_theta": "rope.freq_base"}
    metadata = metadata | {"rope.scaling.factor": factor}
    rope |= {key: _number(metadata, name) for key, name in keys.items() if metadata.get(name)}
    if kind == "longrope":
        for name in ("long", "short"):
            rope[f"{name}_factor"] = tensors[f"rope_factors_{name}.weight"].data.tolist()
    elif has_factors:  # Llama 3.1's, the same for all lengths
        factors = tensors["rope_freqs.weight"].data.tolist()
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        rope |= {"attention_factor": 1.0, FIRST_LENGTH: metadata["context_length"]}
    return rope


def make_tokenizer_config(values: dict[str, Any]) -> dict[str, Any]:
    tokens = values.get("tokenizer.ggml.tokens", [])
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := values.get(f"tokenizer.ggml.{key}_token_id")) is None:
            continue
        if 0 <= token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
        elif name != "pad":  # in no text: llama.cpp drops it, too
            raise ValueError(f"{key}_token_id is {token_id}, of {len(tokens)} tokens")
    if template := values.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def read_facts(files: Sequence[Path]) -> tuple[int, str, str]:
    """Return the number of parameters, the type of most, such as "Q4_K_M", and the license."""
    opened = [open_file(file, has_texts=False) for file in files]
    values = opened[0][1]
    from gguf import LlamaFileType

    names = {kind.value: re.sub("^(MOSTLY|ALL)_", "", kind.name) for kind in LlamaFileType}
    kind = names.get(values.get("general.file_type", -1), "gguf")
    count = sum(int(tensor.n_elements) for reader, _ in opened for tensor in reader.tensors)
    return count, kind, str(values.get("general.license", ""))
