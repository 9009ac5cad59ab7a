"""Checks whether another checkpoint can replace the weights of a running model."""

import os
from pathlib import Path

import msgspec

from servd.base.errors import ConfigError, InvalidRequest
from servd.checkpoint.model_spec import ModelSpec, read_spec
from servd.checkpoint.weight_files import check_regular, find_weight_files, read_header
from servd.config.model import ModelConfig

IGNORED_KEYS = {"_name_or_path", "transformers_version"}  # of config.json


def find_replacement(folder: str, spec: ModelSpec, model: ModelConfig) -> ModelSpec:
    """Return the spec with the checkpoint in `folder`, whose names have no links. Raises
    InvalidRequest if the folder is not beside that of `spec`, or if the checkpoints differ in more
    than the values of tensors.
    """
    if model.load_format == "dummy" or not spec.folder:
        raise _refuse("the weights are no files (--load-format dummy, --executor fake): restart")
    try:
        present = _read_tensors(spec.folder, model.load_format)
        if not (path := _resolve_sibling(folder, spec.folder)):
            raise _refuse("update_weights reads only folders beside the model's own folder")
        check_regular(Path(path))
        config = read_spec(path, model.hf_overrides).config
        tensors = _read_tensors(path, model.load_format)
    except (ConfigError, OSError) as error:
        raise _refuse(str(error)) from None
    for key in sorted((spec.config.keys() | config.keys()) - IGNORED_KEYS):
        if spec.config.get(key) != config.get(key):
            raise _refuse(
                f"{path}/config.json has {key} {config.get(key)!r:.50}, and the model that is "
                f"served {spec.config.get(key)!r:.50}: to serve another architecture, restart servd"
            )
    for name in sorted(present.keys() | tensors.keys()):
        new = tensors.get(name, "absent")
        old = present.get(name, "absent")
        if new != old:
            raise _refuse(
                f"in {path}, the tensor {name:.200} is {new}, and in the model that is served {old}"
            )
    return msgspec.structs.replace(spec, folder=path)


def _resolve_sibling(folder: str, other: str) -> str | None:
    """Return the real path of a folder; None if it is not beside `other`."""
    try:
        path = os.path.realpath(folder)
    except ValueError:  # a character that no path has
        return None
    is_beside = os.path.dirname(path) == os.path.dirname(os.path.realpath(other))
    return path if is_beside else None


def _read_tensors(folder: str, load_format: str) -> dict[str, str]:
    """Return type and shape of all tensors by name. Raises InvalidRequest for other formats."""
    tensors: dict[str, str] = {}
    for file in find_weight_files(Path(folder), load_format):
        if file.suffix != ".safetensors":
            raise _refuse("update_weights replaces only safetensors: restart servd instead")
        for name, tensor in read_header(file).items():
            tensors[name] = f"{tensor.dtype} {tensor.shape}"
    return tensors


def _refuse(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param="args")
