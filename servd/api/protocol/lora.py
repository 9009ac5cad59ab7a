"""The requests to load and unload adapters, in vLLM's format."""

from typing import Annotated

from pydantic import Field

from servd.api.protocol.validation import Int, RequestBody

Name = Annotated[str, Field(min_length=1)]


class LoadAdapterRequest(RequestBody):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Name
    """Name of the adapter, which requests send as `model`."""
    lora_path: Name
    """Path of the adapter's folder inside --lora-dir, relative to --lora-dir or absolute."""
    load_inplace: bool = False
    """Replace an adapter that has the same name."""


class UnloadAdapterRequest(RequestBody):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Name
    lora_int_id: Int | None = None
    """No effect: `lora_name` identifies the adapter."""
