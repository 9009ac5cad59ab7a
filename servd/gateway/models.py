"""ModelFolder: finds the models in a folder, their names, and the LoRA adapters of each model."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import msgspec

from servd.api.engine.adapters import NAME
from servd.base.errors import ConfigError
from servd.checkpoint import config_json, gguf, hub, model_spec
from servd.checkpoint.facts import Facts, read_facts
from servd.checkpoint.lora import CONFIG, parse_module
from servd.config import LoRAConfig

logger = logging.getLogger("servd.api")

HUB = "models--"  # prefix of a model's folder in the Hugging Face cache


class GatewayModel(msgspec.Struct, frozen=True):
    name: str
    path: Path  # the argument of `servd serve`: a folder or a GGUF file
    spec: model_spec.ModelSpec
    facts: Facts  # about its weights
    created: int  # when its config or GGUF file was written

    @property
    def is_there(self) -> bool:
        return _is_model(self.path)


class AdapterFolder(msgspec.Struct, frozen=True):
    name: str
    folder: Path
    base: str  # the base model that its config names; "" if none
    created: int

    def owner(self, models: Sequence[str]) -> str | None:
        """Return the model that has the name of the adapter's base model, or else the same last
        path component, or else is the only model. None if there is no such model.
        """
        last = self.base.rstrip("/").rpartition("/")[2]
        same = [name for name in models if name.rpartition("/")[2] == last]
        exact = [name for name in same if name == self.base]
        return next(iter(exact or same or (models if len(models) == 1 else [])), None)


class ModelFolder:
    """The models in a folder. Each look into the folder reads only models that have changed."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # a bare `demo` would be taken for a model's name
        # The files of each entry when it was last read, and the model or why it is invalid.
        self._last: dict[Path, tuple[object, GatewayModel | str | None]] = {}

    def read(self) -> dict[str, GatewayModel]:
        """Return the valid models by name. Log each invalid model once. Raise OSError."""
        models = {}
        latest = {}
        for name, entry in sorted(_models_in(self.path)):
            files = _file_states(entry)
            last_files, model = self._last.get(entry, (None, None))
            if files is None or files != last_files:
                earlier = model
                try:
                    model = _read(name, entry)
                except Exception as error:  # an invalid entry must not affect other models
                    model = str(error)
                    if model != earlier:
                        logger.warning("not serving %r: %s", name, error)
                    if isinstance(error, OSError):  # it may pass while the files stay the same
                        files = None
            latest[entry] = files, model
            if isinstance(model, GatewayModel):
                models[name] = model
        self._last = latest
        return models


def _file_states(entry: Path) -> list[tuple[Path, int, int]] | None:
    """Return path, time of change and size of each file of a model; None if they are not known."""
    states = []
    try:
        if entry.name.startswith(HUB):
            files = [*entry.glob("refs/*"), *entry.glob("snapshots/*/*")]
        elif entry.is_file():
            files = takewhile(Path.exists, gguf.name_parts(entry))
        else:
            files = entry.iterdir()
        for file in files:
            with suppress(OSError):  # a link to nothing
                status = file.stat()
                states.append((file, status.st_ctime_ns, status.st_size))
    except OSError:  # not readable
        return None
    return sorted(states)


def _read(name: str, entry: Path) -> GatewayModel | None:
    """Return the model of an entry; None if it is a download that is not complete."""
    name.encode()
    path = find_snapshot(entry) if entry.name.startswith(HUB) else entry
    if path is None:
        return None
    folder = hub.local_folder(str(path)) if path.suffix == ".gguf" else path
    assert folder is not None
    written = path if path.is_file() else path / "config.json"
    spec = model_spec.read_spec(folder)
    return GatewayModel(name, path, spec, read_facts(str(folder)), int(written.stat().st_mtime))


def _models_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and path of each model: NAME/config.json and NAME.gguf, both also in a
    subfolder ORG, and the models of a Hugging Face cache, ORG/NAME or ORG/NAME:QUANTIZATION.
    """
    for path in folder.iterdir():
        if path.name.startswith(HUB):
            name = path.name.removeprefix(HUB).replace("--", "/")
            yield name, path
            for tag, file in quantizations(path):
                yield f"{name}:{tag}", file
        elif _is_model(path):
            yield gguf.PART.sub("", path.name).removesuffix(".gguf"), path
        elif not path.name.startswith("."):
            with suppress(OSError):  # not a folder, or not readable
                for inner in filter(_is_model, path.iterdir()):
                    name = gguf.PART.sub("", inner.name).removesuffix(".gguf")
                    yield f"{path.name}/{name}", inner


def quantizations(repository: Path) -> Iterator[tuple[str, Path]]:
    """Yield the quantization and path of each GGUF file of a model in the Hugging Face cache; the
    file's name, if two have the same quantization. Branch main's hide those of other revisions.
    """
    main = b""
    with suppress(OSError):
        main = (repository / "refs" / "main").read_bytes().strip()
    files: dict[Path, Path] = {}
    for folder in sorted(repository.glob("snapshots/*"), key=lambda p: os.fsencode(p.name) == main):
        files |= {f.relative_to(folder): f for f in folder.rglob("*.gguf") if _is_model(f)}
    tags = [gguf.find_quantization(path.name) for path in files]
    for tag, file in zip(tags, files.values(), strict=True):
        yield tag if tags.count(tag) == 1 else gguf.PART.sub("", file.name)[: -len(".gguf")], file


def _is_model(path: Path) -> bool:
    """Return whether a path is a model. An unreadable path, such as lost+found, is not."""
    try:
        if path.suffix == ".gguf" and path.is_file():
            return path == next(gguf.name_parts(path)) and gguf.PROJECTOR not in path.name
        return (path / "config.json").is_file()
    except OSError as error:
        logger.debug("%s is no model: %s", path, error)
        return False


def find_snapshot(repository: Path) -> Path | None:
    """Return the snapshot of a model in the Hugging Face cache, from branch main if possible. None
    if no branch's snapshot is complete.
    """
    refs = sorted(repository.glob("refs/*"), key=lambda ref: ref.name != "main")
    refs = [ref for ref in refs if ref.is_file()]  # refs/refs/pr are pull requests
    folders = [repository / "snapshots" / ref.read_text().strip() for ref in refs]
    return next((path for path in folders if _is_model(path) and hub.has_weights(path)), None)


def adapters_in(lora: LoRAConfig) -> dict[str, AdapterFolder]:
    """Return the adapters of --lora-modules and --lora-dir, by name."""
    folders = {}
    if lora.lora_dir is not None:
        paths = (path.parent for path in Path(lora.lora_dir).glob(f"*/{CONFIG}"))
        folders = {path.name: (path, "") for path in paths if NAME.fullmatch(path.name)}
    for entry in lora.lora_modules:
        name, path = parse_module(entry)
        base = msgspec.json.decode(entry).get("base_model_name") if entry[0] == "{" else ""
        folders[name] = Path(path), base or ""
    return {name: _adapter(name, *folder) for name, folder in folders.items()}


def _adapter(name: str, folder: Path, base: str) -> AdapterFolder:
    file = folder / CONFIG
    created = 0
    try:
        created = int(file.stat().st_mtime)
        base = base or config_json.read_json(file).get("base_model_name_or_path") or ""
    except (ConfigError, OSError):  # loading it reports the error
        pass
    return AdapterFolder(name, folder, str(base), created)
