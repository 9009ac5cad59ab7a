"""servd: an OpenAI-compatible serving daemon for language models."""

from typing import TYPE_CHECKING, Any

from servd.messages.adapter import LoRARequest
from servd.messages.params import BeamSearchParams, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from servd.api.request.request_output import RequestOutput
    from servd.offline.llm import LLM
    from servd.offline.llm_engine import LLMEngine

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "LLMEngine",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # LLM pulls in the tokenizer; an engine process that only wants a message type must not pay for
    # it.
    if name in ("LLM", "LLMEngine", "RequestOutput"):
        import servd.offline.llm

        return getattr(servd.offline.llm, name)
    raise AttributeError(f"module 'servd' has no attribute {name!r}")
