"""Reads the quantization config of a checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servd.base.errors import ConfigError, UnsupportedModel
from servd.checkpoint.account import Account, account_for, object_in, read_tables, without_nulls
from servd.checkpoint.config_json import read_json
from servd.checkpoint.multimodal_config import TEXT

QUANTIZATION_FILES = {
    "quant_config.json": "awq",
    "quantize_config.json": "gptq",
    "hf_quant_config.json": "modelopt",
}
AGREED_KEYS = ("bits", "group_size", "sym", "checkpoint_format", "format", "version", "zero_point")


def quantization_of(folder: Path | str) -> dict[str, Any] | None:
    """Return the quantization config of the checkpoint in `folder`: `quant_method` and the method's
    keys; None if the checkpoint is not quantized. Raises UnsupportedModel if two files disagree.
    """
    folder = Path(folder)
    stated: dict[str, Any] = {}
    config = read_json(folder / "config.json", {})
    for part in (config, object_in(config, TEXT) or {}):
        for key in ("quantization_config", "compression_config"):
            stated = stated or object_in(part, key) or {}
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
    groups = object_in(stated, "config_groups", f"{name}.") or {}
    for key in groups:
        group = object_in(groups, key, f"{name}: ") or {}
        yield account_for(f"{name}: {key}", without_nulls(group), f"{table}.group")
        weights = object_in(group, "weights", f"{name}: {key}.") or {}
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
