"""Turn what a client asks into engine requests: template, tokenise, validate everything."""

from __future__ import annotations

from typing import Any

import msgspec

from servd.api.tokenizer import Tokenizer
from servd.config import Config
from servd.hf import ModelSpec
from servd.messages import EngineCoreRequest
from servd.params import SamplingParams


class Prepared(msgspec.Struct, kw_only=True):
    """A validated request and the engine requests, one per choice, that serve it."""

    request_id: str
    prompt: str | None  # None if given as token ids
    prompt_token_ids: list[int]
    params: SamplingParams  # as asked, with seed and max_tokens filled
    requests: list[EngineCoreRequest]


class Processor:
    """Attributes: `tokenizer`, `chat_template`, `max_model_len`, `default_params: dict` (sampling defaults of the
    model; never max_tokens, which process() applies where params.max_tokens is None).
    """

    def __init__(self, config: Config, spec: ModelSpec, tokenizer: Tokenizer, max_model_len: int) -> None:
        raise NotImplementedError

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt; encode it with add_special_tokens=False, the template brings its own BOS."""
        raise NotImplementedError

    def process(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        client: int = 0,
        param: str = "prompt",  # the request field that errors name: prompt | messages
    ) -> Prepared:
        raise NotImplementedError
