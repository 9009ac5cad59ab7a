"""The list of served models."""

from typing import Any

import msgspec


class ModelCard(msgspec.Struct, tag_field="object", tag="model"):
    """A name under which the model is served."""

    id: str
    created: int  # Unix time of the server's start
    root: str  # name of the loaded model on the hub or here, not a path
    max_model_len: int  # prompt plus output, in tokens
    owned_by: str = "servd"
    parent: str | None = None
    # "text" and perhaps "image"; the names of this field and the next are OpenRouter's.
    input_modalities: list[str] = msgspec.field(default_factory=lambda: ["text"])
    default_parameters: dict[str, int | float] = {}  # of sampling
    permission: list[Any] = []  # an old field of OpenAI's that some clients require


class ModelList(msgspec.Struct, tag_field="object", tag="list"):
    """The list of all names of the model."""

    data: list[ModelCard]
