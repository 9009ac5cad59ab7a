"""Ollama's API below /api: chat, generate, embed, tags, ps, show, version, and pull."""

import asyncio
import hashlib
from typing import Any

from fastapi import APIRouter, Request, Response

from servd.api.context import Context, context_of, json_response
from servd.api.engine.description import describe_model
from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route, json_lines, without_model
from servd.api.protocol.ollama import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaNamedRequest,
)
from servd.api.serving.ollama import OllamaServing, timestamp
from servd.checkpoint.facts import Facts, read_facts
from servd.checkpoint.quantization_config import quant_method_of

router = APIRouter(route_class=Route)

VERSION = "0.12.0"  # of Ollama: some clients refuse older ones
NAMES = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}
FOREVER = "9999-12-31T00:00:00Z"


def serving_of(request: Request) -> OllamaServing:
    return request.app.state.serving_ollama


@router.post("/api/chat", response_model=dict[str, Any], responses=json_lines())
async def create_ollama_chat(request: Request, body: JsonBody[OllamaChatRequest]) -> Response:
    """Answer a conversation in Ollama's format."""
    return await serving_of(request).create_chat(body, request)


@router.post("/api/generate", response_model=dict[str, Any], responses=json_lines())
async def create_ollama_text(request: Request, body: JsonBody[OllamaGenerateRequest]) -> Response:
    """Answer a prompt in Ollama's format."""
    return await serving_of(request).create_text(body, request)


@router.post("/api/embed", response_model=dict[str, Any])
async def create_ollama_embeddings(
    request: Request, body: JsonBody[OllamaEmbedRequest]
) -> Response:
    """Return embeddings in Ollama's format."""
    return await serving_of(request).create_embeddings(body, request)


@router.get("/api/tags", response_model=dict[str, Any])
async def list_ollama_models(request: Request) -> Response:
    """List the model's names in Ollama's format."""
    return json_response({"models": await asyncio.to_thread(models_of, context_of(request))})


@router.get("/api/ps", response_model=dict[str, Any])
async def list_loaded_ollama_models(request: Request) -> Response:
    """List the loaded models in Ollama's format."""
    context = context_of(request)
    length = context.async_llm.processor.max_model_len
    if all(engine.is_asleep for engine in context.async_llm.engines):
        return json_response({"models": []})
    models = await asyncio.to_thread(models_of, context)
    return json_response({"models": [loaded(model, length) for model in models]})


@router.post("/api/show", response_model=dict[str, Any])
async def show_ollama_model(request: Request, body: JsonBody[OllamaNamedRequest]) -> Response:
    """Describe the model in Ollama's format."""
    context = context_of(request)
    await context.find_model(body.model or body.name)
    model, *_ = await asyncio.to_thread(models_of, context)
    processor = context.async_llm.processor
    details = await asyncio.to_thread(describe_model, processor, context.root)
    return json_response(completed(details, model, processor.listed_params))


@router.get("/api/version", response_model=dict[str, str])
@without_model
async def ollama_version(request: Request) -> Response:
    """Return the version of Ollama whose API servd follows."""
    return json_response({"version": VERSION})


@router.post("/api/pull", response_model=dict[str, str])
async def pull_ollama_model(request: Request, body: JsonBody[OllamaNamedRequest]) -> Response:
    """Confirm that a model is served here. With --models-pull, servd downloads another."""
    await context_of(request).find_model(body.model or body.name)
    return json_response({"status": "success"})


def models_of(context: Context) -> list[dict[str, Any]]:
    """Return the model's names in Ollama's format. Reads the headers of the weight files."""
    spec = context.async_llm.spec
    facts = read_facts(spec.folder)
    level = context.config.model.quantization or facts.precision or spec.dtype
    written = context.started_at
    names = context.shown_names
    form = "gguf" if quant_method_of(spec.folder, None) == "gguf" else "safetensors"
    return [described(name, written, facts, form, spec.model_type, level) for name in names]


def completed(
    description: dict[str, Any], model: dict[str, Any], parameters: dict[str, int | float]
) -> dict[str, Any]:
    """Return the body of /api/show, from a model's description, its entry of `described` and its
    `default_parameters`.
    """
    details = model["details"] | description["details"]
    lines = [f"{NAMES.get(name, name)} {number}" for name, number in parameters.items()]
    same = {"modelfile": "", "parameters": "\n".join(lines), "modified_at": model["modified_at"]}
    return description | same | {"details": details}


def described(
    name: str, written: float, facts: Facts, form: str, family: str = "", level: str = ""
) -> dict[str, Any]:
    """Return a model in Ollama's format. `written`: Unix time."""
    name = name if ":" in name else f"{name}:latest"  # clients add it
    details = {"format": form, "family": family, "families": [family]}
    details |= {"parent_model": "", "parameter_size": facts.parameter_size}
    details["quantization_level"] = level
    digest = hashlib.sha256(name.encode()).hexdigest()
    model = {"name": name, "model": name, "size": facts.num_bytes, "digest": digest}
    return model | {"details": details, "modified_at": timestamp(written)}


def loaded(model: dict[str, Any], context_length: int) -> dict[str, Any]:
    """Return a model of `described` as a loaded one."""
    return model | {"expires_at": FOREVER, "size_vram": 0, "context_length": context_length}
