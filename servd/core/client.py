"""EngineCoreClient: an API server's (or LLM's) end of the channel to the engine process."""

from __future__ import annotations

import hashlib
import os

import msgspec

import servd
from servd.config import Config
from servd.hf import ModelSpec
from servd.ipc import Inbox, Outbox, address
from servd.messages import Attach, FromEngine, ToEngine


def identity(config: Config, spec: ModelSpec) -> str:
    """What an engine and those who attach to it must have in common: servd's version, the model,
    the tokenizer, what adapters may be and how many engines there are. In words that an error can
    quote, with a fingerprint.
    """
    folder = os.path.realpath(spec.folder) if spec.folder else "fake"
    lora = config.lora.num_places, config.lora.max_lora_rank
    size = config.parallel.data_parallel_size
    deciding = [msgspec.structs.replace(spec, folder=folder), config.model.tokenizer, lora, size]
    fingerprint = hashlib.sha256(msgspec.json.encode(deciding)).hexdigest()[:12]
    return f"servd {servd.__version__} with model {os.path.basename(folder)} ({fingerprint})"


def engine_dir(ipc_dir: str, rank: int) -> str:
    """Folder of the sockets of an engine and its clients, one for each of --data-parallel-size: an
    engine knows of no other.
    """
    return os.path.join(ipc_dir, f"rank-{rank}") if rank else ipc_dir


def engine_address(ipc_dir: str, incarnation: int) -> str:
    """Where an engine listens. Each has an address of its own: what was sent to a dead one never
    reaches the next.
    """
    return address(ipc_dir, f"engine-{incarnation}" if incarnation else "engine")


class EngineCoreClient:
    """Sends ToEngine and receives FromEngine. Belongs to one thread.

    The engine may start later: messages wait in the socket. Attaching makes it answer with
    EngineStatus while it loads and EngineReady afterwards; with EngineDead if the engine does not
    have the `identity` that the client has.
    """

    def __init__(self, ipc_dir: str, client: int, identity: str, incarnation: int = 0) -> None:
        self.ipc_dir = ipc_dir
        self.client = client
        self.identity = identity
        self.inbox: Inbox[FromEngine] = Inbox(address(ipc_dir, f"client-{client}"), FromEngine)
        self._attach(incarnation)

    def _attach(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.outbox = Outbox(engine_address(self.ipc_dir, incarnation))
        self.send(Attach(self.client, self.inbox.at, self.identity))

    def follow(self, incarnation: int) -> None:
        """Attach to the engine that takes the place of a dead one. What that one still said may
        come after this, with its own incarnation.
        """
        self.outbox.close()
        self._attach(incarnation)

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine; never blocks."""
        self.outbox.send(message)

    def recv(self, timeout: float | None = None) -> FromEngine | None:
        """Wait for one message, at most `timeout` seconds; None when time is up."""
        return self.inbox.recv(timeout)

    def drain(self, most: int) -> list[FromEngine]:
        """The messages that have arrived, up to so many; see `Inbox.drain`."""
        return self.inbox.drain(most)

    def fileno(self) -> int:
        """Readable when messages may have arrived (edge-triggered, see Inbox.fileno)."""
        return self.inbox.fileno()

    def close(self) -> None:
        """Close both ends."""
        self.outbox.close()
        self.inbox.close()
