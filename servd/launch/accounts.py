"""The accounts of all files of a model: see servd/checkpoint/account.py."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from servd.checkpoint import generation_config, gguf, lora, pooling, quantization_config
from servd.checkpoint.account import Account, account_for, object_in
from servd.checkpoint.model_spec import ModelSpec
from servd.checkpoint.overrides import ROPE
from servd.checkpoint.tokenizer_files import tokenizer_accounts, tokenizer_folder
from servd.config import Config

BY_TRANSFORMERS = "remove them, leave the model to transformers (--model-impl transformers)"


def accounts_of(config: Config, spec: ModelSpec) -> Iterator[Account]:
    """Yield the accounts of a model's files, with resolved options. A class of transformers reads
    all of config.json itself.
    """
    if not spec.folder:  # the fake model
        return
    if config.model.model_impl == "servd":
        account = account_for("config.json", spec.config, "config", f"config.{spec.model_type}")
        for part in (account, *_rotations(spec.config)):
            yield part if pooling.is_encoder(spec) else replace(part, remedy=BY_TRANSFORMERS)
    if (Path(spec.folder) / lora.CONFIG).exists():  # transformers applies it to the model
        unknown = {lora.CONFIG: "of an adapter"}
        remedy = "give the adapter a folder of its own and serve it by --lora-modules"
        yield Account("the folder", "files", unknown=unknown, remedy=remedy)
    yield from quantization_config.quantization_accounts(spec.folder)
    yield from gguf.gguf_accounts(spec.folder)
    model = config.model
    yield from tokenizer_accounts(tokenizer_folder(spec, model.tokenizer, model.download_dir))
    for account in generation_config.generation_accounts(spec, model.generation_config):
        yield replace(account, remedy="remove them, or use --generation-config vllm")
    yield from pooling.accounts(spec)


def _rotations(config: Mapping[str, Any]) -> Iterator[Account]:
    """Yield the accounts of rotations, which may differ from one type of layers to the next."""
    for key in ROPE:
        if not (stated := object_in(config, key)):
            continue
        parts = {name: part for name, part in stated.items() if isinstance(part, dict)}
        for name, part in (parts or {"": stated}).items():
            yield account_for(f"config.json: {key}{name and f'.{name}'}", part, "rotation")
