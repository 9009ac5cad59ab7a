"""KVEventsConfig: where an engine publishes changes of its prefix cache; keys as in vLLM's JSON."""

import re
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta

from servd.base.errors import ConfigError

ENDPOINT = re.compile(r"tcp://([^\s/]+):(\d{1,5})|ipc://\S+")


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The value of `--kv-events-config`. Raises ValueError if an endpoint is invalid."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"  # bound if it has a * or is ipc://, else connected to
    replay_endpoint: str | None = None
    buffer_steps: Annotated[int, Meta(ge=1)] = 10_000  # batches that can be replayed
    hwm: Annotated[int, Meta(ge=1)] = 100_000  # batches queued for a slow subscriber
    max_queue_size: int = 100_000  # accepted: servd has no other queue
    topic: str = ""
    data_parallel_rank: int = 0  # an engine's own

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay_endpoint):
            match = None if endpoint is None else ENDPOINT.fullmatch(endpoint)
            if endpoint is not None and not (match and 0 < int(match[2] or 1) < 1 << 16):
                raise ValueError(
                    f"{endpoint} is not an endpoint: write tcp://*:5557, with a port from 1 to "
                    "65535, or ipc:///run/servd/events"
                )

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def of_rank(self, rank: int) -> Self:
        """Return the option for an engine of --data-parallel-size: TCP ports increase with the
        rank.

        Raises ConfigError if a port exceeds 65535.
        """
        replay = self.replay_endpoint and _shifted(self.replay_endpoint, rank)
        try:
            return msgspec.structs.replace(
                self,
                endpoint=_shifted(self.endpoint, rank),
                replay_endpoint=replay,
                data_parallel_rank=rank,
            )
        except ValueError as error:
            raise ConfigError(f"--kv-events-config: {error}") from None


def _shifted(endpoint: str, rank: int) -> str:
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
