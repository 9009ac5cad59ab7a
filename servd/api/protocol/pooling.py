"""Pooling and classification: the requests and the responses."""

import time
from collections.abc import Sequence
from typing import Generic, Literal, Self, TypeVar

import msgspec
from pydantic import model_validator

from servd.api.protocol.embeddings import EmbeddingUsage, InputRequest, VectorRequest
from servd.api.protocol.validation import wrong_field

Item = TypeVar("Item")


class PoolingRequest(VectorRequest):
    """Body of POST /pooling."""

    pooling: Literal["last", "mean", "all"] | None = None
    task: Literal["embed", "token_embed", "classify"] | None = None

    @model_validator(mode="after")
    def _check_task(self) -> Self:
        if self.task == "classify" and self.pooling is not None:
            raise wrong_field("pooling", "is not for `task` classify: leave it out")
        if (
            self.task in ("embed", "token_embed")
            and self.pooling is not None
            and (self.task == "embed") == (self.pooling == "all")
        ):
            raise wrong_field("task", "and `pooling` contradict each other: leave one out")
        return self

    @property
    def by_token(self) -> bool:
        return self.pooling == "all" or self.task == "token_embed"


class ListResponse(msgspec.Struct, Generic[Item], tag_field="object", tag="list"):
    """The results of several inputs."""

    id: str
    model: str
    data: list[Item]
    usage: EmbeddingUsage
    created: int = msgspec.field(default_factory=lambda: int(time.time()))


class PooledInput(msgspec.Struct, tag_field="object", tag="pooling"):
    """The vector of one input, or the vectors of its tokens."""

    index: int
    data: Sequence[float | list[float]] | str  # a string is base64 of float32, little-endian


class Poolings(ListResponse[PooledInput]):
    """The response of /pooling."""


class ClassifyRequest(InputRequest):
    """Body of POST /classify."""


class Classification(msgspec.Struct):
    """The class of one input, and the probability of each class."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(ListResponse[Classification]):
    """The response of /classify."""
