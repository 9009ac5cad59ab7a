"""Choice: one of the `n` outputs of a prompt, with its tokens, its text and its timestamps."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

import msgspec

from servd.api.text.detokenizer import Detokenizer
from servd.messages.engine import EngineCoreOutput, FinishReason
from servd.messages.outputs import CompletionOutput

NO_TOKENS = array("I")  # of all released choices


class Choice(msgspec.Struct, gc=False):
    """The state of one output so far. All times are CLOCK_MONOTONIC nanoseconds."""

    arrival_ns: int
    num_prompt_tokens: int
    num_tokens: int = 0  # tokens that the client gets: none after a stop string
    index: int = 0  # among the choices of its prompt
    engine_id: str = ""  # the engine's id of this choice
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_external_tokens: int = 0  # cached tokens loaded from host memory or files
    num_preemptions: int = 0
    evicted_at_ns: int = 0  # see EngineCoreOutput
    num_uncovered_tokens: int = 0  # see EngineCoreOutput
    last_ns: int = 0  # arrival of the latest tokens
    finish_reason: FinishReason | None = None  # also None if the client disconnected
    block_ids: Sequence[int] = ()  # recorded only on request
    marks: dict[str, int] = {}  # the engine's stages of this choice
    exemplar: dict[str, str] | None = None  # the label of the choice's trace, for OpenMetrics
    # All that the engine sampled.
    token_ids: array[int] = msgspec.field(default_factory=partial(array, "I"))
    detokenizer: Detokenizer | None = None  # from its first output to its last

    @property
    def is_open(self) -> bool:
        return self.finish_reason is None

    def add_report(self, output: EngineCoreOutput) -> None:
        """Add an engine output's report: cached tokens, blocks and marks."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_external_tokens = max(self.num_external_tokens, output.num_external_tokens)
        self.block_ids = output.block_ids or self.block_ids
        self.evicted_at_ns = max(self.evicted_at_ns, output.evicted_at_ns)
        self.num_uncovered_tokens = max(self.num_uncovered_tokens, output.num_uncovered_tokens)
        for mark in output.marks:
            # Keep the first mark: after a preemption, a request is scheduled again.
            self.marks.setdefault(mark.stage, mark.at_ns)
            if mark.stage == "preempted":
                self.num_preemptions += 1

    def advance(
        self, steps: Sequence[EngineCoreOutput], detokenizer: Detokenizer, shows_stop_token: bool
    ) -> CompletionOutput:
        """Return the delta of `steps`, the engine's outputs in one or more steps. End the choice
        when the outputs end or a stop string is complete. With `shows_stop_token`, the text
        includes the token that ends the output.
        """
        first = steps[0]
        last = steps[-1]
        token_ids = [token_id for step in steps for token_id in step.new_token_ids]
        self.token_ids.extend(token_ids)
        delta = CompletionOutput(
            index=self.index,
            token_ids=token_ids,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_cached_tokens=first.num_cached_tokens,
            error=last.error,
            prompt_positions=first.prompt_logprobs,
            pooled=last.pooled,
            drafts=[(step.num_drafts, step.num_accepted) for step in steps if step.num_drafts],
        )
        if first.logprobs is not None:
            delta.positions = [position for step in steps for position in step.logprobs or ()]
        ended_by_token = last.finish_reason is FinishReason.STOP and not last.ended_by_grammar
        hides_last = ended_by_token and not shows_stop_token
        num_before = detokenizer.num_tokens
        # A hidden stop token is counted, but is not part of the text.
        delta.text = detokenizer.push(token_ids[:-1] if hides_last else token_ids)
        if last.finish_reason is not None:
            delta.text += detokenizer.flush()
        if detokenizer.stop_reason is not None:
            num_tokens = detokenizer.num_tokens - num_before
            delta.token_ids = token_ids[:num_tokens]
            delta.positions = delta.positions and delta.positions[:num_tokens]
            delta.finish_reason = FinishReason.STOP
            delta.stop_reason = detokenizer.stop_reason
        self.finish_reason = delta.finish_reason
        return delta

    def release(self) -> None:
        """Drop what only a running choice needs: timelines keep thousands of ended choices."""
        self.token_ids = NO_TOKENS
        self.detokenizer = None
