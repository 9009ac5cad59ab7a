"""POST /score, /v1/score: score the similarity of texts by the model's head or by embeddings."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.embedding import compare
from servd.api.call import call_of
from servd.api.context import json_response
from servd.api.http.route import Parsed, Route
from servd.api.protocol.score import Score, ScoreRequest, Scores
from servd.api.text.prompt import Prompt

router = APIRouter(route_class=Route)


@router.post("/score", response_model=Scores)
@router.post("/v1/score", response_model=Scores)
async def create_scores(request: Request, body: Parsed[ScoreRequest]) -> Response:
    """Score pairs of texts."""
    call = call_of(request)
    most = body.max_tokens_per_query
    firsts = [Prompt(content=text, param="text_1", keep_first=most) for text in body.text_1]
    most = body.max_tokens_per_doc
    seconds = [Prompt(content=text, param="text_2", keep_first=most) for text in body.text_2]
    scores, usage = await compare(request, "score", firsts, seconds, body)
    answer = Scores(
        f"score-{call.unique_id}",
        call.model,
        [Score(index, score) for index, score in enumerate(scores)],
        usage,
    )
    return json_response(answer)
