"""Messages between a process and its child, through pipes; the first has the child's parameters.

| pipe | messages |
|---|---|
| servd serve -> core, api, server of a model | StartEngine, StartAPIServer, StartModel; Config |
| api -> grammar checker | StartLimitedProcess, then StructuredOutput as lines of JSON |
| grammar checker -> api | Reply as lines of JSON |
| api -> media process | StartLimitedProcess, then MediaRequest as lines of JSON, with files |
| media process -> api | Reply, then MediaReply as lines of JSON |
| core -> worker | StartWorker; all other messages are in servd/messages/engine.py |
"""

from typing import Literal

import msgspec

from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.messages.engine import Message
from servd.messages.multimodal import TensorPlace

ENGINE_IS_DEAD = 3  # exit code of an API server whose engine reported its end
HUB_IS_LOST = 4  # exit code of a process on another host whose connection to the Hub broke


class Uplink(msgspec.Struct, frozen=True):
    """The data with which a process on another host connects to the Hub of its parent's host."""

    at: str  # address of the hub
    token: str  # of this hub alone; both ends derive their keys from the token
    name: str  # of the process, unique among the hub's processes
    timeout: float  # seconds, --engine-heartbeat-timeout


class StartEngine(msgspec.Struct):
    config: Config  # resolved
    spec: ModelSpec
    ipc_dir: str
    started_at: float  # time.monotonic() when the user's command, or the restart, began
    generation: int = 0  # number of earlier engines of this process tree
    heartbeat: int = -1  # inherited descriptor, see Heartbeat
    name: str = "engine"  # for the log
    was_asleep: bool = False  # whether the previous engine was asleep
    uplink: Uplink | None = None  # of an engine on another host
    identity: str = ""  # see MPClient; of an engine on another host


class StartAPIServer(msgspec.Struct):
    config: Config  # resolved
    spec: ModelSpec
    reasons: dict[str, str]  # why options that servd chose have their values
    ipc_dir: str
    client: int  # its number as a client of the engine
    name: str  # for the log, e.g. "api-0"
    listener: int  # descriptor of the listening socket, inherited
    url: str | None  # announced by this process once the model is ready
    generations: list[int]  # of each engine, by rank
    hands_over: bool = False  # other servers may accept from the same socket, before or after
    waits: bool = False  # accepts connections only when the engine is ready
    heartbeat: int = -1  # inherited descriptor, see Heartbeat


class StartModel(msgspec.Struct):
    config: Config  # with --uds, not resolved


class StartLimitedProcess(msgspec.Struct):
    config: Config  # resolved
    spec: ModelSpec
    memory_limit: int  # bytes for the work, in addition to the vocabulary or the image processor
    stack_size: int = 0  # bytes; 0: the system's
    channel: int = -1  # descriptor of a stream socket, inherited


class Reply(Message):
    """The result of a piece of work. The first reply reports that the process is ready."""

    error: str | None = None  # None: the grammar compiles, the picture is processed


class MediaRequest(Message):
    """A picture to process: its file comes with the message, and gets the tensors."""

    detail: Literal["auto", "low", "high"]


class MediaReply(Reply):
    """A picture as a model reads it, see ProcessedImage."""

    placeholder: str = ""
    text: str = ""
    num_embeds: int = 0
    grid: tuple[int, int] = (0, 0)
    tensors: list[TensorPlace] = []
    num_parts: int = 1
    decode_ns: int = 0  # duration
    process_ns: int = 0  # duration


class StartWorker(msgspec.Struct):
    config: Config  # resolved
    spec: ModelSpec
    rank: int  # of all workers
    inbox: str  # address where the worker receives ToWorker
    outbox: str  # address to which the worker sends FromWorker
    # With several workers: the init_method of torch.distributed.
    distributed_init: str | None = None
    uplink: Uplink | None = None  # of a worker on another host: in place of inbox and outbox
