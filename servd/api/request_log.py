"""Logging of requests, with --enable-log-requests."""

from __future__ import annotations

import logging

from msgspec.structs import asdict

from servd.api.processor import Prepared
from servd.params import SamplingParams

log = logging.getLogger("servd.requests")


def log_request(prepared: Prepared, most: int | None) -> None:
    """A line with a prompt that goes to the engine, cut to `most` characters and token ids, and the
    parameters that are not the usual ones.
    """
    params = prepared.request.params
    if isinstance(params, SamplingParams):
        params = prepared.params  # with those of the text, which the engine does not get
    usual = asdict(type(params)())
    asked = {name: value for name, value in asdict(params).items() if value != usual[name]}
    fields = {
        "prompt_id": prepared.request_id,
        "prompt": None if prepared.prompt is None else prepared.prompt[:most],
        "num_prompt_tokens": len(prepared.prompt_token_ids),
        "prompt_token_ids": prepared.prompt_token_ids[:most],
        "params": asked,
    }
    text = "%s: prompt %r, %d tokens %s, %s"
    log.info(text, *fields.values(), extra={"fields": fields})
