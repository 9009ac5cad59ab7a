"""Loading and unloading of adapters: requests, as vLLM has them."""

from typing import Annotated

from pydantic import Field

from servd.api.protocol.validation import RequestBody

Name = Annotated[str, Field(min_length=1)]


class LoadAdapterRequest(RequestBody):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Name
    """What requests will call it, as `model`."""
    lora_path: Name
    """Its folder, inside --lora-dir; relative to it, or whole."""
    load_inplace: bool = False
    """Replace the adapter that has the name, if there is one."""


class UnloadAdapterRequest(RequestBody):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: int | None = None
    """Not needed: a name is enough."""
