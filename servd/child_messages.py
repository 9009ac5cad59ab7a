"""Messages between a process and its child, through pipes: to begin with, what each must know.

| pipe | messages |
|---|---|
| servd serve -> core, api, server of a model | StartEngine, StartAPIServer, StartModel; Config |
| api -> grammar checker | StartGrammarChecker, then StructuredOutput as lines of JSON |
| grammar checker -> api | GrammarVerdict as lines of JSON |
| core -> worker | StartWorker; all others are those of messages.py |
"""

from __future__ import annotations

import msgspec

from servd.config import Config
from servd.hf import ModelSpec
from servd.messages import Message

ENGINE_IS_DEAD = 3  # exit code of an API server whose engine reported its end


class StartEngine(msgspec.Struct):
    """What an engine process must know to begin."""

    config: Config  # resolved
    spec: ModelSpec
    ipc_dir: str
    started_at: float  # time.monotonic() when the user's command, or the restart, began
    incarnation: int = 0  # how many engines this tree had before
    heartbeat: int = -1  # inherited descriptor, see Heartbeat
    name: str = "engine"  # for the log
    was_asleep: bool = False  # the engine before it


class StartAPIServer(msgspec.Struct):
    """What an API server must know to begin."""

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
    heartbeat: int = -1  # inherited descriptor, see Heartbeat
    place: int = 0  # among the API servers of its tree
    routing: int = -1  # inherited descriptor, see Router; -1 with one engine


class StartModel(msgspec.Struct):
    """What the server of one model among several must know to begin."""

    config: Config  # with --uds, not resolved


class StartGrammarChecker(msgspec.Struct):
    """What the process that tries grammars must know to begin."""

    config: Config  # resolved
    spec: ModelSpec
    channel: int  # descriptor of a stream socket, inherited
    memory_limit: int  # bytes, beside the vocabulary
    stack_size: int  # bytes


class GrammarVerdict(Message):
    """The answer to one grammar; the first one tells that the process is ready."""

    error: str | None = None  # None: it can be used


class StartWorker(msgspec.Struct):
    """What a worker process must know to begin."""

    config: Config  # resolved
    spec: ModelSpec
    rank: int  # of all workers
    inbox: str  # address where it receives ToWorker
    outbox: str  # address that it sends FromWorker to
    # Where several workers meet: an init_method of torch.distributed.
    distributed_init: str | None = None
