"""What is counted of drafts, and requests that want none."""

from collections import deque

import pytest

from servd.core import draft_length
from servd.core.draft_length import DraftLengthController
from servd.messages.engine import ModelRunnerOutput
from servd.messages.stats import DraftStats
from tests.core.engines import generate, make_engine, make_request

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}  # the fake executor drafts by itself
PROMPT = [1, 2, 3]


@pytest.fixture(autouse=True)
def eager_drafts(monkeypatch):
    """Every draft is worth its time: steps of a fake device take none, or any."""
    monkeypatch.setattr(DraftLengthController, "relative_costs", lambda *_: (1e-9, 0.0))


def total(log):
    """The counts of all reports together."""
    total = DraftStats()
    for outputs in log.by_client[0]:
        total.add(outputs.stats.drafts)
    return total


@pytest.mark.parametrize("depth", [1, 2])
def test_each_accepted_draft_saves_an_output(depth):
    engine = make_engine(depth=depth, speculative_config=DRAFTS)
    log = generate(engine, make_request("a", PROMPT, 50))
    counted = total(log)
    assert len(log.token_ids("a")) == 50
    assert len(log.outputs["a"]) == 50 - counted.num_accepted_tokens
    assert sum(counted.num_accepted_tokens_per_pos) == counted.num_accepted_tokens > 10
    assert len(counted.num_accepted_tokens_per_pos) == 3
    assert counted.num_accepted_tokens_per_pos[0] <= counted.num_drafts
    assert counted.num_accepted_tokens < counted.num_draft_tokens <= 3 * counted.num_drafts


def test_accepted_drafts_behind_the_end_count_nowhere():
    text = generate(make_engine(), make_request("a", PROMPT, 50)).token_ids("a")
    num_cut = 0
    for end in text[5:25]:
        engine = make_engine(speculative_config=DRAFTS)
        log = generate(engine, make_request("a", PROMPT, 50, stop_token_ids=[end]))
        steps = [step for outputs in log.by_client[0] for step in outputs.steps]
        accepted = sum(step.num_accepted for step in steps)
        assert accepted == total(log).num_accepted_tokens
        outputs = log.outputs["a"]
        assert sum(output.num_accepted for output in outputs) == accepted
        assert sum(output.num_drafts for output in outputs) == total(log).num_draft_tokens
        num_cut += len(log.outputs["a"]) > len(log.token_ids("a")) - accepted
    assert num_cut > 0  # the stop token was itself an accepted draft


def test_a_request_that_wants_no_drafts_gets_none_and_the_same_text():
    engine = make_engine(speculative_config=DRAFTS)
    plain = generate(engine, make_request("a", PROMPT, 30, speculative=False))
    assert total(plain) == DraftStats()
    assert len(plain.outputs["a"]) == 30
    drafted = generate(engine, make_request("a", PROMPT, 30))
    assert drafted.token_ids("a") == plain.token_ids("a")


def test_requests_that_build_on_a_failed_step_fail_too(monkeypatch):
    """The step was scheduled as if they were, three tokens further on."""
    monkeypatch.setattr(draft_length, "PAUSE_STEPS", 0)
    scheduler = make_engine(depth=2, speculative_config=DRAFTS).scheduler

    def collect(token_id, drafts=(), **options):
        launched.popleft()
        output = ModelRunnerOutput([[token_id]], draft_token_ids={0: [*drafts]}, **options)
        scheduler.update_from_output(output, {})

    launched = deque()
    scheduler.add_request(make_request("a", [1, 2, 3, 4, 5, 6], 20))
    launched.append(scheduler.schedule())
    collect(97, [7, 7, 7])
    launched += [scheduler.schedule(), scheduler.schedule()]
    collect(98)  # so that the step in flight begins at the last token of a block
    assert [step.rows[0].num_computed_tokens for step in launched] == [10]
    scheduler.add_request(make_request("b", [1, 2, 3, 4, 5, 6, 97, 98, 9], 20))
    assert scheduler.schedule().new_requests[0].num_computed_tokens == 8
    collect(99, errors={0: "bad"})
    errors = {output.request_id: output.error for output in scheduler.take_outputs()[0].all_outputs}
    assert errors == {"a": "bad", "b": "bad"}
