"""Delete a model from the Hugging Face cache."""

import argparse
import shutil
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from servd.base.errors import ModelNotFound
from servd.checkpoint.short_names import full_name
from servd.gateway.models import HUB


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="id or short name, such as qwen3:0.6b")


def run(arguments: argparse.Namespace) -> int:
    name = full_name(arguments.model)
    folder = find_repository(name)
    if not folder.is_dir():
        raise ModelNotFound(f"the cache has no model {name!r}; `servd list` shows what it has")
    shutil.rmtree(folder)
    return 0


def find_repository(name: str) -> Path:
    """Return where the Hugging Face cache keeps a model, if it has it."""
    return Path(HF_HUB_CACHE) / f"{HUB}{name.replace('/', '--')}"
