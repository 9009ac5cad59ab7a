"""Outputs: the deltas of a choice, added up, are the whole choice."""

from hypothesis import given
from hypothesis import strategies as st

from servd.api.request.request_output import RequestOutput
from servd.messages.engine import FinishReason, TokenLogprobs
from servd.messages.outputs import CompletionOutput

steps = st.lists(
    st.tuples(st.text(max_size=4), st.lists(st.integers(0, 99), max_size=3)), min_size=1, max_size=6
)


@given(steps, st.booleans())
def test_deltas_add_up_to_the_whole(parts, with_logprobs):
    whole = CompletionOutput()
    for text, token_ids in parts:
        logprobs = [TokenLogprobs([t], [-1.0], 1) for t in token_ids] if with_logprobs else None
        whole.add(CompletionOutput(text=text, token_ids=token_ids, positions=logprobs))
    assert whole.finish_reason is None
    whole.add(CompletionOutput(finish_reason=FinishReason.STOP, stop_reason="x"))
    assert whole.text == "".join(text for text, _ in parts)
    assert whole.token_ids == [t for _, token_ids in parts for t in token_ids]
    if with_logprobs:
        assert [entry.token_ids[0] for entry in whole.positions or []] == whole.token_ids
        assert whole.cumulative_logprob == -len(whole.token_ids)
    else:
        assert whole.positions is None and whole.cumulative_logprob is None
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, "x")


def test_adding_does_not_change_the_defaults_of_the_next_choice():
    CompletionOutput().add(CompletionOutput(token_ids=[1]))
    assert CompletionOutput().token_ids == []


def test_a_request_is_finished_when_every_choice_is():
    outputs = [CompletionOutput(index=i) for i in range(2)]
    request = RequestOutput(request_id="r", prompt=None, prompt_token_ids=[1], outputs=outputs)
    outputs[1].add(CompletionOutput(finish_reason=FinishReason.LENGTH))
    assert not request.finished
    outputs[0].add(CompletionOutput(finish_reason=FinishReason.STOP))
    assert request.finished
