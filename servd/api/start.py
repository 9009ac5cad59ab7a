"""Start message of an API-server process: its parent can read it without importing FastAPI."""

from __future__ import annotations

import msgspec

from servd.config import Config
from servd.hf import ModelSpec

ENGINE_IS_DEAD = 3  # exit code of an API server whose engine reported its end


class Start(msgspec.Struct):
    """What an API server reads from its stdin."""

    config: Config  # resolved
    spec: ModelSpec
    reasons: dict[str, str]  # why options that were left to servd have their value
    ipc_dir: str
    client: int  # its number among the engine's clients
    name: str  # for the log, e.g. "api-0"
    listener: int  # descriptor of the listening socket, inherited
    url: str | None  # announced by this process once the model is ready
    incarnations: list[int]  # by the engine's rank
    hands_over: bool = False  # another server may accept from the same socket, before and after
    waits: bool = False  # for the engine, before it takes connections from there
    pulse: int = -1  # inherited descriptor, see Pulse
    place: int = 0  # among the API servers of its tree
    routing: int = -1  # inherited descriptor, see Router; -1 with one engine


class StartModel(msgspec.Struct):
    """What the server of one model among several reads from its stdin."""

    config: Config  # with --uds, not resolved
