"""Make an API key, and its entry for --api-key-file.

servd key alice --scopes inference metrics >> keys.toml
"""

import argparse
import json
import secrets
import sys

import msgspec

from servd.base.errors import ConfigError
from servd.config.keys import SCOPES, Key, hash_key


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="who gets it")
    parser.add_argument(
        "--scopes",
        nargs="+",
        choices=sorted(SCOPES),
        default=["inference"],
        help="what it may do [inference]",
    )
    parser.add_argument("--expires", metavar="TIME", help="e.g. 2027-01-31T00:00:00Z [never]")


def run(arguments: argparse.Namespace) -> int:
    secret = f"sk-{secrets.token_urlsafe(32)}"
    entry = {"name": arguments.name, "sha256": hash_key(secret.encode())}
    entry["scopes"] = arguments.scopes
    if arguments.expires:
        entry["expires"] = arguments.expires
    try:
        msgspec.convert(entry, Key)
    except msgspec.ValidationError as error:
        raise ConfigError(f"servd key: {error}") from None
    print("[[keys]]")
    for name, value in entry.items():  # what JSON writes of texts and lists is TOML, too
        print(f"{name} = {value if name == 'expires' else json.dumps(value)}")
    print(f"the key, which is kept nowhere: {secret}", file=sys.stderr)
    return 0
