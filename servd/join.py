"""Joining: what passes between the host of the API servers and hosts that have engines for them.

| border | union | members |
|---|---|---|
| engines' host -> API servers' host | ToHead | Join, Beat, ToClient, Restarted, Left |
| API servers' host -> engines' host | ToNode | Welcome, Refused, Beat, ToRank, ClientLeft |
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

import servd
from servd.config import Config, flag_of, options_by_name
from servd.errors import ConfigError
from servd.hf import ModelSpec
from servd.messages import EngineRestarting, Message

TOKEN = "SERVD_JOIN_TOKEN"  # the environment's, if there is no file
MIN_TOKEN = 32  # characters

# Options that decide what is computed, and how much of it at once.
SHARED = (
    "dtype", "quantization", "cpu_activation_dtype", "load_format", "seed", "speculative_config",
    "block_size", "kv_cache_dtype", "enable_prefix_caching", "max_num_seqs",
    "max_num_batched_tokens", "data_parallel_size",
)  # fmt: skip


class Join(Message, tag=True):
    """A host asks to be joined. Versions of servd may change every message but this one and
    Refused.
    """

    version: str  # of servd
    host: str  # its name, for the log
    session: int  # chosen at random
    ranks: list[int]  # of its engines
    terms: dict[str, str]  # see `terms_of`


class Beat(Message, tag=True):
    """The host lives; answered by the same."""

    session: int
    now_ns: int = 0  # in the answer: the clock of the API servers' host


class ToClient(Message, tag=True):
    """What an engine says to an API server: FromEngine."""

    rank: int
    client: int
    message: msgspec.Raw


class Restarted(Message, tag=True):
    """An engine has died, and its host starts the next one."""

    rank: int
    message: EngineRestarting


class Left(Message, tag=True):
    """The host's last message."""

    reason: str


ToHead = Join | Beat | ToClient | Restarted | Left


class Welcome(Message, tag=True):
    """The engines may start."""

    incarnations: list[int]  # of each of the ranks, to begin with
    start: msgspec.Raw  # to workers: StartWorker, but for what is each one's own


class Refused(Message, tag=True):
    """They may not."""

    reason: str
    is_final: bool  # asking again is of no use


class ToRank(Message, tag=True):
    """What an API server says to an engine, ToEngine; nothing to an incarnation after that."""

    rank: int
    incarnation: int
    message: msgspec.Raw


class ClientLeft(Message, tag=True):
    """An API server has ended: engines can drop what they do for it."""

    client: int


ToNode = Welcome | Refused | Beat | ToRank | ClientLeft


def read_token(config: Config) -> str:
    """The token that hosts share.

    Raises:
        ConfigError: there is none, it is short, or other users can read it.
    """
    path = config.parallel.join_token_file
    if path is None:
        token, source = os.environ.get(TOKEN, ""), f"${TOKEN}"
    else:
        source = f"--join-token-file {path}"
        try:
            token = Path(path).read_text().strip()
            if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
                raise ConfigError(f"{source}: other users may read this file; chmod 600 it")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: {getattr(error, 'strerror', error)}") from None
    if not token:
        raise ConfigError(
            "engines and servers that join need a token that they share: --join-token-file FILE, "
            f"or ${TOKEN}; `openssl rand -hex 32` makes one"
        )
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{source}: {len(token)} characters are too few for a token, which has at least "
            f"{MIN_TOKEN}; `openssl rand -hex 32` makes one"
        )
    return token


def terms_of(config: Config, spec: ModelSpec) -> dict[str, str]:
    """What engines of one server must have in common, in words by name.

    Args:
        config: resolved.
        spec: the model's.
    """
    sections = options_by_name()
    values = {name: getattr(getattr(config, sections[name][0]), name) for name in SHARED}
    terms = {flag_of(name): str(msgspec.to_builtins(value)) for name, value in values.items()}
    own = msgspec.json.encode(msgspec.structs.replace(spec, folder=""), order="sorted")
    terms["the model's config.json"] = hashlib.sha256(own).hexdigest()[:12]
    return terms


def refusal(join: Join, terms: Mapping[str, str]) -> str | None:
    """Why a host cannot be joined to this one, which has these terms; None if it can."""
    if join.version != servd.__version__:
        return (
            f"servd {join.version} on the host that joins, {servd.__version__} on the head: "
            "install the same version"
        )
    different = [
        f"{name}: {join.terms.get(name)} on the host that joins, {value} on the head"
        for name, value in terms.items()
        if join.terms.get(name) != value
    ]
    return "; ".join(different) + ": make them equal" if different else None
