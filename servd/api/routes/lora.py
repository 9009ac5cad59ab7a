"""POST /v1/load_lora_adapter, /v1/unload_lora_adapter: load and unload LoRA adapters."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from servd.api.context import context_of
from servd.api.engine.adapters import Adapters
from servd.api.http.json_body import JsonBody
from servd.api.http.route import Route
from servd.api.protocol.lora import LoadAdapterRequest, UnloadAdapterRequest
from servd.base.errors import NotFound, UnknownModel

router = APIRouter(route_class=Route)


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(request: Request, body: JsonBody[LoadAdapterRequest]) -> Response:
    """Load a LoRA adapter from --lora-dir."""
    await _adapters(request).load(body.lora_name, body.lora_path, body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(request: Request, body: JsonBody[UnloadAdapterRequest]) -> Response:
    """Unload a LoRA adapter. If the adapter has a folder in --lora-dir, a request that names the
    adapter loads it again.
    """
    if await _adapters(request).unload(body.lora_name) is None:
        raise UnknownModel(f"the adapter {body.lora_name[:200]!r} is not loaded", param="lora_name")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _adapters(request: Request) -> Adapters:
    adapters = context_of(request).adapters
    if adapters is None:
        raise NotFound("adapters are off: start the server with --enable-lora")
    return adapters
