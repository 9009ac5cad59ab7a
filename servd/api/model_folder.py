"""What a folder of models has: which models, under which names, and whose adapters are whose."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from servd import hf
from servd.api.adapters import NAME
from servd.config import LoRAConfig
from servd.errors import ConfigError
from servd.lora import CONFIG, parse_module

logger = logging.getLogger("servd.api")

HUB = "models--"  # begins the name of a model's folder in the Hugging Face cache
WEIGHT_SUFFIXES = (".safetensors", ".gguf")


class Model(msgspec.Struct, frozen=True):
    """A model as it lies there."""

    name: str
    path: Path  # as `servd serve` takes it: a folder, or a GGUF file
    max_model_len: int
    num_bytes: int  # of its weights
    created: int  # when what names it was written

    @property
    def is_there(self) -> bool:
        """Whether nobody has deleted it."""
        return _is_model(self.path)


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter as it lies there."""

    name: str
    folder: Path
    base: str  # the model that it was trained for, as its files say; "" if they do not
    created: int

    def owner(self, models: Sequence[str]) -> str | None:
        """The model that is its own: of the same name, but for the folders before it. If there is
        but one model, that.
        """
        last = self.base.rstrip("/").rpartition("/")[2]
        same = [name for name in models if name.rpartition("/")[2] == last]
        exact = [name for name in same if name == self.base]
        return next(iter(exact or same or (models if len(models) == 1 else [])), None)


class ModelFolder:
    """The models of a folder, read again whenever somebody asks for one that is new."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # `demo` alone is not the folder of that name
        self._refused: dict[Path, tuple[float, str]] = {}  # when it was written, and why

    def read(self) -> dict[str, Model]:
        """Those that can be served, by name. Others are named in the log, once.

        Raises:
            OSError: the folder cannot be read.
        """
        found = {}
        for name, path in sorted(_models_in(self.path)):
            written, why = self._refused.get(path, (0.0, ""))
            try:
                if path.suffix == ".gguf" and _mtime(path) == written:
                    continue  # to read its header again may take a second
                name.encode()
                found[name] = _read(name, path)
                self._refused.pop(path, None)
            except (ConfigError, OSError, UnicodeEncodeError) as error:
                if str(error) != why:
                    logger.warning("%r is not served: %s", name, error)
                self._refused[path] = _mtime(path), str(error)
        return found


def _read(name: str, path: Path) -> Model:
    folder = hf.local_folder(str(path)) if path.suffix == ".gguf" else path
    assert folder is not None
    written = path if path.is_file() else path / "config.json"
    length = hf.read_spec(folder).max_position_embeddings
    weights = [file for file in folder.iterdir() if file.suffix in WEIGHT_SUFFIXES]
    num_bytes = sum(file.stat().st_size for file in weights)
    return Model(name, path, length, num_bytes, int(written.stat().st_mtime))


def _mtime(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names and paths: NAME/config.json, NAME.gguf, both also in a folder ORG, and what the
    Hugging Face cache has.
    """
    for path in folder.iterdir():
        if path.name.startswith(HUB):
            if (snapshot := _snapshot(path)) is not None:
                yield path.name.removeprefix(HUB).replace("--", "/"), snapshot
        elif _is_model(path):
            yield path.name.removesuffix(".gguf"), path
        elif not path.name.startswith("."):
            with suppress(OSError):  # it is no folder, or nobody may look into it
                for inner in filter(_is_model, path.iterdir()):
                    yield f"{path.name}/{inner.name.removesuffix('.gguf')}", inner


def _is_model(path: Path) -> bool:
    if path.suffix == ".gguf" and path.is_file():
        return True
    return (path / "config.json").is_file()


def _snapshot(repository: Path) -> Path | None:
    """What a branch of a model in the Hugging Face cache points to, if it is there: main, where
    there are several.
    """
    refs = sorted(repository.glob("refs/*"), key=lambda ref: ref.name != "main")
    found = [repository / "snapshots" / ref.read_text().strip() for ref in refs]
    return next(filter(_is_model, found), None)


def adapters_in(lora: LoRAConfig) -> dict[str, Adapter]:
    """Those that a server has without being told at run time, by name.

    Raises:
        ConfigError: an entry of --lora-modules is none.
    """
    folders = {}
    if lora.lora_dir is not None:
        found = (path.parent for path in Path(lora.lora_dir).glob(f"*/{CONFIG}"))
        folders = {path.name: (path, "") for path in found if NAME.fullmatch(path.name)}
    for entry in lora.lora_modules:
        name, path = parse_module(entry)
        base = msgspec.json.decode(entry).get("base_model_name") if entry[0] == "{" else ""
        folders[name] = Path(path), base or ""
    return {name: _adapter(name, *each) for name, each in folders.items()}


def _adapter(name: str, folder: Path, base: str) -> Adapter:
    file, created = folder / CONFIG, 0
    try:
        created = int(file.stat().st_mtime)
        base = base or hf.read_json(file).get("base_model_name_or_path") or ""
    except (ConfigError, OSError):  # whoever is to load it says why
        pass
    return Adapter(name, folder, str(base), created)
