"""The head that drafts for the demo model: outputs stay, and steps yield several tokens."""

import pytest

from servd import LLM
from servd.messages.params import SamplingParams
from servd.messages.stats import DraftStats
from servd.offline.llm_engine import InProcess

QUESTIONS = ("What is servd?", "What is 7 + 5?", "Count from 3 to 9.", "Tell me a story about Tom.")


@pytest.mark.usefixtures("may_always_draft")
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["32", "16", "8"]
)
def test_most_steps_yield_more_than_one_token(options, monkeypatch):
    """With weights and caches of 32, 16 and 8 bits; greedy and drawn."""
    from servd.core.draft_length import DraftLengthController

    monkeypatch.setattr(
        DraftLengthController, "num_drafts", lambda self, acceptance: self.max_drafts
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=60) for t in (0, 0, 0, 1.0)]
    outputs = []
    for config in (None, "demo"):
        llm = LLM("demo", device="cpu", use_tqdm=False, speculative_config=config, **options)
        assert isinstance(llm.engine.port, InProcess)
        engine, drafts = llm.engine.port.engine, DraftStats()
        step = engine.step

        def watch(step=step, drafts=drafts):
            made = step()
            for message in made.values():
                drafts.add(message.stats.drafts)
            return made

        monkeypatch.setattr(engine, "step", watch)
        outputs.append([output.outputs[0].token_ids for output in llm.chat(chats, params)])
        llm.close()
    assert outputs[0] == outputs[1]
    assert drafts.num_accepted_tokens > drafts.num_drafts
