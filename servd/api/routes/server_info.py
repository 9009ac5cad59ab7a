"""GET /server_info: show the server's options, and why each has its value."""

import time
from collections.abc import Iterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

import servd
from servd.api.context import Context, context_of, json_response
from servd.api.http.route import Route
from servd.api.serving.run_manifest import find_versions
from servd.config import descriptions, flag_of, options_by_name, title_of
from servd.messages.engine import EngineReady

router = APIRouter(route_class=Route)


class Option(msgspec.Struct):
    """An option, its value, and the source of the value: `default`, `given` or `decided`."""

    flag: str
    section: str  # its title
    value: Any
    source: str
    about: str
    why: str | UnsetType = UNSET  # if servd decided the value


class Engine(msgspec.Struct):
    """Facts that an engine found while loading. If several engines serve, the first reports."""

    device: str
    dtype: str
    attention_backend: str
    max_model_len: int
    num_blocks: int
    block_size: int
    kv_bytes_per_block: int
    weights_bytes: int
    num_checkpoints: int  # of recurrent states
    state_bytes: int  # of a checkpoint, on the rank


class ServerInfo(msgspec.Struct):
    """The configuration of the server. `engine` is missing while the model loads."""

    version: str
    versions: dict[str, str]
    model: list[str]
    architecture: str
    uptime_seconds: float
    options: list[Option]
    startup_seconds: dict[str, float]  # by phase
    engine: Engine | UnsetType = UNSET


@router.get("/server_info", response_model=ServerInfo)
async def server_info(request: Request) -> Response:
    """Show every option with its value and origin, start-up phases and versions."""
    context = context_of(request)
    info = ServerInfo(
        version=servd.__version__,
        versions={name: v for name, v in find_versions().items() if name != "servd"},
        model=context.config.model.served_model_name,
        architecture=context.async_llm.spec.architecture,
        uptime_seconds=round(time.time() - context.started_at, 3),
        options=list(_options(context)),
        startup_seconds={},
    )
    if isinstance(ready := context.async_llm.status, EngineReady):
        info.startup_seconds = {k: round(v, 3) for k, v in ready.startup_seconds.items()}
        reported = msgspec.structs.asdict(ready.worker)
        facts = {field: reported.get(field) for field in Engine.__struct_fields__}
        facts |= {"max_model_len": ready.max_model_len, "block_size": ready.block_size}
        info.engine = msgspec.convert(facts, Engine)
    return json_response(info)


def _options(context: Context) -> Iterator[Option]:
    sections = msgspec.structs.asdict(context.config)
    for name, (section, field) in options_by_name().items():
        options = sections[section]
        value = msgspec.structs.asdict(options)[name]
        title = title_of(type(options))
        default = field.default_factory() if field.default_factory is list else field.default
        source = "decided" if name in context.reasons else "given"
        if value == default and source == "given":
            source = "default"
        if name == "api_key":  # no secret leaves the server
            value = [f"{len(value)} of them"] if value else []
        why = context.reasons.get(name, UNSET)
        yield Option(flag_of(name), title, value, source, descriptions()[name], why)
