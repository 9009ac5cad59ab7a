"""Free the memory of a model on a running server."""

import argparse
import json
from urllib.parse import quote

from servd.checkpoint.short_names import full_name
from servd.terminal import api_client


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="MODEL", help="name of a model that `servd ps` lists")
    api_client.add_server_options(parser)


def run(arguments: argparse.Namespace) -> int:
    client = api_client.Client(arguments.url, arguments.api_key)
    with client.open("POST", f"/sleep?model={quote(full_name(arguments.name))}") as reply:
        return 0 if json.loads(reply.read())["is_sleeping"] else 1
