"""Finds the files of models: local folders, GGUF files, and downloads from the Hugging Face hub."""

import glob
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from servd.base.errors import ModelNotFound, ServdError
from servd.checkpoint import gguf
from servd.checkpoint.weight_files import OTHER_WEIGHTS, check_regular, find_weight_files

DEMO_MODEL = "demo"  # the default MODEL
DEMO_FOLDER = Path(__file__).parents[1] / "demo_model"
METADATA_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "tokenizer*"]
WEIGHT_FILES = ["*.safetensors"]


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
    if not os.path.isdir(model):
        return None
    check_regular(Path(model))
    return Path(model).resolve()


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
        headers = huggingface_hub.get_safetensors_metadata(model, revision=revision)
    except Exception as error:  # of requests, of the hub, or for missing headers
        raise ModelNotFound(f"cannot read the weights' headers of {model!r}: {error}") from None
    for name, metadata in headers.files_metadata.items():
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
    if all(isinstance(path, str) for path in cached):
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
        return bool(find_weight_files(folder))
    except ModelNotFound:
        return False


def blobs_to_download(model: str) -> dict[str, int]:
    """Return the bytes of each blob that `download_weights` gets, by name. Raises ModelNotFound."""
    import huggingface_hub

    repository, _, tag = model.partition(":")
    with _hub_errors(model):
        info = huggingface_hub.HfApi().model_info(repository, files_metadata=True)
    files = {file.rfilename: file for file in info.siblings or []}
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
        snapshot = huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=patterns,
            ignore_patterns=OTHER_WEIGHTS,
        )
    return gguf.as_folder(Path(snapshot, names[0])) if names else Path(snapshot)


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
        file_names = {
            f.relative_to(path).as_posix() for path in snapshots for f in path.rglob("*.gguf")
        }
        if not file_names:
            raise
        return [*file_names]


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
