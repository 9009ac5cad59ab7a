"""Cohere's embed: the request and the answer, with vectors in several forms at once."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from servd.api.protocol.embeddings import Dimensions
from servd.api.protocol.score import Texts
from servd.api.protocol.validation import RequestBody
from servd.errors import InvalidRequest


class CohereEmbedRequest(RequestBody):
    """Body of POST /v2/embed."""

    texts: Texts
    input_type: str = ""
    """`search_query` and `search_document` choose among the prompts in the model's files, others by
    their name; without such a prompt the default of the files is taken."""
    embedding_types: Annotated[
        list[Literal["float", "base64", "binary", "ubinary"]], Field(min_length=1, fail_fast=True)
    ] = ["float"]
    output_dimension: Dimensions | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _check_support(self) -> CohereEmbedRequest:
        for name in ("images", "inputs"):
            if (self.model_extra or {}).get(name):
                raise InvalidRequest(
                    f"`{name}` is not supported: this model reads `texts` only", param=name
                )
        return self


class EmbeddingsByType(msgspec.Struct, rename={"floats": "float"}):
    """One vector per text in each form that was asked for."""

    floats: list[list[float]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET  # float32, little-endian
    binary: list[list[int]] | UnsetType = UNSET  # signs, eight a number, -128 to 127
    ubinary: list[list[int]] | UnsetType = UNSET  # the same, 0 to 255


class CohereEmbeddings(msgspec.Struct):
    """The answer."""

    id: str
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: dict[str, Any]
    response_type: str = "embeddings_by_type"


def sign_bits(vector: list[float]) -> list[int]:
    """A bit for each number, set above 0, the first one highest; zeros fill up the last byte."""
    numbers = [vector[start : start + 8] for start in range(0, len(vector), 8)]
    return [sum((number > 0) << (7 - i) for i, number in enumerate(group)) for group in numbers]
