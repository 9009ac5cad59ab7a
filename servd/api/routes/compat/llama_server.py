"""GET /props and GET /slots, with llama-server's names."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

import servd
from servd.api.context import context_of, json_response
from servd.api.http.route import Route

router = APIRouter(route_class=Route)
NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty"}


class Props(msgspec.Struct):
    """The model's names, chat template, context length and slots."""

    default_generation_settings: dict[str, Any]  # n_ctx, params
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    modalities: dict[str, bool]  # vision, audio


class Slot(msgspec.Struct):
    """A slot for one request in the batch."""

    id: int
    n_ctx: int
    is_processing: bool


@router.get("/props", response_model=Props)
async def props(request: Request) -> Response:
    """Return the model's names, template, context and slots."""
    context = context_of(request)
    processor = context.async_llm.processor
    params = {NAMES.get(name, name): x for name, x in processor.listed_params.items()}
    answer = Props(
        {"n_ctx": processor.max_model_len, "params": params},
        len(_slots(request)),
        context.config.model.served_model_name[0],
        context.root,
        processor.chat_template.source,
        processor.tokenizer.bos_token or "",
        processor.tokenizer.eos_token or "",
        f"servd {servd.__version__}",
        {"vision": processor.sees, "audio": False},
    )
    return json_response(answer)


@router.get("/slots", response_model=list[Slot])
async def slots(request: Request) -> Response:
    """List the slots of all engines."""
    return json_response(_slots(request))


def _slots(request: Request) -> list[Slot]:
    context = context_of(request)
    size = context.config.scheduler.max_num_seqs or 0
    running = [engine.stats.num_running for engine in context.async_llm.engines]
    busy = [place < count for count in running for place in range(size)]
    return [
        Slot(i, context.async_llm.processor.max_model_len, is_busy)
        for i, is_busy in enumerate(busy)
    ]
