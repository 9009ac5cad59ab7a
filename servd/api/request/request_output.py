"""RequestOutput: what the choices of one prompt have got."""

import msgspec

from servd.api.output.output_parser import ExpectedOutput
from servd.api.request.timeline import Timeline
from servd.messages.outputs import CompletionOutput, Logprob
from servd.messages.params import SamplingParams


class RequestOutput(msgspec.Struct, kw_only=True, repr_omit_defaults=True):
    """The outputs of a prompt: all so far from `LLM`, the latest deltas from `AsyncLLM.generate`.

    `AsyncLLM.generate` also says what the generators of responses need of the prompt: its `index`
    in the request, its completed `params`, how its text is `expected`, and its `timeline`.
    """

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of `LLM`: None, then by token
    num_cached_tokens: int = 0  # of `LLM`: prompt tokens that came from the prefix cache
    index: int = 0
    params: SamplingParams = SamplingParams()
    expected: ExpectedOutput = ExpectedOutput()
    timeline: Timeline | None = None

    @property
    def finished(self) -> bool:
        """Whether all choices have finished."""
        return all(output.finish_reason is not None for output in self.outputs)
