"""Bridge: forwards messages between local sockets and engines that Ray placed on other hosts.

API servers send to an engine's local socket, wherever the engine runs. For engines on other hosts,
the bridge listens on these sockets, and forwards replies to the API servers' sockets.
"""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

from servd.ipc.channels import Inbox, Outbox, UnreadableMessage, wait
from servd.ipc.hub import Hub, Uplink
from servd.messages.engine import Detach

log = logging.getLogger("servd.launch")

TICK = 0.1  # seconds between looks for engines and API servers that have come or gone


class Bridge(threading.Thread):
    """A thread that owns the sockets. Its methods are thread-safe. Before it ends with an error, it
    calls `on_failure`. Engines on other hosts connect to `host`, and are lost after
    `timeout` seconds of silence.
    """

    def __init__(self, host: str, timeout: float, on_failure: Callable[[Exception], None]) -> None:
        super().__init__(name="bridge", daemon=True)
        self.on_failure = on_failure
        self.hub = Hub(host, timeout, self.lose)
        # By an engine's local address: called in any thread when the engine's connection breaks.
        self.on_lost: dict[str, Callable[[], None]] = {}
        # An engine's local address, and whether to open (True) or close it.
        self.changes: SimpleQueue[tuple[str, bool]] = SimpleQueue()
        self.ended: SimpleQueue[tuple[int, str]] = SimpleQueue()  # API servers: number, address
        self.gone: set[str] = set()  # addresses of API servers that ended
        self.closing = threading.Event()

    def open(self, address: str, on_lost: Callable[[], None]) -> Uplink:
        """Listen at the local address of an engine. Return the Uplink for the engine."""
        self.on_lost[address] = on_lost
        self.changes.put((address, True))
        return self.hub.uplink(address)

    def forget(self, address: str) -> None:
        """Stop listening for an engine that has ended. From now on, `on_lost` is not called."""
        self.on_lost.pop(address, None)
        self.changes.put((address, False))

    def lose(self, address: str) -> None:
        self.on_lost.pop(address, lambda: None)()

    def detach(self, client: int, address: str) -> None:
        """Make engines drop the requests of an API server that has ended, with this address."""
        self.ended.put((client, address))

    def close(self) -> None:
        self.closing.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        try:
            self.carry()
        except Exception as error:
            self.on_failure(error)

    def carry(self) -> None:
        """Forward messages until `close`."""
        inboxes: dict[str, Inbox[msgspec.Raw]] = {}  # by address
        outboxes: dict[str, Outbox] = {}  # to API servers, by address
        while not self.closing.is_set():
            self.update(inboxes, outboxes)
            wait([self.hub.listener, *inboxes.values()], TICK)
            for forward in self.hub.drain():
                if forward.receiver in self.gone:
                    continue
                if forward.receiver not in outboxes:
                    outboxes[forward.receiver] = Outbox(forward.receiver)
                outboxes[forward.receiver].send(forward.message)
            for address, inbox in inboxes.items():
                try:
                    for message in inbox.drain():
                        self.hub.send(address, message)
                except UnreadableMessage as error:
                    log.error("dropping an invalid message to %s: %s", address, error)
        for socket in (*inboxes.values(), *outboxes.values()):
            socket.close()
        self.hub.close()

    def update(self, inboxes: dict[str, Inbox[msgspec.Raw]], outboxes: dict[str, Outbox]) -> None:
        """Open sockets of new engines. Close sockets of engines and API servers that ended."""
        while not self.changes.empty():
            address, is_open = self.changes.get()
            if is_open:
                inboxes[address] = Inbox(address, msgspec.Raw)
            elif address in inboxes:
                inboxes.pop(address).close()
                self.hub.forget(address)
        while not self.ended.empty():
            client, at = self.ended.get()
            self.gone.add(at)
            if at in outboxes:
                outboxes.pop(at).close()
            for address in inboxes:
                self.hub.send(address, Detach(client))
