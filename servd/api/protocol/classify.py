"""Classification: the request and the response."""

import time

import msgspec

from servd.api.protocol.embeddings import EmbeddingUsage, InputRequest


class ClassifyRequest(InputRequest):
    """Body of POST /classify."""


class Classification(msgspec.Struct):
    """The class of one input, and the probability of each class."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(msgspec.Struct, tag_field="object", tag="list"):
    """The response of /classify."""

    id: str
    model: str
    data: list[Classification]
    usage: EmbeddingUsage
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
