"""AsyncLLM: many requests at once over one engine, on the event loop of an API server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from servd.api.processor import Prepared
from servd.messages import EngineDead, EngineReady, EngineStatus, SchedulerStats
from servd.outputs import CompletionOutput
from servd.params import SamplingParams


class AsyncLLM:
    """Attributes: `config`, `spec`, `processor`, `tracer`, `metrics`, `status: EngineStatus | EngineReady | EngineDead`,
    `stats: SchedulerStats`, `is_ready`, `num_unfinished`.
    """

    status: EngineStatus | EngineReady | EngineDead
    stats: SchedulerStats

    def start(self) -> None:
        """On the running loop."""

    def close(self) -> None:
        """Stop reading."""

    async def prepare(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        add_special_tokens: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Prepared:
        raise NotImplementedError

    async def prepare_chat(
        self,
        request_id: str,
        messages: list[dict[str, Any]],
        params: SamplingParams,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Prepared:
        raise NotImplementedError

    def generate(self, prepared: Prepared) -> AsyncGenerator[CompletionOutput, None]:
        """Raises Overloaded (full, or still loading), EngineDead AT ONCE (not at the first item).

        Items: deltas of all choices. While iterating: EngineError (500) or EngineDead (503). Leave early with
        aclose() or cancellation: the request is aborted. The request id must not be in use (InvalidRequest).
        The HTTP half calls tracer.finish(request_id) when it has marked "done".
        """
        raise NotImplementedError
