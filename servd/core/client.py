"""EngineCoreClient: an API server's (or LLM's) end of the channel to the engine process."""

from __future__ import annotations

from servd.ipc import Inbox, Outbox, address
from servd.messages import Attach, FromEngine, ToEngine


class EngineCoreClient:
    """Sends ToEngine and receives FromEngine. Belongs to one thread.

    The engine may start later: messages wait in the socket. Attaching makes it answer with
    EngineStatus while it loads and EngineReady afterwards.
    """

    def __init__(self, ipc_dir: str, client: int) -> None:
        self.client = client
        at = address(ipc_dir, f"client-{client}")
        self.inbox: Inbox[FromEngine] = Inbox(at, FromEngine)
        self.outbox = Outbox(address(ipc_dir, "engine"))
        self.send(Attach(client, at))

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine; never blocks."""
        self.outbox.send(message)

    def recv(self, timeout: float | None = None) -> FromEngine | None:
        """Wait for one message, at most `timeout` seconds; None when time is up."""
        return self.inbox.recv(timeout)

    def drain(self) -> list[FromEngine]:
        """All messages that have arrived."""
        return self.inbox.drain()

    def fileno(self) -> int:
        """Readable when messages may have arrived (edge-triggered, see Inbox.fileno)."""
        return self.inbox.fileno()

    def close(self) -> None:
        """Close both ends."""
        self.outbox.close()
        self.inbox.close()
