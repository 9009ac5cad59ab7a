"""The request and the response of POST /collective_rpc, in vLLM's format."""

from typing import Annotated, Any

import msgspec
from pydantic import Field

from servd.api.protocol.validation import RequestBody

Text = Annotated[str, Field(max_length=4096)]


class CollectiveRpcRequest(RequestBody):
    """Body of POST /collective_rpc."""

    method: Text
    """`update_weights`, `start_profile`, `stop_profile`, `sleep` or `wake_up`."""
    args: Annotated[list[Text | int], Field(max_length=1)] = []
    """Of `update_weights`: a folder beside the model's, on the host of the engine."""
    kwargs: Annotated[dict[str, Any], Field(max_length=0)] = {}
    """Empty: arguments have no names."""


class CollectiveRpcResponse(msgspec.Struct):
    """The results of all workers of all engines, by rank. `sleep` and `wake_up` have none."""

    results: list[str | None]
