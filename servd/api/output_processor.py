"""OutputProcessor: EngineCoreOutput to CompletionOutput: detokenizes, and finds stop strings."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import msgspec

from servd.api.detokenizer import Detokenizer
from servd.api.processor import Prepared
from servd.api.tokenizer import Tokenizer
from servd.messages import EngineCoreOutput, FinishReason
from servd.outputs import CompletionOutput


class _Choice(msgspec.Struct):
    prepared: Prepared
    request_id: str
    index: int
    token_ids: array[int]  # so far
    detokenizer: Detokenizer | None = None  # made with the first output


class OutputProcessor:
    """Detokenizes the outputs of all running choices.

    Args:
        tokenizer: gives the bytes of tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._choices: dict[str, _Choice] = {}  # by the engine's request id
        # Request id -> engine ids of its choices that have not ended.
        self._engine_ids: dict[str, list[str]] = {}

    def add(self, prepared: Prepared) -> list[array[int]]:
        """Add a request; returns the lists that collect the output tokens of each choice."""
        request_id, engine_ids = prepared.request_id, prepared.request.choice_ids
        self._engine_ids[request_id], outputs = engine_ids, [array("I") for _ in engine_ids]
        for index, engine_id in enumerate(engine_ids):
            self._choices[engine_id] = _Choice(prepared, request_id, index, outputs[index])
        return outputs

    def abort(self, request_id: str) -> list[str]:
        """Forget a request.

        Returns:
            The engine ids of its choices that had not ended: the caller aborts them in the engine.
        """
        engine_ids = self._engine_ids.pop(request_id, [])
        for engine_id in engine_ids:
            del self._choices[engine_id]
        return engine_ids

    def outputs(self, request_id: str) -> dict[int, list[int]]:
        choices = [self._choices[engine_id] for engine_id in self._engine_ids.get(request_id, ())]
        return {choice.index: choice.token_ids.tolist() for choice in choices}

    def is_open(self, request_id: str) -> bool:
        return request_id in self._engine_ids

    def open_ids(self) -> set[str]:
        return set(self._choices)

    def owner(self, engine_id: str) -> tuple[str, int] | None:
        """Request id and choice index of an engine request; None when it has ended."""
        choice = self._choices.get(engine_id)
        return (choice.request_id, choice.index) if choice else None

    def process(
        self, outputs: list[EngineCoreOutput]
    ) -> Iterator[tuple[str, CompletionOutput, list[str]]]:
        """Merge outputs of one or several steps to one delta for each choice. Outputs of requests
        that have been aborted are dropped.

        Yields:
            The id of a request, a delta of it, and the engine ids to abort: that of the choice, if
            a stop string ended it, which the engine does not know.
        """
        by_choice: dict[str, list[EngineCoreOutput]] = {}
        for output in outputs:
            by_choice.setdefault(output.request_id, []).append(output)
        for engine_id, steps in by_choice.items():
            choice = self._choices.get(engine_id)
            if choice is None:
                continue
            delta = self._delta(choice, steps)
            if delta.finish_reason is not None:
                self._end(engine_id)
            is_stopped = delta.finish_reason is not None and steps[-1].finish_reason is None
            yield choice.request_id, delta, [engine_id] if is_stopped else []

    def _end(self, engine_id: str) -> None:
        choice = self._choices.pop(engine_id)
        engine_ids = self._engine_ids[choice.request_id]
        engine_ids.remove(engine_id)
        if not engine_ids:
            del self._engine_ids[choice.request_id]

    def _delta(self, choice: _Choice, steps: list[EngineCoreOutput]) -> CompletionOutput:
        one, detokenizer = choice.prepared, choice.detokenizer
        if detokenizer is None:
            detokenizer = choice.detokenizer = Detokenizer(
                self.tokenizer, one.params, one.prompt_token_ids, one.expected.visible_ids
            )
        first, last = steps[0], steps[-1]
        token_ids = [token_id for step in steps for token_id in step.new_token_ids]
        choice.token_ids.extend(token_ids)
        delta = CompletionOutput(
            index=choice.index,
            token_ids=token_ids,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_cached_tokens=first.num_cached_tokens,
            error=last.error,
            prompt_logprobs=first.prompt_logprobs,
            pooled=last.pooled,
            drafts=[(step.num_drafts, step.num_accepted) for step in steps if step.num_drafts],
        )
        if first.logprobs is not None:
            delta.logprobs = [each for step in steps for each in step.logprobs or ()]
        ended_by_token = (
            last.finish_reason is FinishReason.STOP
            and not last.ended_by_grammar
            and not one.params.include_stop_str_in_output
        )
        num_before = detokenizer.num_tokens
        # A stop token is counted, but is not part of the text.
        delta.text = detokenizer.push(token_ids[:-1] if ended_by_token else token_ids)
        if last.finish_reason is not None:
            delta.text += detokenizer.flush()
        if detokenizer.stop_reason is not None:
            num_tokens = detokenizer.num_tokens - num_before
            delta.token_ids = token_ids[:num_tokens]
            delta.logprobs = delta.logprobs and delta.logprobs[:num_tokens]
            delta.finish_reason = FinishReason.STOP
            delta.stop_reason = detokenizer.stop_reason
        return delta
