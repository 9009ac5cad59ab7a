"""POST /v1/decisions: answer questions with the probabilities of given options."""

import asyncio
import statistics
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.builders.decisions import OptionScorer, gather
from servd.api.call import call_of
from servd.api.connection import while_connected
from servd.api.context import context_of, json_response
from servd.api.http.route import Parsed, Route
from servd.api.protocol.decisions import (
    Answer,
    DecisionResponse,
    DecisionsRequest,
    Question,
    answer,
    options,
)
from servd.api.protocol.responses import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
    chat_messages,
)
from servd.api.text.prompt import Chat, Prompt
from servd.messages.engine import RequestOptions

router = APIRouter(route_class=Route)

MAX_CONCURRENT = 16  # questions
NO_REASONING = {"enable_thinking": False, "thinking": False}  # as `reasoning_effort: none`


@router.post("/v1/decisions", response_model=DecisionResponse)
async def create_decision(request: Request, body: Parsed[DecisionsRequest]) -> Response:
    """Answer questions with the probabilities of the given options.

    The model answers each question twice, with the options in both orders. The response has the
    mean probabilities, because models favour the first or the last option.
    """
    call = call_of(request)
    context = context_of(request)
    async_llm = context.async_llm
    async_llm.processor.check_sums()
    request_id = f"decision-{call.unique_id}"
    asked = RequestOptions(body.priority or 0, cache_salt=body.prompt_cache_key)
    await call.open_requests([request_id])
    with call.admit(asked) as (_, options):
        scorer = OptionScorer(async_llm, request_id, options, call.deadline)
        async with while_connected(request.receive):
            answers = await _answers(scorer, body)
    usage = ResponseUsage(
        scorer.num_prompt_tokens,
        InputTokensDetails(scorer.num_cached_tokens),
        scorer.num_output_tokens,
        OutputTokensDetails(0),
        scorer.num_prompt_tokens + scorer.num_output_tokens,
    )
    decision = DecisionResponse(call.model, answers, usage)
    return json_response(decision)


async def _answers(scorer: OptionScorer, body: DecisionsRequest) -> list[Answer]:
    messages = chat_messages(None, cast(list[dict[str, Any]], body.input))
    may_run = asyncio.Semaphore(MAX_CONCURRENT)

    async def bounded(question: Question) -> Answer:
        async with may_run:
            return await _answer(scorer, messages, question)

    first = await bounded(body.questions[0])  # brings the input into the prefix cache
    return [first, *await gather(map(bounded, body.questions[1:]))]


async def _answer(
    scorer: OptionScorer, messages: list[dict[str, Any]], question: Question
) -> Answer:
    listed = options(question)
    given = await _probabilities(scorer, messages, question, listed)
    reverse = await _probabilities(scorer, messages, question, listed[::-1])
    pairs = zip(given, reverse[::-1], strict=True)
    return answer(question, list(map(statistics.fmean, pairs)))


async def _probabilities(
    scorer: OptionScorer,
    messages: list[dict[str, Any]],
    question: Question,
    listed: list[tuple[str, str]],
) -> list[float]:
    """Return the probability of each option, in the order of `listed`."""
    async_llm = scorer.async_llm
    lines = [f"- {text}: {meaning}" if meaning else f"- {text}" for text, meaning in listed]
    asked = "\n".join([question["instructions"], "", "Answer with one of these only:", *lines])
    asking = [*messages, {"role": "user", "content": asked}]
    chat = Chat(messages=asking, chat_template_kwargs=NO_REASONING)
    prompt = Prompt(content=chat, param="input")
    owner = scorer.options.owner
    token_ids = await async_llm.run_in_thread(
        owner, prompt.num_chars, lambda: async_llm.processor.tokenize(prompt)
    )
    end = async_llm.spec.eos_token_ids[:1]  # distinguishes "no" from the beginning of "nothing"
    encode = async_llm.processor.tokenizer.encode

    def encode_options() -> list[list[int]]:
        return [[*encode(text, False), *end] for text, _ in listed]

    size = sum(len(text) for text, _ in listed)
    coded = await async_llm.run_in_thread(owner, size, encode_options)
    return await scorer.probabilities(token_ids, coded)
