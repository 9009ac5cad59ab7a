"""List the models in the Hugging Face cache or in a folder."""

import argparse
import os
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from servd.base import log
from servd.base.sizes import format_bytes
from servd.gateway.models import ModelFolder


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="as for --models-dir")


def run(arguments: argparse.Namespace) -> int:
    """Print name, size, context and whether the weights fit into this machine's memory."""
    folder = Path(arguments.folder or HF_HUB_CACHE)
    models = ModelFolder(folder).read() if folder.is_dir() else {}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for model in models.values():
        fits = "" if model.facts.num_bytes < 0.9 * memory else "does not fit into memory"
        size = format_bytes(model.facts.num_bytes)
        length = model.spec.max_position_embeddings
        name = log.escape(model.name)
        print(f"{name:<44}{size:>10}{length:>9} tokens  {fits}".rstrip())
    if not models:
        print(f"no models in {log.escape(str(folder))}; `servd pull MODEL` downloads one")
    return 0
