"""Logging of requests, with --enable-log-requests."""

from __future__ import annotations

import logging

from msgspec.structs import asdict

from servd.api.request_state import RequestState
from servd.params import SamplingParams

log = logging.getLogger("servd.requests")


def log_request(state: RequestState, most: int | None) -> None:
    """A line with a prompt that goes to the engine, cut to `most` characters and token ids, and the
    parameters that are not the usual ones.
    """
    params = state.request.params
    if isinstance(params, SamplingParams):
        params = state.params  # with those of the text, which the engine does not get
    usual = asdict(type(params)())
    asked = {name: value for name, value in asdict(params).items() if value != usual[name]}
    fields = {
        "prompt_id": state.request_id,
        "prompt": None if state.prompt is None else state.prompt[:most],
        "num_prompt_tokens": len(state.prompt_token_ids),
        "prompt_token_ids": state.prompt_token_ids[:most],
        "params": asked,
    }
    text = "%s: prompt %r, %d tokens %s, %s"
    log.info(text, *fields.values(), extra={"fields": fields})
