"""POST /score and /v1/score: how similar texts are, by the cosine of their embeddings."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.openapi import describes
from servd.api.protocol.embeddings import EmbeddingUsage
from servd.api.protocol.score import Score, ScoreRequest, Scores
from servd.api.routes._context import context_of, ignored_header, json_response, read_body
from servd.api.routes._embed import Input, embed
from servd.outputs import unpack_vector

router = APIRouter()


@router.post("/score")
@router.post("/v1/score")
@describes(Scores, body=ScoreRequest)
async def create_scores(request: Request) -> Response:
    """A score for each pair."""
    body = await read_body(request, ScoreRequest)
    model = context_of(request).model_name(body.model)
    keep = body.truncate_prompt_tokens
    inputs = [Input(text, "text_1", keep_last=keep) for text in body.text_1]
    inputs += [Input(text, "text_2", keep_last=keep) for text in body.text_2]
    vectors = await embed(request, "score", inputs, body.params(), body.priority)
    firsts, seconds = vectors.data[: len(body.text_1)], vectors.data[len(body.text_1) :]
    scores = await similarities(firsts, seconds)
    answer = Scores(
        f"score-{request.state.unique_id}",
        model,
        [Score(index, score) for index, score in enumerate(scores)],
        EmbeddingUsage(vectors.num_prompt_tokens, vectors.num_prompt_tokens),
    )
    return json_response(answer, headers=ignored_header(body))


async def similarities(firsts: Sequence[bytes], seconds: Sequence[bytes]) -> list[float]:
    """Cosines of vectors of length 1, float32 each: of one with all others, or of each with its
    counterpart.
    """

    def compute() -> list[float]:
        left = [unpack_vector(vector) for vector in firsts]
        left *= len(seconds) // len(left)
        return [
            sum(map(operator.mul, one, unpack_vector(other)))
            for one, other in zip(left, seconds, strict=True)
        ]

    return await asyncio.to_thread(compute)  # a thousand long vectors take a tenth of a second
