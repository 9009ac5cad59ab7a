"""POST /rerank, /v1/rerank and /v2/rerank: rank documents by their relevance to a query."""

from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.embedding import compare
from servd.api.call import call_of
from servd.api.context import context_of, json_response
from servd.api.http.route import Parsed, Route
from servd.api.protocol.rerank import RankedDocument, RankedText, Ranking, RerankRequest
from servd.api.text.prompt import Prompt

router = APIRouter(route_class=Route)


@router.post("/rerank", response_model=Ranking)
@router.post("/v1/rerank", response_model=Ranking)
@router.post("/v2/rerank", response_model=Ranking)
async def rerank(request: Request, body: Parsed[RerankRequest]) -> Response:
    """Rank documents by how well they answer a query."""
    call = call_of(request)
    pooling = context_of(request).async_llm.processor.pooling
    query = Prompt(
        content=body.query,
        param="query",
        keep_first=body.max_tokens_per_query,
        prompt_name=pooling.name_for("search_query"),
    )
    documents = [
        Prompt(
            content=text,
            param="documents",
            keep_first=body.max_tokens_per_doc,
            prompt_name=pooling.name_for("search_document"),
        )
        for text in body.documents
    ]
    scores, usage = await compare(request, "rerank", [query], documents, body)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [
        RankedDocument(
            i, scores[i], RankedText(body.documents[i]) if body.return_documents else UNSET
        )
        for i in order[: body.top_n or None]
    ]
    response_id = f"rerank-{call.unique_id}"
    answer = Ranking(response_id, call.model, results, usage)
    return json_response(answer)
