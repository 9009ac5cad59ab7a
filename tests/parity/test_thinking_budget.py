"""thinking_token_budget through the engine: steps in flight, a form after it, neighbours."""

import re

import msgspec
import pytest

from servd import LLM, SamplingParams
from servd.messages.engine import FinishReason
from servd.messages.params import ReasoningTags, StructuredOutput

PROMPTS = ["The license", "A work of", "You may", "It is"]
BUDGET = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["depth 1", "depth 2"])
def llm(request, tiny_llama):
    llm = LLM(
        str(tiny_llama),
        device="cpu",
        async_scheduling=request.param,
        max_model_len=128,
        use_tqdm=False,
    )
    yield llm
    llm.close()


def test_reasoning_ends_where_the_budget_does_and_the_form_begins_there(llm: LLM):
    free = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    end_id = next(i for i in range(100, 200) if not any(i in token_ids for token_ids in free))
    limited = msgspec.structs.replace(
        GREEDY,
        thinking_token_budget=BUDGET,
        reasoning_tags=ReasoningTags(end_id=end_id, start_id=None),
    )
    form = StructuredOutput("regex", "[0-9]{3}-[a-f]{2}", starts_after=[end_id])
    bound = msgspec.structs.replace(limited, structured_output=form)
    unlimited = msgspec.structs.replace(GREEDY, structured_output=form)
    params = [GREEDY, limited, bound, unlimited]
    outputs = llm.generate(
        PROMPTS * 4, [request_params for request_params in params for _ in PROMPTS]
    )
    tokenizer = llm.engine.processor.tokenizer
    for number, output in enumerate(outputs):
        kind, prompt = divmod(number, len(PROMPTS))
        token_ids = output.outputs[0].token_ids
        if params[kind] in (
            GREEDY,
            unlimited,
        ):  # without a budget the end does not come, and so no form
            assert token_ids == free[prompt]
            continue
        assert token_ids[: BUDGET + 1] == [*free[prompt][:BUDGET], end_id]
        if params[kind] is bound:
            answer = tokenizer.decode(token_ids[BUDGET + 1 :], skip_special_tokens=False)
            assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer)
            assert output.outputs[0].finish_reason is FinishReason.STOP
        else:  # the model continues from there by itself
            remaining = msgspec.structs.replace(GREEDY, max_tokens=GREEDY.max_tokens - BUDGET - 1)
            (again,) = llm.generate([output.prompt_token_ids + token_ids[: BUDGET + 1]], remaining)
            assert token_ids[BUDGET + 1 :] == again.outputs[0].token_ids
