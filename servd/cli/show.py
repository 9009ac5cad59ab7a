"""Show a model's size, context, license and what it can do."""

import argparse
import json
from typing import Any

from servd.api.engine.description import describe_folder
from servd.api.text.chat_template import DEFAULT_TEMPLATE
from servd.base import log
from servd.base.errors import ModelNotFound, ServdError
from servd.base.sizes import format_bytes
from servd.checkpoint import hub
from servd.checkpoint.short_names import full_name
from servd.cli.rm import find_file, find_repository
from servd.gateway.models import find_snapshot
from servd.terminal import api_client


def add_options(parser: argparse.ArgumentParser) -> None:
    help = "id, short name, folder, .gguf file, or a model of a running server"
    parser.add_argument("name", metavar="MODEL", help=help)
    api_client.add_server_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each fact. With another --url than the default, ask that server only."""
    name = full_name(arguments.name)
    facts = describe_local(name) if arguments.url == api_client.DEFAULT_URL else None
    if facts is None:
        client = api_client.Client(arguments.url, arguments.api_key)
        try:
            with client.open("POST", "/api/show", {"model": arguments.name}) as reply:
                facts = json.loads(reply.read())
        except ServdError as error:
            if arguments.url != api_client.DEFAULT_URL:
                raise
            hint = "is not on this machine (`servd pull` downloads a model), and"
            raise ModelNotFound(f"{name} {hint} {error}") from None
    details = facts["details"]
    family = details["family"]
    for title, value in (
        ("model", name),
        ("architecture", family),
        ("parameters", details["parameter_size"]),
        ("weights", f"{details['quantization_level']}, {format_bytes(facts.get('size', 0))}"),
        ("context", f"{facts['model_info'][f'{family}.context_length']} tokens"),
        ("chat template", "no" if facts["template"].endswith(DEFAULT_TEMPLATE) else "yes"),
        ("capabilities", ", ".join(facts["capabilities"])),
        ("license", facts.get("license")),
    ):
        print(f"{title:<16}{log.escape(str(value or 'unknown'))}")
    return 0


def describe_local(name: str) -> dict[str, Any] | None:
    """Return the description of a model of this machine; None if the model is not here."""
    folder = hub.local_folder(str(find_file(name) or name)) or find_snapshot(find_repository(name))
    return None if folder is None else describe_folder(folder, name)
