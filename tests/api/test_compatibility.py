"""docs/compatibility.md is what the server answers now, and speaks of every field."""

from __future__ import annotations

from servd.api.protocol.anthropic import MessagesRequest
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.completions import CompletionRequest
from servd.api.protocol.decisions import DecisionsRequest
from servd.api.protocol.embeddings import EmbeddingRequest
from servd.api.protocol.generation import UNSUPPORTED
from servd.api.protocol.pooling import PoolingRequest
from servd.api.protocol.rerank import RerankRequest
from servd.api.protocol.responses import ResponsesRequest
from servd.api.protocol.score import ScoreRequest
from servd.api.routes.compat.cohere import CohereEmbedRequest
from tools import compatibility

KINDS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/pooling": PoolingRequest,
    "/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/v2/embed": CohereEmbedRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/decisions": DecisionsRequest,
    "/v1/messages": MessagesRequest,
}


async def test_the_page_is_current():
    page = await compatibility.page()
    assert compatibility.PAGE.read_text(encoding="utf8") == page, (
        "run `python -m tools.compatibility`"
    )


def test_every_field_is_tried():
    assert KINDS.keys() == compatibility.ROUTES.keys()
    for path, kind in KINDS.items():
        tried = compatibility.ROUTES[path][1].keys()
        assert kind.model_fields.keys() - tried == set(), path
    assert set(UNSUPPORTED) - compatibility.ROUTES["/v1/chat/completions"][1].keys() == set()
