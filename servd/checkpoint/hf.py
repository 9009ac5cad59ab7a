"""Hugging Face models: finds or downloads files, and reads config.json without transformers."""

import glob
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from servd.base.errors import ConfigError, ModelNotFound, ServdError, UnsupportedModel
from servd.checkpoint import gguf
from servd.checkpoint.account import Account, account_for, read_tables, with_defaults, without_nulls
from servd.checkpoint.multimodal_config import TEXT, text_of
from servd.checkpoint.overrides import override, reach
from servd.checkpoint.remote_code_configs import as_today

log = logging.getLogger("servd.hf")

DEMO_MODEL = "demo"  # the default MODEL
DEMO_FOLDER = Path(__file__).parents[1] / "demo_model"
METADATA_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]
WEIGHT_FILES = ["*.safetensors"]
# Mistral's own format, adapters and variants beside a checkpoint.
OTHER_WEIGHTS = ["consolidated*.safetensors", "adapter_*.safetensors", "model.?*.safetensors"]
QUANTIZATION_FILES = {"quant_config.json": "awq", "quantize_config.json": "gptq"}
AGREED_KEYS = ("bits", "group_size", "sym", "checkpoint_format", "format", "version", "zero_point")
NO_ATTENTION = "models without attention, such as Mamba and RWKV, do not run in servd; "
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
    generation: dict[str, Any] = {}  # generation_config.json as it is

    @property
    def keeps_state(self) -> bool:
        """Whether layers have a recurrent state besides the KV cache (linear attention)."""
        return "linear_num_key_heads" in self.config

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        numbers = 2 * self.num_kv_heads * self.head_dim
        if (latent := self.config.get("kv_lora_rank")) is not None:  # MLA caches only this
            numbers = latent + self.config["qk_rope_head_dim"]
        return self.num_layers * numbers * dtype_bytes


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


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file. Raises ModelNotFound if it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ModelNotFound(
            f"{path.parent} has no {path.name}; is it a Hugging Face model folder? Name a GGUF "
            "file itself"
        ) from None
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelNotFound(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelNotFound(f"{path} must hold a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a text model, or of the text part of a multimodal model."""
    config = read_json(folder / "config.json")
    # Draft heads in *speculators* format keep a decoder's keys in transformer_layer_config.
    layer = config.get("transformer_layer_config")
    config = (layer if isinstance(layer, dict) else {}) | config
    return reach(with_defaults(text_of(as_today(config))))


def read_spec(folder: Path | str, overrides: dict[str, Any] | None = None) -> ModelSpec:
    """Return the spec of a model folder, from config.json with `--hf-overrides` and
    generation_config.json. Raises ModelNotFound if config.json is missing or broken;
    UnsupportedModel if a key is missing; ConfigError if the overrides do not apply to this model.
    """
    folder = Path(folder)
    config = override(read_config(folder), overrides or {})
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}

    def wrong(why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{folder}/config.json: {why}")

    def first(*names: str, default: Any = None) -> Any:
        for name in names:
            if config.get(name) is not None:
                return config[name]
        if default is None:
            why = NO_ATTENTION if names[0] == "num_attention_heads" else ""
            raise wrong(
                f"it has none of: {', '.join(names)}; {why}"
                "docs/reference/models.md lists what servd runs"
            )
        return default

    def size(*names: str, default: int | None = None) -> int:
        value = first(*names, default=default)
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise wrong(f"{names[0]} {value!r:.50} is not a size")
        return value

    # GPT-2 has n_embd, n_layer, n_head, n_positions instead of hidden_size and so on.
    num_heads = size(
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
        "decoder_attention_heads",
    )
    hidden_size = size("hidden_size", "n_embd", "d_model", "embed_dim", "dim")
    model_type = first("model_type")
    if not isinstance(model_type, str):
        raise wrong(f"model_type {model_type!r:.50} is no name")
    architectures = first("architectures", default=[""])
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise wrong("architectures must be a list of names")
    vocab_size = size("vocab_size")
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    head_dim = size("head_dim", default=hidden_size // num_heads or 1)
    # Multi-head latent attention has sizes of its own.
    is_divided = not (config.get("head_dim") or config.get("kv_lora_rank"))
    if is_divided and hidden_size % num_heads:
        raise wrong(f"hidden_size {hidden_size} is no multiple of {num_heads} heads")
    num_layers = size("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
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
        num_kv_heads=size("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        max_position_embeddings=size(
            "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"
        ),
        dtype=first("dtype", "torch_dtype", default="float32"),
        eos_token_ids=_read_eos(folder, eos, vocab_size),
        config=config,
        generation=generation,
    )


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


def quantization_of(folder: Path | str) -> dict[str, Any] | None:
    """Return the quantization config of the checkpoint in `folder`: `quant_method` and the method's
    keys; None if the checkpoint is not quantized. Raises UnsupportedModel if two files disagree.
    """
    folder = Path(folder)
    stated: dict[str, Any] = {}
    if (file := folder / "config.json").exists():
        config = read_json(file)
        text = config.get(TEXT)
        for part in (config, text if isinstance(text, dict) else {}):
            for key in ("quantization_config", "compression_config"):
                stated = stated or part.get(key) or {}
    if not isinstance(stated, dict):
        raise UnsupportedModel(f"{folder}/config.json: {stated!r:.50} is no quantization_config")
    for name, method in QUANTIZATION_FILES.items():
        if stated.get("quant_method", method) != method or not (folder / name).exists():
            continue
        beside = {"quant_method": method, **read_json(folder / name)}
        for key in AGREED_KEYS:
            values = [str(part[key]).lower() for part in (stated, beside) if key in part]
            if len(set(values)) > 1:
                raise UnsupportedModel(
                    f"{folder}: {key} is {values[0]} in config.json, but {values[1]} in {name}: "
                    "correct one of them"
                )
        stated = beside | stated
    return stated or None


def quantization_accounts(folder: Path | str) -> Iterator[Account]:
    """Yield the accounts of a quantization config and its groups, if servd reads its method. A null
    is the default there.
    """
    stated = quantization_of(folder) or {}
    table = f"quantization.{str(stated.get('quant_method')).replace('-', '_')}"
    if table not in read_tables():
        return
    name = "quantization_config"
    yield account_for(name, without_nulls(stated), "quantization", table)
    groups = stated.get("config_groups")
    for key, group in groups.items() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            yield account_for(f"{name}: {key}", without_nulls(group), f"{table}.group")
            weights = group.get("weights") or {}
            if not isinstance(weights, dict):
                raise UnsupportedModel(f"{name}: {key}.weights {weights!r:.50} is no object")
            yield account_for(f"{name}: {key}.weights", without_nulls(weights), f"{table}.weights")


def quant_method_of(folder: str, quantization: str | None) -> str | None:
    """Return the quant method of a checkpoint, with underscores. Raises ConfigError if the
    checkpoint is quantized and --quantization is another method.
    """
    stated = quantization_of(folder) if folder else None
    if not stated:
        return None
    method = str(stated.get("quant_method")).replace("-", "_")
    if quantization and quantization.replace("-", "_") != method:
        raise ConfigError(
            f"--quantization {quantization}: the checkpoint is quantized already, by {method}: "
            "leave the option out"
        )
    return method


def rounds_activations(dtype: str, quantization: str | None, folder: str) -> bool:
    """Return whether a CPU rounds activations to int8. `dtype`: --cpu-activation-dtype; auto rounds
    with --quantization int8 or int4, and with blocks of GGUF, whose other readers round as well.
    """
    if dtype != "auto":
        return dtype == "int8"
    stated = (folder and quantization_of(folder)) or {}
    return quantization in ("int8", "int4") or bool(stated.get("has_blocks"))


def local_folder(model: str) -> Path | None:
    """Return the folder that `model` names, or the folder of its GGUF file, or of the demo model;
    None if the model is on the hub. Raises ModelNotFound, or errors of `gguf.as_folder`.
    """
    if model == DEMO_MODEL:  # a folder of this name is ./demo
        if not DEMO_FOLDER.exists():
            raise ModelNotFound(
                "this installation has no demo model: choose another, e.g. `servd serve gpt2`"
            )
        return DEMO_FOLDER
    if (file := gguf.find_file(model)) is not None:
        return gguf.as_folder(file)
    return Path(model).resolve() if os.path.isdir(model) else None


def find_model(model: str, revision: str | None = None, download_dir: str | None = None) -> Path:
    """Return the folder with config.json and the tokenizer of `model`. Downloads these small files
    if needed; of "repository:Q4_K_M" the whole GGUF file. Raises ModelNotFound if the folder or
    repository does not exist, or the hub is unreachable.
    """
    if (folder := local_folder(model)) is not None:
        return folder
    return _download(model, revision, download_dir, METADATA_FILES)


def download_weights(
    model: str,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
) -> Path:
    """Return the folder that `find_model` returns, with the weights too. Shows a progress bar."""
    if (folder := local_folder(model)) is not None:
        return folder
    weights = ["pytorch_model*.bin"] if load_format == "pt" else WEIGHT_FILES
    return _download(model, revision, download_dir, METADATA_FILES + weights)


def find_headers(model: str, revision: str | None, download_dir: str | None, scratch: str) -> Path:
    """Return a folder like `download_weights`. If weights are only on the hub, it is a new folder
    in `scratch`, whose weight files have headers from the hub, and a hole instead of tensors.
    """
    folder = find_model(model, revision, download_dir)
    if local_folder(model) is not None or has_weights(folder):
        return folder
    import huggingface_hub

    hollow = Path(tempfile.mkdtemp(dir=scratch))
    for file in folder.iterdir():
        (hollow / file.name).symlink_to(file)
    try:
        found = huggingface_hub.get_safetensors_metadata(model, revision=revision)
    except Exception as error:  # of requests, of the hub, or for missing headers
        raise ModelNotFound(f"cannot read the weights' headers of {model!r}: {error}") from None
    for name, metadata in found.files_metadata.items():
        tensors = {
            tensor: {"dtype": t.dtype, "shape": t.shape, "data_offsets": t.data_offsets}
            for tensor, t in metadata.tensors.items()
        }
        header = json.dumps(tensors).encode()
        with (hollow / Path(name).name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(file.tell() + max(t["data_offsets"][1] for t in tensors.values()))
    return hollow


def find_gguf_headers(
    model: str, revision: str | None, download_dir: str | None, scratch: str
) -> str:
    """Return a new folder in `scratch` like `gguf.as_folder`, for files of which only the headers
    are downloaded; `model` itself unless it is "repository:Q4_K_M" and not in the cache.
    """
    if local_folder(model) is not None:
        return model
    import huggingface_hub as hub

    repository, names = _choose_files(model, revision, download_dir)
    cached = [hub.try_to_load_from_cache(repository, n, download_dir, revision) for n in names]
    if all(isinstance(each, str) for each in cached):
        return model
    folder = Path(tempfile.mkdtemp(dir=scratch))
    files = [folder / Path(name).name for name in names]
    with _hub_errors(model):
        for name, path in zip(names, files, strict=True):
            at = f"{repository}/{name}"
            file: Any = hub.HfFileSystem().open(at, revision=revision, cache_type="none")
            with file:
                gguf.copy_header(file, file.size, path)
    gguf.make_folder(files, folder / "model")
    return str(folder / "model")


def has_weights(folder: Path) -> bool:
    """Return whether all weight files are in a folder."""
    try:
        return bool(weight_files(folder))
    except ModelNotFound:
        return False


def blobs_to_download(model: str) -> dict[str, int]:
    """Return the bytes of each blob that `download_weights` gets, by name. Raises ModelNotFound."""
    import huggingface_hub

    repository, _, tag = model.partition(":")
    with _hub_errors(model):
        found = huggingface_hub.HfApi().model_info(repository, files_metadata=True).siblings or []
    files = {file.rfilename: file for file in found}
    patterns = METADATA_FILES + WEIGHT_FILES
    names = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=patterns, ignore_patterns=OTHER_WEIGHTS
    )
    if tag:
        names = gguf.choose_files(model, files, tag, repository)
    chosen = [files[name] for name in names]
    return {(f.lfs.sha256 if f.lfs else f.blob_id) or f.rfilename: f.size or 0 for f in chosen}


def _download(
    model: str, revision: str | None, download_dir: str | None, patterns: list[str]
) -> Path:
    """Return the folder of the files that match `patterns`, or of the GGUF file of MODEL."""
    import huggingface_hub  # 0.3 s and 20 MB that a local folder does not need

    repository, names = _choose_files(model, revision, download_dir)
    if names:
        patterns = [glob.escape(name) for name in names]
    with _hub_errors(model):
        found = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=OTHER_WEIGHTS,
        )
    return gguf.as_folder(Path(found, names[0])) if names else Path(found)


def _choose_files(
    model: str, revision: str | None, download_dir: str | None
) -> tuple[str, list[str]]:
    """Return MODEL's repository, and the GGUF files that "repository:Q4_K_M" names."""
    repository, _, tag = model.partition(":")
    if not tag:
        return repository, []
    with _hub_errors(model):
        names = _gguf_names(repository, revision, download_dir)
    return repository, gguf.choose_files(model, names, tag, repository)


def _gguf_names(repository: str, revision: str | None, download_dir: str | None) -> list[str]:
    """Return the names of a repository's files; offline, of its GGUF files in the cache."""
    import huggingface_hub

    try:
        files = huggingface_hub.HfApi().model_info(repository, revision=revision).siblings or []
        return [file.rfilename for file in files]
    except Exception:  # no network, or no repository
        cache = Path(download_dir or huggingface_hub.constants.HF_HUB_CACHE)
        snapshots = [*cache.glob(f"models--{repository.replace('/', '--')}/snapshots/*")]
        found = {f.relative_to(path).as_posix() for path in snapshots for f in path.rglob("*.gguf")}
        if not found:
            raise
        return [*found]


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Raise ModelNotFound for what fails at the hub, or for a name that is not of the hub."""
    is_file = model.endswith(".gguf") and ":" not in model
    if is_file or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"the {'file' if is_file else 'folder'} {model} does not exist")
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        yield
    except RepositoryNotFoundError:
        raise ModelNotFound(
            f"the hub has no model {model!r}, or it is private: check the name, or set HF_TOKEN"
        ) from None
    except ServdError:
        raise
    except Exception as error:  # of requests, of the hub, of the disk
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(
            f"cannot get {model!r} from the hub ({first_line}): connect once, pass a folder or a "
            "GGUF file, or copy a Hugging Face cache and set HF_HOME"
        ) from None


def index_of(folder: Path, suffix: str = ".safetensors") -> Path:
    """Return the place of the index of a folder's weight files."""
    return folder / f"{'pytorch_model' if suffix == '.bin' else 'model'}{suffix}.index.json"


def read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor by the index of weight files; {} if there is no index. Raises
    ModelNotFound if it is broken.
    """
    places = read_json(index).get("weight_map", {}) if index.exists() else {}
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelNotFound(f"{index}: weight_map does not map tensors to files")
    if outside := [name for name in {*places.values()} if leads_out(name)]:
        raise ModelNotFound(f"{index}: {outside[0]:.80} is not in the folder: copy it there")
    return places


def leads_out(name: str) -> bool:
    """Return whether a name in a model's file stands for a path outside of its folder."""
    return name.startswith("/") or ".." in name.split("/")


def weight_files(folder: Path | str, load_format: str = "auto") -> list[Path]:
    """Return the safetensors files of a checkpoint as transformers chooses them: the whole one, or
    those of the index, or else the numbered ones; or the GGUF files of a folder from
    `gguf.as_folder`. With load_format "pt", return the pickled files of torch. Raises
    ModelNotFound if there is no file, or a file of the index or of the numbered files is missing.
    """
    folder = Path(folder)
    if (folder / gguf.WEIGHTS).is_symlink():
        files = [folder / gguf.WEIGHTS, *sorted(folder.glob("model-*.gguf"))]
        gguf.check_files(files)
        return files
    stem, suffix = ("pytorch_model", ".bin") if load_format == "pt" else ("model", ".safetensors")
    whole = folder / f"{stem}{suffix}"
    if whole.is_file():
        return [whole]
    if names := set(read_index(index_of(folder, suffix)).values()):
        files = [folder / name for name in sorted(names)]
    else:
        there_are = folder.glob(f"{stem}*{suffix}" if suffix == ".bin" else f"*{suffix}")
        files = [file for file in there_are if not any(map(file.match, OTHER_WEIGHTS))]
        files = [file for file in files if file.name.startswith(f"{stem}-")] or files
        files = sorted({part for file in files for part in gguf.name_parts(file)})
    gguf.check_files(files)
    if not files:
        other = sorted(f.name for pattern in ("*.bin", "*.pt") for f in folder.glob(pattern))
        hint = f"; it has {other[0]}: convert it to safetensors" if other else ""
        if unread := sorted(folder.glob("*.safetensors")):
            hint = f" that servd reads; it has {unread[0].name}: serve the original checkpoint"
        if load_format == "auto" and list(folder.glob("pytorch_model*.bin")):
            hint += ", or use --load-format pt"
        if found := sorted(folder.glob("*.gguf")):
            hint = f"; it has {found[0].name}: name that file"
        raise ModelNotFound(f"{folder} has no {suffix} file{hint}")
    return files


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `--override-generation-config`, as in generation_config.json."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_SIZE)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-30, le=1e18)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1, le=MAX_SIZE)] | None = None


class _Generation(GenerationDefaults, frozen=True, kw_only=True):
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
        yield account_for("generation_config.json", without_nulls(generation), "generation")


def read_generation_defaults(
    spec: ModelSpec, source: str, override: GenerationDefaults | None = None
) -> dict[str, Any]:
    """Return the default sampling parameters from `--generation-config` (auto, vllm for none, or a
    folder), updated with `--override-generation-config`. Raises ConfigError for a value that no
    request could have.
    """
    generation = _read_generation(spec, source)
    known = {key: generation[key] for key in _Generation.__struct_fields__ if key in generation}
    try:
        stated = msgspec.convert(known, _Generation)
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
