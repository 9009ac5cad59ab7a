"""Context: the objects of the server that routes use."""

import os
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request, Response

from servd.api.batches.runner import BatchRunner
from servd.api.batches.store import Shelf
from servd.api.call import call_of
from servd.api.engine.adapters import Adapters
from servd.api.engine.async_llm import AsyncLLM
from servd.api.engine.peers import PeerServers
from servd.api.keys import ApiKeys
from servd.api.observability.ignored_fields import IgnoredFields
from servd.api.responses.response_store import ResponseStore
from servd.base.errors import NotFound, UnknownModel
from servd.config import Config
from servd.messages.adapter import Adapter
from servd.messages.engine import EngineReady


class Context(msgspec.Struct, frozen=True):
    config: Config
    async_llm: AsyncLLM
    root: str  # the model's name on the hub, or the served name of a local folder
    started_at: float  # Unix time
    fingerprint: str  # `system_fingerprint` before any update of the weights
    keep_alive: float  # seconds
    reasons: Mapping[str, str]  # why options on "auto" have their value
    keys: ApiKeys
    responses: ResponseStore
    batches: BatchRunner | None  # None without --batch-dir
    peers: PeerServers
    ignored_fields: IgnoredFields
    adapters: Adapters | None  # None without --enable-lora

    @property
    def system_fingerprint(self) -> str:
        """The `system_fingerprint` of an answer that begins now."""
        ready = self.async_llm.status
        num_updates = ready.num_updates if isinstance(ready, EngineReady) else 0
        return f"{self.fingerprint}-{num_updates}" if num_updates else self.fingerprint

    @property
    def shown_names(self) -> list[str]:
        """The model's names that do not reveal a local path, or else its first name."""
        names = self.config.model.served_model_name
        return [name for name in names if not os.path.isabs(name)] or names[:1]

    async def find_model(self, name: str | None) -> tuple[str, Adapter | None]:
        """Return the model name for the response, and the adapter if `name` is that of an adapter.
        Raise UnknownModel, or an error of `Adapters.load`.
        """
        names = self.config.model.served_model_name
        if name is not None and name not in names:
            name = name.removesuffix(":latest")  # Ollama's clients add it
        if name is None or name in names:
            return name or names[0], None
        served = self.shown_names
        if self.adapters is not None:
            if (adapter := await self.adapters.find(name)) is not None:
                return name, adapter
            served = [*served, *self.adapters.store.read_adapters()]
        raise UnknownModel(
            f"the model {name[:200]!r} is not served here; served are: {', '.join(served[:32])}",
            param="model",
        )


def context_of(request: Request) -> Context:
    return request.app.state.context


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def shelf_of(request: Request) -> Shelf:
    """Return the files and batches of the request's key. Raise NotFound without --batch-dir."""
    batches = context_of(request).batches
    if batches is None:
        raise NotFound("files and batches are off: start the server with --batch-dir")
    return batches.store.of(call_of(request).owner)
