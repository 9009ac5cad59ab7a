"""Embeddings: the request and the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field

from servd.api.protocol.completions import list_of_prompts
from servd.api.protocol.validation import RequestBody
from servd.params import PoolingParams


class EmbeddingRequest(RequestBody):
    """Body of POST /v1/embeddings."""

    input: Annotated[Any, BeforeValidator(list_of_prompts)]  # read as list[str] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    user: str | None = None

    def pooling_params(self) -> PoolingParams:
        """How the hidden states of each input become its vector."""
        given = {"pooling": self.pooling, "normalize": self.normalize, "dimensions": self.dimensions}
        return PoolingParams(**{name: value for name, value in given.items() if value is not None})


class Embedding(msgspec.Struct, tag_field="object", tag="embedding"):
    """One input's vector."""

    index: int
    embedding: list[float] | str  # a string is base64 of float32, little-endian


class EmbeddingUsage(msgspec.Struct):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, tag_field="object", tag="list"):
    """The answer."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
