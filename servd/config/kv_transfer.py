"""KVTransferConfig: how an engine exchanges KV blocks with others; keys as in vLLM's JSON."""

from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta

FLAG = "--kv-transfer-config"

Port = Annotated[int, Meta(ge=1, le=65535)]


class Extra(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys that only servd has."""

    peers: list[str] = []  # HOST:PORT of engines that blocks may come from
    timeout: Annotated[float, Meta(gt=0, le=600)] = 5.0  # seconds without a block
    keep: Annotated[float, Meta(gt=0, le=86400)] = 120.0  # seconds that peers can fetch blocks


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The value of `--kv-transfer-config`. Raises ValueError if nobody can connect to an address,
    or if a receiver has no peers.
    """

    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_connector: Literal["servd"] = "servd"
    engine_id: str = ""
    kv_ip: str = "127.0.0.1"  # where a producer listens, and as its answers name it
    kv_port: Port = 14579  # plus the rank under --data-parallel-size
    kv_buffer_size: Annotated[float, Meta(gt=0)] = 1e9  # bytes kept for peers
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    kv_connector_extra_config: Extra = Extra()

    def __post_init__(self) -> None:
        if self.kv_ip in ("*", "::", "0.0.0.0"):
            raise ValueError("kv_ip must be the address of one interface: peers connect to it")
        peers = self.kv_connector_extra_config.peers
        if self.receives and not peers:
            raise ValueError(
                f"a {self.kv_role} needs the address of its peers: add "
                '"kv_connector_extra_config": {"peers": ["HOST:PORT"]}'
            )
        for peer in peers:
            host, _, port = peer.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"the peer {peer!r} is not HOST:PORT")

    @property
    def sends(self) -> bool:
        """Whether other engines may fetch this engine's blocks."""
        return self.kv_role != "kv_consumer"

    @property
    def receives(self) -> bool:
        """Whether this engine may fetch blocks of other engines."""
        return self.kv_role != "kv_producer"

    def of_rank(self, rank: int) -> Self:
        """Return the option for the data-parallel engine `rank`: ports increase with the rank."""
        return msgspec.structs.replace(self, kv_port=self.kv_port + rank)
