"""The accounts of all files of a model: see account.py."""

from collections.abc import Iterator, Mapping
from typing import Any

from servd.checkpoint.account import Account, account_for
from servd.checkpoint.hf import ModelSpec
from servd.checkpoint.overrides import ROPE


def accounts_of(spec: ModelSpec, implementation: str) -> Iterator[Account]:
    """Yield the accounts of a model's files. `implementation`: --model-impl; transformers reads all
    of config.json itself.
    """
    if implementation == "servd" and spec.folder:
        yield account_for("config.json", spec.config, "config", f"config.{spec.model_type}")
        yield from _rotations(spec.config)


def _rotations(config: Mapping[str, Any]) -> Iterator[Account]:
    """Yield the accounts of rotations, which may differ from one type of layers to the next."""
    for key in ROPE:
        stated = config.get(key)
        if not isinstance(stated, dict):
            continue
        parts = {name: part for name, part in stated.items() if isinstance(part, dict)}
        for name, part in (parts or {"": stated}).items():
            yield account_for(f"config.json: {key}{name and f'.{name}'}", part, "rotation")
