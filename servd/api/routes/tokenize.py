"""POST /tokenize and /detokenize, GET /tokenizer_info: convert text to token ids and back."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from servd.api.call import call_of
from servd.api.context import context_of, json_response
from servd.api.http.route import Parsed, Route
from servd.api.protocol.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from servd.api.text.prompt import Prompt

router = APIRouter(route_class=Route)


@router.post("/tokenize", response_model=Tokenized)
@router.post("/v1/tokenize", response_model=Tokenized)  # as SGLang has it
async def tokenize(request: Request, body: Parsed[TokenizeRequest]) -> Response:
    """Return the token ids of a prompt or of a chat."""
    call = call_of(request)
    context = context_of(request)
    tokenizer = context.async_llm.processor.tokenizer
    content = body.chat if body.prompt is None else body.prompt
    prompt = Prompt(content=content, add_special_tokens=body.add_special_tokens)
    token_ids = await call.tokenize(prompt)

    def build() -> Tokenized:
        strings = (
            [tokenizer.vocabulary_string(i) for i in token_ids] if body.return_token_strs else None
        )
        return Tokenized(
            len(token_ids), context.async_llm.processor.max_model_len, token_ids, strings
        )

    return await call.respond(len(token_ids), build)


@router.get("/tokenizer_info", response_model=dict[str, Any])
async def tokenizer_info(request: Request) -> Response:
    """Return tokenizer_config.json with the chat template in use."""
    processor = context_of(request).async_llm.processor
    config = {k: v for k, v in processor.tokenizer.config.items() if k != "name_or_path"}
    return json_response({**config, "chat_template": processor.chat_template.source})


@router.post("/detokenize", response_model=Detokenized)
@router.post("/v1/detokenize", response_model=Detokenized)
async def detokenize(request: Request, body: Parsed[DetokenizeRequest]) -> Response:
    """Return the text of the given token ids."""
    context = context_of(request)
    processor = context.async_llm.processor

    def build() -> Detokenized:
        processor.check_token_ids(body.tokens, "tokens")
        text = processor.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return Detokenized(text, text)

    return await call_of(request).respond(len(body.tokens), build)
