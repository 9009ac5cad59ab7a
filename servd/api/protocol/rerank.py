"""Rerank: orders documents by similarity to a query, in the formats of Jina and Cohere."""

from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field

from servd.api.protocol.completions import SomeText
from servd.api.protocol.embeddings import EmbeddingUsage
from servd.api.protocol.score import SimilarityRequest, Texts
from servd.api.protocol.validation import Whole


class RerankRequest(SimilarityRequest):
    """Body of POST /rerank."""

    query: SomeText
    documents: Texts
    top_n: Annotated[int, Field(ge=0), Whole] | None = None  # 0: all
    return_documents: bool = True


class RankedText(msgspec.Struct):
    """The text of a document, as it was sent."""

    text: str


class RankedDocument(msgspec.Struct):
    """A document of the response. Its place in the list is its rank."""

    index: int  # in the request
    relevance_score: float  # see Score
    document: RankedText | UnsetType = UNSET


class Ranking(msgspec.Struct):
    """The response of /rerank."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage
