"""OpenAIServingScore: serves the similarity of texts."""

import operator
from collections.abc import Sequence

from fastapi import Request, Response
from msgspec import UNSET

from servd.api.call import call_of
from servd.api.context import json_response
from servd.api.http.json_body import run_for
from servd.api.protocol.embeddings import EmbeddingUsage
from servd.api.protocol.score import (
    RankedDocument,
    RankedText,
    Ranking,
    RerankRequest,
    Score,
    ScoreRequest,
    Scores,
    SimilarityRequest,
)
from servd.api.serving.embedding import OpenAIServingEmbedding
from servd.api.text.prompt import Pair, Prompt, SharedText
from servd.messages.outputs import unpack_vector
from servd.messages.params import CLASSIFY, PoolingParams


class OpenAIServingScore(OpenAIServingEmbedding):
    """Serves scores and ranks, by the model's head or by embeddings; see OpenAIServing."""

    async def create_score(self, body: ScoreRequest, request: Request) -> Response:
        """Score pairs of texts."""
        call = call_of(request)
        limit = body.max_tokens_per_query
        firsts = [Prompt(content=text, param="text_1", keep_first=limit) for text in body.text_1]
        limit = body.max_tokens_per_doc
        seconds = [Prompt(content=text, param="text_2", keep_first=limit) for text in body.text_2]
        scores, usage = await self.compare(request, "score", firsts, seconds, body)
        listed = [Score(index, score) for index, score in enumerate(scores)]
        return json_response(Scores(f"score-{call.unique_id}", call.model, listed, usage))

    async def do_rerank(self, body: RerankRequest, request: Request) -> Response:
        """Rank documents by how well they answer a query."""
        call = call_of(request)
        pooling = self.processor.pooling
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
        scores, usage = await self.compare(request, "rerank", [query], documents, body)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            RankedDocument(
                i, scores[i], RankedText(body.documents[i]) if body.return_documents else UNSET
            )
            for i in order[: body.top_n or None]
        ]
        return json_response(Ranking(f"rerank-{call.unique_id}", call.model, results, usage))

    async def compare(
        self,
        request: Request,
        prefix: str,
        firsts: Sequence[Prompt],
        seconds: Sequence[Prompt],
        body: SimilarityRequest,
    ) -> tuple[list[float], EmbeddingUsage]:
        """Return the scores of one text with all others, or of texts pair by pair: scores of the
        model's head or, without a head, cosine similarities of embeddings.

        Raises InvalidRequest: the model's head classifies, or its files do not specify how to
        compute scores.
        """
        pooling = self.processor.pooling
        pooling.check_scores()
        if pooling.task != "classify":
            params = PoolingParams(pooling=body.pooling, normalize=True)
            prompts = [*firsts, *seconds]
            vectors = await self.embed(request, prefix, prompts, params, body.request_options)
            split = len(firsts)
            scores = await _cosines(request, vectors.data[:split], vectors.data[split:])
            return scores, vectors.usage
        texts = [(SharedText(str(first.content)), first.keep_first) for first in firsts]
        pairs = [
            Prompt(
                content=Pair(text, str(second.content), keep, second.keep_first), param=second.param
            )
            for (text, keep), second in zip(
                texts * (len(seconds) // len(texts)), seconds, strict=True
            )
        ]
        vectors = await self.embed(request, prefix, pairs, CLASSIFY, body.request_options)
        outputs = [unpack_vector(data) for data in vectors.data]
        if body.use_activation is False:
            return [numbers[0] for numbers in outputs], vectors.usage
        return [pooling.score(numbers) for numbers in outputs], vectors.usage


async def _cosines(
    request: Request, firsts: Sequence[bytes], seconds: Sequence[bytes]
) -> list[float]:
    """Return cosines of float32 vectors of length 1: of one with all others, or of pairs."""

    def compute() -> list[float]:
        first_vectors = [unpack_vector(vector) for vector in firsts]
        first_vectors *= len(seconds) // len(first_vectors)
        second_vectors = map(unpack_vector, seconds)
        return [
            sum(map(operator.mul, a, b)) for a, b in zip(first_vectors, second_vectors, strict=True)
        ]

    return await run_for(request, sum(map(len, seconds)) // 4, compute)
