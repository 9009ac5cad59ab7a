"""SpeculativeConfig: how tokens are drafted ahead of the model; keys as in vLLM's JSON."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The value of `--speculative-config`."""

    method: str  # a file of servd/worker/spec_decode
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 5
    prompt_lookup_min: Positive = 2
    prompt_lookup_max: Positive = 5
