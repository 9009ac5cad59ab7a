"""OutputProcessor: turns engine outputs into text, and finds stop strings."""

from collections.abc import Iterator, Mapping

from servd.api.output.output_parser import OutputAnswerFinder
from servd.api.request.choice import Choice
from servd.api.request.request_state import RequestState, find_choice
from servd.api.text.detokenizer import Detokenizer
from servd.api.text.tokenizer import Tokenizer
from servd.messages.engine import EngineCoreOutput
from servd.messages.outputs import CompletionOutput


class OutputProcessor:
    """A processor that detokenizes the engine outputs of all running choices."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def process(
        self, outputs: list[EngineCoreOutput], requests: Mapping[str, RequestState]
    ) -> Iterator[tuple[RequestState, CompletionOutput, list[str]]]:
        """Merge the outputs of one or more steps into one delta per choice. Drop the outputs of
        aborted requests.

        Yield a request, its delta, and the engine ids to abort: the id of the choice if a stop
        string ended it, because the engine does not know stop strings.
        """
        by_choice: dict[str, list[EngineCoreOutput]] = {}
        for output in outputs:
            by_choice.setdefault(output.request_id, []).append(output)
        for engine_id, steps in by_choice.items():
            found = find_choice(requests, engine_id)
            if found is None:
                continue
            state, choice = found
            detokenizer = choice.detokenizer or self._make_detokenizer(state, choice)
            shows_stop_token = state.params.include_stop_str_in_output
            delta = choice.advance(steps, detokenizer, shows_stop_token)
            is_stopped = delta.finish_reason is not None and steps[-1].finish_reason is None
            yield state, delta, [engine_id] if is_stopped else []

    def _make_detokenizer(self, state: RequestState, choice: Choice) -> Detokenizer:
        reasoning = state.expected.make_reasoning_parser() if state.params.stop else None
        choice.detokenizer = Detokenizer(
            self.tokenizer,
            state.params,
            state.prompt_token_ids,
            state.expected.visible_ids,
            None if reasoning is None else OutputAnswerFinder(reasoning),
        )
        return choice.detokenizer
