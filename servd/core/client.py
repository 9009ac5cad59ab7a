"""EngineCoreClient: an API server's (or LLM's) end of the channel to the engine process."""

import hashlib
import os

import msgspec

import servd
from servd.checkpoint.model_spec import ModelSpec
from servd.config import Config
from servd.ipc.channels import Inbox, Outbox, address
from servd.messages.engine import Attach, FromEngine, ToEngine


def identity(config: Config, spec: ModelSpec) -> str:
    """Return, as text for error messages, what an engine and its clients must agree on: servd's
    version, and a fingerprint of the model, tokenizer, LoRA limits and number of engines.
    """
    folder = os.path.realpath(spec.folder) if spec.folder else "fake"
    lora = config.lora.num_adapter_slots, config.lora.max_lora_rank
    size = config.parallel.data_parallel_size
    deciding = [msgspec.structs.replace(spec, folder=folder), config.model.tokenizer, lora, size]
    fingerprint = hashlib.sha256(msgspec.json.encode(deciding)).hexdigest()[:12]
    return f"servd {servd.__version__} with model {os.path.basename(folder)} ({fingerprint})"


def engine_dir(ipc_dir: str, rank: int) -> str:
    """Return the folder of the sockets of the engine `rank` and its clients."""
    return os.path.join(ipc_dir, f"rank-{rank}") if rank else ipc_dir


def engine_address(ipc_dir: str, generation: int) -> str:
    """Return the address where an engine listens. Every restart has a new address, so that a
    message to a dead engine never reaches its replacement.
    """
    return address(ipc_dir, f"engine-{generation}" if generation else "engine")


class EngineCoreClient:
    """A client's connection to the engine: sends ToEngine, receives FromEngine, in one thread.

    The engine may start later: messages wait in the socket. After the client attaches, the engine
    answers with EngineStatus while loading, then with EngineReady. If its `identity` differs from
    the client's, the engine answers with EngineDead instead.
    """

    def __init__(self, ipc_dir: str, client: int, identity: str, generation: int = 0) -> None:
        self.ipc_dir = ipc_dir
        self.client = client
        self.identity = identity
        self.inbox: Inbox[FromEngine] = Inbox(address(ipc_dir, f"client-{client}"), FromEngine)
        self._attach(generation)

    def _attach(self, generation: int) -> None:
        self.generation = generation
        self.outbox = Outbox(engine_address(self.ipc_dir, generation))
        self.send(Attach(self.client, self.inbox.at, self.identity))

    def follow(self, generation: int) -> None:
        """Attach to the engine that replaces a dead engine. Messages of the dead engine may still
        arrive; their `generation` identifies them.
        """
        self.outbox.close()
        self._attach(generation)

    def send(self, message: ToEngine) -> None:
        self.outbox.send(message)

    def recv(self, timeout: float | None = None) -> FromEngine | None:
        """Return the next message, or None if none arrives within `timeout` seconds."""
        return self.inbox.recv(timeout)

    def drain(self, most: int) -> list[FromEngine]:
        return self.inbox.drain(most)

    def fileno(self) -> int:
        """Return a descriptor that is readable when messages may have come (edge-triggered)."""
        return self.inbox.fileno()

    def close(self) -> None:
        self.outbox.close()
        self.inbox.close()
