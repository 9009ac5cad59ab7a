"""Messages between a host (the head) and the hosts that run engines or workers for it.

| border | union | members |
|---|---|---|
| Member -> Head | ToHead | Join, Beat, Carried, Left |
| Head -> Member | ToMember | Welcome, Refused, Beat, Carried, ClientLeft |
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

import servd
from servd import hf
from servd.config import Config, flag_of, options_by_name
from servd.errors import ConfigError, ModelNotFound
from servd.messages import Message

TOKEN = "SERVD_JOIN_TOKEN"  # the environment's, if there is no file
MIN_TOKEN = 32  # characters

# Options that determine what is computed, and how much at once.
SHARED = (
    "dtype", "quantization", "quantization_imatrix", "cpu_activation_dtype", "load_format", "seed",
    "speculative_config", "block_size", "kv_cache_dtype", "enable_prefix_caching", "max_num_seqs",
    "max_num_batched_tokens", "data_parallel_size",
)  # fmt: skip
WEIGHTS = "the model's weights"
SAMPLES, SAMPLE_SIZE = 16, 4096  # of a file of weights; bytes


class Join(Message, tag=True):
    """Request of a process on another host to join. All messages but this one and Refused may
    change between versions of servd.
    """

    version: str  # of servd
    host: str  # name, for the log
    session: int  # chosen at random
    rank: int  # of the engine or worker
    terms: dict[str, str]  # see `terms_of`

    def refusal(self, terms: Mapping[str, str]) -> str | None:
        """Why it cannot join a host with these terms; None if it can."""
        if self.version != servd.__version__:
            return (
                f"servd {self.version} on the host that joins, {servd.__version__} on the head: "
                "install the same version"
            )
        different = [
            f"{name}: {theirs} on the host that joins, {value} on the head"
            for name, value in terms.items()
            if (theirs := self.terms.get(name)) != value and (name != WEIGHTS or (theirs and value))
        ]
        return "; ".join(different) + ": make them equal" if different else None


class Beat(Message, tag=True):
    """Heartbeat of a host; answered by another Beat."""

    session: int  # -1 in the answer: unknown session
    asked_ns: int  # by the clock of the joining host
    now_ns: int = 0  # in the answer: by the clock of the head


class Carried(Message, tag=True):
    """A forwarded message from a client to the process (ToEngine, ToWorker), or back."""

    client: int  # receiver; 0 in the direction of the process
    message: msgspec.Raw


class Left(Message, tag=True):
    reason: str
    computing: list[str] = []  # see EngineRestarting


ToHead = Join | Beat | Carried | Left


class Welcome(Message, tag=True):
    incarnation: int  # its number
    start: bytes  # for a worker: StartWorker, without the fields that differ by worker


class Refused(Message, tag=True):
    reason: str
    is_final: bool  # retrying is useless


class ClientLeft(Message, tag=True):
    """An API server has ended: the engine can drop its requests."""

    client: int


ToMember = Welcome | Refused | Beat | Carried | ClientLeft


def read_token(config: Config) -> str:
    """The shared token of the hosts.

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


def terms_of(config: Config, spec: hf.ModelSpec) -> dict[str, str]:
    """What all engines of one server must have in common, as text by name.

    Args:
        config: resolved.
        spec: the model's.
    """
    sections = options_by_name()
    values = {name: getattr(getattr(config, sections[name][0]), name) for name in SHARED}
    terms = {flag_of(name): str(msgspec.to_builtins(value)) for name, value in values.items()}
    own = msgspec.json.encode(msgspec.structs.replace(spec, folder=""), order="sorted")
    terms["the model's config.json"] = hashlib.sha256(own).hexdigest()[:12]
    terms[WEIGHTS] = ""  # unknown: random, or downloaded when an engine starts
    if spec.folder and config.model.load_format != "dummy":
        with suppress(ModelNotFound, OSError):
            files = hf.weight_files(spec.folder, config.model.load_format)
            found = [(each.name, _sample(each, each.stat().st_mtime_ns)) for each in files]
            terms[WEIGHTS] = hashlib.sha256(repr(found).encode()).hexdigest()[:12]
    return terms


@cache
def _sample(path: Path, changed_ns: int) -> bytes:
    """Hash of a file's size and of samples of its contents; hashing all would take minutes."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for i in range(SAMPLES):
            file.seek(max(size - SAMPLE_SIZE, 0) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_SIZE))
    return digest.digest()


def join_of(config: Config, spec: hf.ModelSpec, rank: int) -> Join:
    """The Join of an engine or worker of this host, without a session."""
    return Join(servd.__version__, socket.gethostname(), 0, rank, terms_of(config, spec))
