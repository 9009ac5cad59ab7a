"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.async_llm import AsyncLLM
from servd.api.openapi import describes
from servd.api.protocol.chat import ChatCompletionRequest
from servd.api.protocol.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from servd.api.routes._context import context_of, ignored_header, json_response, read_body

router = APIRouter()


@router.post("/tokenize")
@describes(Tokenized, body=TokenizeRequest)
async def tokenize(request: Request) -> Response:
    """The token ids that a completion or a chat would compute."""
    context = context_of(request)
    body = await read_body(request, TokenizeRequest)
    context.model_name(body.model)
    tokenizer = context.async_llm.processor.tokenizer
    if body.prompt is not None:
        text, add_special_tokens = body.prompt, body.add_special_tokens
    else:
        text, add_special_tokens = await render_chat(context.async_llm, body), False
    token_ids = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    strings = [tokenizer.token_string(i) for i in token_ids] if body.return_token_strs else None
    answer = Tokenized(len(token_ids), context.max_model_len, token_ids, strings)
    return json_response(answer, headers=ignored_header(body))


async def render_chat(async_llm: AsyncLLM, body: TokenizeRequest | ChatCompletionRequest) -> str:
    """The prompt of a request with messages.

    Raises:
        InvalidRequest: see `AsyncLLM.render_chat`.
    """
    tool_use = body.tool_use()
    return await async_llm.render_chat(
        cast(list[dict[str, Any]], body.messages),
        tool_use.tools if tool_use else None,
        body.add_generation_prompt,
        body.continue_final_message,
        body.template_variables(),
    )


async def count_chat_tokens(async_llm: AsyncLLM, body: ChatCompletionRequest) -> int:
    """Tokens of the prompt of a chat, however long it is.

    Raises:
        InvalidRequest: see `AsyncLLM.render_chat`.
    """
    prompt = await render_chat(async_llm, body)
    return len(await async_llm.encode(prompt, add_special_tokens=False))


@router.get("/tokenizer_info")
@describes(dict[str, Any])
async def tokenizer_info(request: Request) -> Response:
    """The model's tokenizer_config.json with the chat template that is in use."""
    processor = context_of(request).async_llm.processor
    config = {
        name: value for name, value in processor.tokenizer.config.items() if name != "name_or_path"
    }
    return json_response({**config, "chat_template": processor.chat_template.source})


@router.post("/detokenize")
@describes(Detokenized, body=DetokenizeRequest)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    context = context_of(request)
    body = await read_body(request, DetokenizeRequest)
    context.model_name(body.model)
    processor = context.async_llm.processor
    processor.check_token_ids(body.tokens, "tokens")
    text = await asyncio.to_thread(
        processor.tokenizer.decode, body.tokens, skip_special_tokens=False
    )
    return json_response(Detokenized(text), headers=ignored_header(body))
