"""POST /v2/embed: compute embeddings in the format of Cohere's API."""

import base64
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import Field

from servd.api.call import call_of
from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route
from servd.api.protocol.embeddings import Dimensions
from servd.api.protocol.score import Texts
from servd.api.protocol.translation import renamed
from servd.api.protocol.validation import RequestBody, Whole
from servd.api.serving.embedding import OpenAIServingEmbedding, Vectors
from servd.api.serving.serving import respond_with
from servd.api.text.prompt import Prompt
from servd.messages.engine import RequestOptions
from servd.messages.outputs import unpack_vector
from servd.messages.params import PoolingParams

router = APIRouter(route_class=Route)


class CohereEmbedRequest(RequestBody):
    """Body of POST /v2/embed."""

    lacking = dict.fromkeys(("images", "inputs"), "this model reads `texts` only")

    texts: Texts
    input_type: str = ""
    """The model's prompt to use: `search_query`, `search_document` or another name. If no prompt
    matches, servd uses the model's default prompt.
    """
    embedding_types: Annotated[
        list[Literal["float", "base64", "binary", "ubinary"]], Field(min_length=1, fail_fast=True)
    ] = ["float"]
    output_dimension: Dimensions | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Annotated[int, Field(ge=1), Whole] | None = None


class EmbeddingsByType(msgspec.Struct, rename={"floats": "float"}):
    """One vector per text in each requested format."""

    floats: list[list[float]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET  # float32, little-endian
    binary: list[list[int]] | UnsetType = UNSET  # eight signs in a number, -128 to 127
    ubinary: list[list[int]] | UnsetType = UNSET  # eight signs in a number, 0 to 255


class CohereEmbeddings(msgspec.Struct):
    """Response of POST /v2/embed."""

    id: str
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: dict[str, Any]
    response_type: str = "embeddings_by_type"


@router.post("/v2/embed", response_model=CohereEmbeddings)
async def create_cohere_embeddings(
    request: Request, body: JsonBody[CohereEmbedRequest]
) -> Response:
    """Return embeddings in each requested format."""
    serving: OpenAIServingEmbedding = request.app.state.serving_embedding
    processor = serving.processor
    limit = min(body.max_tokens or processor.max_model_len, processor.max_model_len)
    first = limit if body.truncate == "END" else None
    last = limit if body.truncate == "START" else None
    name = processor.pooling.name_for(body.input_type)
    prompts = [
        Prompt(content=text, param="texts", keep_first=first, keep_last=last, prompt_name=name)
        for text in body.texts
    ]
    params = PoolingParams(dimensions=body.output_dimension)
    options = RequestOptions(body.priority or 0)
    with renamed({"dimensions": "output_dimension"}):
        vectors = await serving.embed(request, "embd", prompts, params, options)
    response_id = f"embd-{call_of(request).unique_id}"
    size = vectors.num_numbers * len(body.embedding_types)
    return await respond_with(request, size, lambda: _answer(response_id, body, vectors))


def _answer(response_id: str, body: CohereEmbedRequest, vectors: Vectors) -> CohereEmbeddings:
    made = {form: [FORMS[form](data) for data in vectors.data] for form in body.embedding_types}
    embeddings = EmbeddingsByType(made.pop("float", UNSET), **made)
    units = {"input_tokens": vectors.num_prompt_tokens}
    meta = {"api_version": {"version": "2"}, "billed_units": units}
    return CohereEmbeddings(response_id, embeddings, body.texts, meta)


def pack_signs(data: bytes) -> list[int]:
    """Return bytes of eight bits each, 1 for a number above 0, highest first, padded with zeros."""
    numbers = unpack_vector(data)
    groups = [numbers[start : start + 8] for start in range(0, len(numbers), 8)]
    return [sum((number > 0) << (7 - i) for i, number in enumerate(group)) for group in groups]


# What becomes of a vector, float32 as bytes.
FORMS: dict[str, Callable[[bytes], Any]] = {
    "float": unpack_vector,
    "base64": lambda data: base64.b64encode(data).decode(),
    "binary": lambda data: [byte - 128 for byte in pack_signs(data)],
    "ubinary": pack_signs,
}
