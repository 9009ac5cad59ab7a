"""OutputProcessor: turns engine outputs into text, and finds stop strings."""

from collections.abc import Sequence

from servd.api.output.output_parser import OutputAnswerFinder
from servd.api.request.choice import Choice
from servd.api.request.output_collector import RequestOutputCollector
from servd.api.request.request_state import ProcessedInputs, RequestState
from servd.api.request.timeline import Timeline
from servd.api.text.detokenizer import Detokenizer
from servd.api.text.tokenizer import Tokenizer
from servd.messages.engine import EngineCoreOutput
from servd.messages.outputs import CompletionOutput


class OutputProcessor:
    """A processor that detokenizes the engine outputs of all running choices."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def add_request(
        self,
        inputs: ProcessedInputs,
        timeline: Timeline,
        collector: RequestOutputCollector | None = None,
        index: int = 0,
        is_part: bool = False,
        exemplar: dict[str, str] | None = None,
    ) -> RequestState:
        """Return the state of a new request. See RequestState for `index` and `is_part`; `exemplar`
        is the label of the request's trace, for OpenMetrics.
        """
        request = inputs.request
        begin_ns = timeline.begin_ns
        num_tokens = len(request.prompt_token_ids)
        choices = [
            Choice(begin_ns, num_tokens, index=number, engine_id=engine_id, exemplar=exemplar)
            for number, engine_id in enumerate(request.choice_ids)
        ]
        if not is_part:
            timeline.choices = choices
        prompt = inputs.params, inputs.prompt, inputs.expected
        state = RequestState(request, *prompt, timeline, choices, collector, index, is_part)
        state.pictures = inputs.pictures
        return state

    def process_outputs(
        self, outputs: Sequence[EngineCoreOutput], state: RequestState, choice: Choice
    ) -> CompletionOutput:
        """Return the merged delta of a choice's outputs of one or more steps. If it ends and the
        last output does not, a stop string ended it: the caller then aborts it in the engine.
        """
        detokenizer = choice.detokenizer or self._make_detokenizer(state, choice)
        return choice.advance(outputs, detokenizer, state.params.include_stop_str_in_output)

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
