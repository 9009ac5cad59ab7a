"""Adapter: a LoRA adapter, as requests refer to it."""

import msgspec


class Adapter(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A LoRA adapter as it was when it was loaded."""

    name: str
    digest: str  # SHA-256 of its files, hexadecimal
    folder: str  # with a copy of the files
    source: str = ""  # where they came from
    created: int = 0  # Unix time
    is_on_demand: bool = False  # loaded because a request named it


class LoRARequest(msgspec.Struct, frozen=True):
    """The adapter of an offline request, with vLLM's field names."""

    lora_name: str
    lora_int_id: int  # not needed: a name is enough
    lora_path: str  # a folder
