"""Beam search: finds the most probable continuations of a prompt.

Each step sends every beam as a request for one token and its top log-probabilities. The prefix
cache holds the tokens that beams share. Scores and stopping criteria match `transformers`.
"""

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from servd.api.observability.metrics import Metrics
from servd.api.request.choice import Choice
from servd.api.request.request_output import RequestOutput
from servd.api.request.request_state import ProcessedInputs
from servd.api.request.timeline import Timeline
from servd.api.text.detokenizer import Detokenizer
from servd.api.text.tokenizer import Tokenizer
from servd.base.errors import EngineError
from servd.base.tracing import now_ns
from servd.messages.engine import FinishReason, TokenLogprobs
from servd.messages.outputs import CompletionOutput
from servd.messages.params import MAX_CANDIDATES, BeamSearchParams, SamplingParams

Generate = Callable[..., AsyncGenerator[RequestOutput, None]]


class Beam(msgspec.Struct, frozen=True):
    token_ids: list[int]
    logprob: float  # sum over its tokens
    # Set once finished: the length-normalized score that beams are ranked by.
    score: float = -math.inf


@dataclass(eq=False)
class BeamSearch:
    """The search for one prompt. `inputs.params.n` is the number of beams and of choices."""

    # Only n, max_tokens, ignore_eos, stop_token_ids and the parameters of text apply.
    inputs: ProcessedInputs
    # A score is the log-probability divided by length ** length_penalty: above 0 favours long
    # beams. With early_stopping, true ends when n continuations have ended; false when no running
    # beam could do better if it ended now; "never" when none could at any length.
    params: BeamSearchParams

    def __post_init__(self) -> None:
        self.request = self.inputs.request
        assert self.inputs.params.max_tokens is not None
        self.max_tokens = self.inputs.params.max_tokens
        self.num_beams = self.inputs.params.n
        self.ends = frozenset(self.request.eos_token_ids).union(self.inputs.params.stop_token_ids)
        # There are more candidates than end tokens: some beam continues.
        self.num_candidates = min(max(2, 1 + len(self.ends)) * self.num_beams, MAX_CANDIDATES)
        self.running = [Beam([], 0.0)]
        self.finished: list[Beam] = []  # best first
        self.length = 0
        self.num_cached_tokens = 0

    async def run(
        self, generate: Generate, tokenizer: Tokenizer, metrics: Metrics, timeline: Timeline
    ) -> list[CompletionOutput]:
        """Return the complete choices, best first. `generate` is `AsyncLLM.generate`, whose errors
        are raised.
        """
        answers: list[CompletionOutput] = []
        reason = FinishReason.ABORT
        try:
            while self.running:
                self.advance(await self._step(generate, timeline))
            answers = self.answers(tokenizer)
            reason = answers[0].finish_reason or reason
        except EngineError:
            reason = FinishReason.ERROR
            raise
        finally:
            timeline.choices = self._count(metrics, timeline.begin_ns, answers, reason)
        return answers

    async def _step(self, generate: Generate, timeline: Timeline) -> list[TokenLogprobs]:
        requests = self.requests()
        logprobs: dict[int, TokenLogprobs] = {}
        parts = generate(requests, requests[0].params, self.request.request_id, parent=timeline)
        async with aclosing(parts):
            async for part in parts:
                for output in part.outputs:
                    assert output.positions is not None
                    logprobs[part.index] = output.positions[0]
                    if self.length == 0:
                        self.num_cached_tokens = output.num_cached_tokens
        return [logprobs[index] for index in range(len(requests))]

    def _count(
        self,
        metrics: Metrics,
        arrival_ns: int,
        answers: list[CompletionOutput],
        reason: FinishReason,
    ) -> list[Choice]:
        """Record the search in the metrics as one request whose tokens all arrive at once."""
        num_prompt_tokens = len(self.request.prompt_token_ids)
        now = now_ns()
        choices = [
            Choice(arrival_ns, num_prompt_tokens, len(a.token_ids), finish_reason=a.finish_reason)
            for a in answers
        ]
        search = Choice(arrival_ns, num_prompt_tokens, finish_reason=reason)
        metrics.observe_tokens(search, sum(choice.num_tokens for choice in choices), now)
        metrics.observe_finished(search, reason, now)
        metrics.observe_request(self.inputs.params, choices or [search])
        return choices or [search]

    def requests(self) -> list[ProcessedInputs]:
        """Return a request for the next token of each running beam."""
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=self.num_candidates)
        requests: list[ProcessedInputs] = []
        for index, beam in enumerate(self.running):
            request = msgspec.structs.replace(
                self.request,
                request_id=f"{self.request.request_id}/{self.length}-{index}",
                prompt_token_ids=self.request.prompt_token_ids + beam.token_ids,
                params=params,
                eos_token_ids=[],
            )
            requests.append(ProcessedInputs(request, params, pictures=self.inputs.pictures))
        return requests

    def answers(self, tokenizer: Tokenizer) -> list[CompletionOutput]:
        return [self._answer(tokenizer, i, beam) for i, beam in enumerate(self.finished)]

    def advance(self, logprobs: list[TokenLogprobs]) -> None:
        """Extend the running beams by one token. `logprobs` has the candidates of each beam."""
        candidates = [
            Beam([*beam.token_ids, token_id], beam.logprob + logprob)
            for beam, likely in zip(self.running, logprobs, strict=True)
            for token_id, logprob in zip(likely.token_ids[1:], likely.logprobs[1:], strict=True)
        ]
        candidates.sort(key=lambda beam: -beam.logprob)
        del candidates[self.num_candidates :]
        self.length += 1
        is_last = self.length >= self.max_tokens
        # Lower-ranked candidates only refill the running beams; they may not finish.
        for beam in candidates[: self.num_beams]:
            if is_last or beam.token_ids[-1] in self.ends:
                score = beam.logprob / self.length**self.params.length_penalty
                self.finished.append(msgspec.structs.replace(beam, score=score))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.num_beams :]
        going_on = [beam for beam in candidates if beam.token_ids[-1] not in self.ends]
        goes_on = not is_last and self._may_improve(going_on)
        self.running = going_on[: self.num_beams] if goes_on else []

    def _may_improve(self, running: list[Beam]) -> bool:
        if len(self.finished) < self.num_beams:
            return True
        params = self.params
        if params.early_stopping is True or not running:
            return False
        at_any_length = params.early_stopping == "never" and params.length_penalty > 0
        length = self.max_tokens if at_any_length else self.length
        return running[0].logprob / length**params.length_penalty > self.finished[-1].score

    def _answer(self, tokenizer: Tokenizer, index: int, beam: Beam) -> CompletionOutput:
        params = self.inputs.params
        detokenizer = Detokenizer(tokenizer, params, self.request.prompt_token_ids)
        last = beam.token_ids[-1]
        has_ended = last in self.ends
        hides_last = has_ended and not params.include_stop_str_in_output
        text = detokenizer.push(beam.token_ids[:-1] if hides_last else beam.token_ids)
        is_stop_token = has_ended and last not in self.request.eos_token_ids
        return CompletionOutput(
            index=index,
            text=text + detokenizer.flush(),
            token_ids=beam.token_ids,
            finish_reason=FinishReason.STOP if has_ended else FinishReason.LENGTH,
            stop_reason=last if is_stop_token else None,
            num_cached_tokens=self.num_cached_tokens,
        )
