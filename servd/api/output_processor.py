"""EngineCoreOutput to CompletionOutput: text, stop strings. Shared by AsyncLLM and the offline LLMEngine."""

from __future__ import annotations

from servd.api.processor import Prepared
from servd.api.tokenizer import Tokenizer
from servd.messages import EngineCoreOutput
from servd.outputs import CompletionOutput


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer) -> None:
        raise NotImplementedError

    def add(self, prepared: Prepared) -> None:
        raise NotImplementedError

    def abort(self, request_id: str) -> list[str]:
        """Forget a request; the engine ids of its choices that had not ended."""
        raise NotImplementedError

    def process(self, outputs: list[EngineCoreOutput]) -> tuple[list[tuple[str, CompletionOutput]], list[str]]:
        """([(request id, delta)], engine ids to abort because a stop string ended them)."""
        raise NotImplementedError
