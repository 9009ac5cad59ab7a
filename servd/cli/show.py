"""Show a model's size, context, license and what it can do."""

import argparse
import json
import os
from typing import Any

from servd.api.engine.description import describe_model
from servd.api.engine.processor import Processor
from servd.api.text.chat_template import DEFAULT_TEMPLATE
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import ModelNotFound, ServdError
from servd.base.sizes import format_bytes
from servd.checkpoint import hf
from servd.checkpoint.short_names import full_name
from servd.cli.rm import find_repository
from servd.config import Config
from servd.gateway.models import find_snapshot
from servd.terminal.api_client import DEFAULT_URL, Client


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "id, short name, folder, .gguf file, or a model of a running server"
    parser.add_argument("model", metavar="MODEL", help=help)
    parser.add_argument("--url", help=f"ask this server only [{DEFAULT_URL}, after this machine]")
    key = os.environ.get("SERVD_API_KEY")
    parser.add_argument("--api-key", default=key, metavar="KEY", help="default: $SERVD_API_KEY")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each known fact."""
    name = full_name(arguments.model)
    shown = None if arguments.url else describe_local(name)
    if shown is None:
        shown = ask(Client(arguments.url or DEFAULT_URL, arguments.api_key), arguments.model)
    info = shown["model_info"]
    details = shown["details"]
    family = info["general.architecture"]
    size = format_bytes(shown["size"]) if "size" in shown else ""
    rows = {
        "model": name,
        "architecture": family,
        "parameters": details["parameter_size"],
        "weights": ", ".join(filter(None, (details["quantization_level"], size))),
        "context": f"{info[f'{family}.context_length']} tokens",
        "chat template": "no" if shown["template"].endswith(DEFAULT_TEMPLATE) else "yes",
        "capabilities": ", ".join(shown["capabilities"]),
        "license": shown.get("license"),
    }
    for title, value in rows.items():
        print(f"{title:<16}{value or 'unknown'}")
    return 0


def describe_local(name: str) -> dict[str, Any] | None:
    """Return the description of a model of this machine; None if the model is not here."""
    folder = hf.local_folder(name)
    repository = find_repository(name)
    if folder is None and repository.is_dir():
        folder = find_snapshot(repository)
    if folder is None:
        return None
    spec = hf.read_spec(folder)
    config = Config.load({"model": str(folder)})
    tokenizer = Tokenizer.load(str(folder))
    return describe_model(Processor(config, spec, tokenizer, spec.max_position_embeddings), name)


def ask(client: Client, name: str) -> dict[str, Any]:
    """Return the description of a server's model. Raises ModelNotFound if there is none."""
    try:
        with client.open("POST", "/api/show", {"model": name}) as reply:
            return json.loads(reply.read())
    except ServdError as error:
        raise ModelNotFound(
            f"{name} is not on this machine (`servd pull` downloads a model), and {error}"
        ) from None
