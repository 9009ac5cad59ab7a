"""Classify: the classes of texts."""

import time

import msgspec

from servd.api.protocol.embeddings import EmbeddingUsage


class Classification(msgspec.Struct):
    """One input's class, and how likely each is."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(msgspec.Struct, tag_field="object", tag="list"):
    """The answer."""

    id: str
    model: str
    data: list[Classification]
    usage: EmbeddingUsage
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
