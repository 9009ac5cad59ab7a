"""Scores, the similarity of texts pair by pair, and ranks in the formats of Jina and Cohere."""

from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import AliasChoices, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from servd.api.protocol.completions import MAX_PROMPTS, SomeText
from servd.api.protocol.embeddings import IN_TEXTS, EmbeddingUsage, PooledRequest
from servd.api.protocol.pooling import ListResponse
from servd.api.protocol.validation import PositiveInt, Whole, wrong_field


def list_of_texts(value: Any) -> Any:
    """Return a text or a list of texts as a list. A text may be written `{"text": ...}`."""
    texts = value if isinstance(value, list) else [value]
    if not 1 <= len(texts) <= MAX_PROMPTS:
        raise PydanticCustomError(
            "texts", "must be a text or a list of 1 to {max} texts", {"max": MAX_PROMPTS}
        )
    texts = [text.get("text") if isinstance(text, dict) else text for text in texts]
    if not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError(
            "texts", 'must be made of strings or {"text": ...}: this model reads text only'
        )
    return texts


class Text(TypedDict):
    """A text, written as an object."""

    text: SomeText


OneOrMoreTexts = (
    SomeText | Text | Annotated[list[SomeText | Text], Field(min_length=1, max_length=MAX_PROMPTS)]
)
Texts = Annotated[Any, BeforeValidator(list_of_texts, OneOrMoreTexts)]  # read as list[str]


class SimilarityRequest(PooledRequest):
    """The fields that all requests that compare texts share."""

    lacking = PooledRequest.lacking | {"chat_template_kwargs": IN_TEXTS}

    pooling: Literal["last", "mean"] | None = None
    max_tokens_per_query: PositiveInt | None = None
    max_tokens_per_doc: PositiveInt | None = None


class ScoreRequest(SimilarityRequest):
    """Body of POST /score: one text and one or more others, or two lists of the same length."""

    text_1: Annotated[Texts, Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))]
    text_2: Annotated[
        Texts, Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))
    ]

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise wrong_field(
                "text_1",
                f"has {len(self.text_1)} texts and `text_2` {len(self.text_2)}: send "
                "one `text_1`, or as many as `text_2`",
            )
        return self


class Score(msgspec.Struct, tag_field="object", tag="score"):
    """The similarity of a pair of texts."""

    index: int
    score: float  # cosine, -1 to 1, or the score of the model's head, mostly 0 to 1


class Scores(ListResponse[Score]):
    """The response of /score."""


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
