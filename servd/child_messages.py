"""Messages between a process and its child, through pipes.

| pipe | messages |
|---|---|
| api -> grammar checker | StartGrammarChecker, then StructuredOutput as lines of JSON |
| grammar checker -> api | GrammarVerdict as lines of JSON |
| core -> worker | StartWorker; all others are those of messages.py |
"""

from __future__ import annotations

import msgspec

from servd.config import Config
from servd.hf import ModelSpec
from servd.messages import Message


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
    """What a worker process must know to begin: its start message (see child.py)."""

    config: Config  # resolved
    spec: ModelSpec
    rank: int  # of all workers
    inbox: str  # address where it receives ToWorker
    outbox: str  # address that it sends FromWorker to
    # Where several workers meet: an init_method of torch.distributed.
    distributed_init: str | None = None
