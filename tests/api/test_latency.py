"""The breakdown of a request's time, on hand-made marks and steps; times are milliseconds here."""

from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servd.api.request import latency
from servd.api.request.latency import MAX_SPANS, PHASES, Breakdown, break_down, request_of
from servd.base.tracing import STAGES, Mark, StepRecord

MS = 1_000_000
BEFORE = {"received": 0, "parsed": 1, "tokenised": 2, "sent": 3}
AFTER = {"returned": 1, "detokenised": 2, "written": 3, "done": 3}  # after it has finished


def marks_of(*own_marks: tuple[str, int, int] | tuple[str, int], end: int) -> list[Mark]:
    """Marks of a short request that is sent at 3 and finished at `end`."""
    marks = [Mark(stage, at * MS) for stage, at in BEFORE.items()]
    marks += [Mark(stage, at * MS, *step) for stage, at, *step in own_marks]
    marks += [Mark("finished", end * MS)]
    marks += [Mark(stage, (end + at) * MS) for stage, at in AFTER.items()]
    return sorted(marks, key=lambda mark: mark.at_ns)


def step(number: int, begin: int, end: int, prefills: dict[str, int] | None = None, **fields):
    """A step of four requests, which ends at `end`."""
    prefills = prefills or {}
    num_tokens = sum(prefills.values()) + 4 + fields.get("num_drafts", 0)
    return StepRecord(
        number,
        begin * MS,
        begin * MS,
        collected_ns=end * MS,
        prefills=prefills,
        num_tokens=num_tokens,
        **fields,
    )


def decoding(first: int, begin: int, end: int) -> list[StepRecord]:
    """Plain steps of 10 ms from `begin` to `end`."""
    return [step(first + i, at, at + 10) for i, at in enumerate(range(begin, end, 10))]


def milliseconds(breakdown: Breakdown) -> dict[str, float]:
    return {phase: ns / MS for phase, ns in breakdown.phases.items() if ns}


def explain(marks: list[Mark], steps: list[StepRecord]) -> dict[str, float]:
    shares = milliseconds(break_down(marks, steps, "own"))
    assert sum(shares.values()) == pytest.approx((marks[-1].at_ns - marks[0].at_ns) / MS)
    return shares


def test_an_undisturbed_request_is_its_own_work():
    marks = marks_of(("queued", 4), ("scheduled", 4, 10), ("first_token", 34, 10), end=64)
    steps = [step(10, 4, 34, {"own": 40}), *decoding(11, 34, 64)]
    assert explain(marks, steps) == {
        "parse": 1,
        "tokenise": 1,
        "event_loop": 1,
        "ipc": 2,
        "prefill": 30,
        "decode": 30,
        "detokenise": 1,
        "write": 1,
    }


def test_prompts_of_others_in_the_same_steps():
    marks = marks_of(("queued", 4), ("scheduled", 4, 10), ("first_token", 14, 10), end=194)
    steps = [step(10, 4, 14), *decoding(11, 14, 54)]
    steps += [step(15, 54, 114, {"b": 100}), step(16, 114, 174, {"b": 75, "c": 25})]
    steps += decoding(17, 174, 194)
    breakdown = break_down(marks, steps, "own")
    assert milliseconds(breakdown)["neighbour_prefill"] == 100  # not all 120: they decode, too
    assert milliseconds(breakdown)["decode"] == 80
    assert breakdown.longest_wait == "neighbour_prefill"
    assert breakdown.neighbours == {"b": 175, "c": 25} and breakdown.token_ns == MS / 2


def test_a_prompt_computed_together_with_others_is_shared_by_tokens():
    marks = marks_of(("queued", 4), ("scheduled", 4, 10), ("first_token", 114, 10), end=134)
    steps = [step(10, 4, 114, {"own": 20, "b": 80}), *decoding(11, 114, 134)]
    shares = explain(marks, steps)
    assert (shares["prefill"], shares["neighbour_prefill"]) == (30, 80)  # 10 for the step itself


@pytest.mark.parametrize(("num_own", "encode", "wait"), [(90, 60, 0), (30, 20, 40), (0, 0, 60)])
def test_the_tower_encodes_pictures_of_several(num_own: int, encode: int, wait: int):
    marks = marks_of(("queued", 4), ("scheduled", 4, 10), ("first_token", 94, 10), end=134)
    encodes = {name: count for name, count in {"own": num_own, "b": 90 - num_own}.items() if count}
    first = step(10, 4, 94, {"own": 20}, encodes=encodes, encode_ns=60 * MS)
    shares = explain(marks, [first, *decoding(11, 94, 134)])
    assert shares.get("picture_encode", 0) == encode
    assert shares.get("neighbour_prefill", 0) == wait
    assert (shares["prefill"], shares["decode"]) == (30, 40)


def test_pictures_are_fetched_and_processed_before_the_template():
    marks = marks_of(("queued", 34), ("scheduled", 34, 10), ("first_token", 44, 10), end=44)
    stages = {"fetched": 6, "picture_turn": 11, "decoded": 13, "processed": 17, "templated": 18}
    marks += [Mark(stage, at * MS) for stage, at in stages.items()]
    marks = [mark for mark in marks if mark.stage not in ("tokenised", "sent")]
    marks.sort(key=lambda mark: mark.at_ns)
    shares = explain(marks, [step(10, 34, 44, {"own": 20})])
    assert shares["picture_fetch"] == 5
    assert shares["picture_queue"] == 5
    assert shares["picture_decode"] == 2
    assert shares["picture_process"] == 4
    assert shares["template"] == 1
    assert break_down(marks, [], "own").longest_wait != "picture_process"


@pytest.mark.parametrize("resource", ["slots", "blocks", "budget"])
def test_what_it_queued_for(resource):
    marks = marks_of(("queued", 4), ("scheduled", 44, 14), ("first_token", 54, 14), end=64)
    steps = [step(9, 0, 14)]
    steps += [step(10 + i, 14 + 10 * i, 24 + 10 * i, waits_for=resource) for i in range(3)]
    steps += [step(14, 44, 54), step(15, 54, 64)]
    shares = explain(marks, steps)
    # From its arrival on: had no step run when it came, it would have waited all the same.
    assert shares[f"queue_{resource}"] == 40
    assert shares["queue_step"] == 1  # before the engine had taken it in


def test_wait_is_charged_to_the_running_step():
    marks = marks_of(("queued", 4), ("scheduled", 14, 10), ("first_token", 24, 10), end=34)
    steps = [step(9, 0, 14, waits_for="slots"), *decoding(10, 14, 34)]
    assert explain(marks, steps)["queue_step"] == 11


def test_what_it_queued_for_while_steps_in_flight_overlap():
    """A step begins before the one before it ends, and there is time between steps."""
    marks = marks_of(("queued", 4), ("scheduled", 40, 13), ("first_token", 54, 13), end=64)
    steps = [step(9, 0, 14), step(10, 9, 24, waits_for="slots")]
    steps += [step(11, 20, 34, waits_for="slots"), step(12, 36, 40, waits_for="slots")]
    steps += [step(13, 40, 54), step(14, 54, 64)]
    shares = explain(marks, steps)
    assert (shares["queue_slots"], shares["queue_step"]) == (36, 1)
    assert "unaccounted" not in shares


def test_a_preempted_request_waits_and_computes_again():
    marks = marks_of(
        ("queued", 4),
        ("scheduled", 4, 10),
        ("first_token", 14, 10),
        ("preempted", 24, 12),
        ("scheduled", 54, 15),
        end=124,
    )
    steps = [step(10, 4, 14), step(11, 14, 24), *decoding(12, 24, 54)]
    steps += [step(15, 54, 104, {"own": 50}), *decoding(16, 104, 124)]
    shares = explain(marks, steps)
    assert shares["preemption"] == 30 + 40
    assert shares["decode"] == 10 + 10 + 20


def test_waits_for_kv_transfers_are_named():
    marks = marks_of(
        ("queued", 4),
        ("reading", 6),
        ("scheduled", 24, 10),
        ("first_token", 34, 10),
        ("preempted", 44, 11),
        ("swapped", 44),
        ("scheduled", 64, 13),
        end=84,
    )
    steps = [step(10, 24, 34, {"own": 9}), step(11, 34, 44), step(12, 44, 64), step(13, 64, 84)]
    shares = explain(marks, steps)
    assert shares["tier_read"] == 18 and shares["swapped"] == 20
    assert shares["decode"] == 30 and "preemption" not in shares


def test_a_request_for_a_model_and_an_adapter_that_are_loaded_first():
    marks = marks_of(
        ("passed_on", 1),
        ("adapted", 1),
        ("queued", 4),
        ("scheduled", 4, 10),
        ("first_token", 34, 10),
        end=64,
    )
    at = {mark.stage: mark for mark in marks}
    at["passed_on"].at_ns, at["parsed"].at_ns = 500_000, 700_000
    at["adapted"].at_ns = 1_500_000
    marks.sort(key=lambda mark: mark.at_ns)
    shares = explain(marks, [step(10, 4, 34, {"own": 40}), *decoding(11, 34, 64)])
    assert (shares["model_load"], shares["parse"]) == (0.5, 0.2)
    assert (shares["adapter_load"], shares["tokenise"]) == (0.8, 0.5)


@pytest.mark.parametrize("awake_at", [44, 46])  # the API process may hear of it later
def test_a_request_that_wakes_its_engine(awake_at):
    marks = marks_of(
        ("asleep", 3),
        ("queued", 4),
        ("awake", awake_at),
        ("scheduled", 45, 10),
        ("first_token", 55, 10),
        end=65,
    )
    shares = explain(marks, [step(10, 45, 55, {"own": 40}), *decoding(11, 55, 65)])
    assert shares["wake_up"] == min(awake_at, 45) - 3 and shares["prefill"] == 10


def test_drafts_in_vain():
    marks = marks_of(("queued", 4), ("scheduled", 4, 10), ("first_token", 14, 10), end=74)
    steps = [step(10, 4, 14)]
    drafts = {"num_drafts": 16, "num_accepted": 4}
    steps += [step(11 + i, 14 + 30 * i, 44 + 30 * i, **drafts) for i in range(2)]
    shares = explain(marks, steps)
    assert shares["rejected_drafts"] == 40 and shares["decode"] == 20


def test_if_all_steps_have_drafts_their_time_is_shared_by_tokens():
    marks = marks_of(("queued", 4), ("scheduled", 4, 10), ("first_token", 14, 10), end=114)
    drafts = {"num_drafts": 16, "num_accepted": 4}
    steps = [step(10 + i, 14 + 20 * i, 34 + 20 * i, **drafts) for i in range(5)]
    shares = explain(marks, steps)
    assert shares["rejected_drafts"] == 100 * 12 / 20 and shares["decode"] == 40


@pytest.mark.parametrize(("first", "phase"), [(10, "stalled_worker"), (0, "start_up")])
def test_a_step_that_takes_longer_than_its_size_explains(first, phase):
    marks = marks_of(("queued", 4), ("scheduled", 4, first), ("first_token", 14, first), end=544)
    steps = [step(first, 4, 14), step(first + 1, 14, 514), *decoding(first + 2, 514, 544)]
    assert explain(marks, steps)[phase] == 490


def test_a_stall_beside_a_prompt_is_not_the_prompt():
    marks = marks_of(("queued", 4), ("scheduled", 4, 10), ("first_token", 14, 10), end=1114)
    steps = [step(10 + i, 4 + 10 * i, 14 + 10 * i) for i in range(3)]
    steps += [step(13 + i, 34 + 30 * i, 64 + 30 * i, {"b": 20}) for i in range(3)]
    steps += [step(16, 124, 1114, {"c": 20})]
    shares = explain(marks, steps)
    assert shares["stalled_worker"] == 990 - 30 and shares["neighbour_prefill"] == 4 * 20


def test_steps_in_flight_overlap():
    marks = marks_of(("queued", 4), ("scheduled", 12, 11), ("first_token", 34, 11), end=44)
    steps = [step(10, 4, 24), step(11, 12, 34), step(12, 25, 44)]
    shares = explain(marks, steps)
    assert shares["queue_step"] == 8 + 12  # until the step before is over
    assert shares["prefill"] == 10 and shares["decode"] == 10


def test_time_between_steps_is_charged_to_the_engine():
    marks = marks_of(("queued", 4), ("scheduled", 4, 1), ("first_token", 14, 1), end=50)
    assert explain(marks, [step(1, 4, 14), step(2, 40, 50)])["engine_loop"] == 26
    assert explain(marks, [step(1, 4, 14)])["unaccounted"] == 36


def test_choices_are_where_the_foremost_that_runs_is():
    marks = marks_of(
        ("queued", 4),
        ("queued", 4),
        ("scheduled", 4, 1),
        ("first_token", 14, 1),
        ("finished", 24),
        ("scheduled", 24, 3),
        ("first_token", 34, 3),
        ("returned", 25),
        end=44,
    )
    shares = explain(marks, decoding(1, 4, 44))
    assert (shares["prefill"], shares["decode"]) == (20, 20)


def test_a_stop_string_ends_a_choice_in_the_api_process():
    marks = [
        m
        for m in marks_of(("queued", 4), ("scheduled", 4, 1), ("first_token", 14, 1), end=24)
        if m.stage != "finished"
    ]
    shares = explain(marks, decoding(1, 4, 44))
    assert shares["decode"] == 11 and shares["detokenise"] == 1


def test_thousands_of_short_spans_are_drawn_as_few():
    num = 5000
    steps = [step(i, 4 + 2 * i, 6 + 2 * i, {"b": 10} if i % 2 else None) for i in range(num)]
    marks = marks_of(("queued", 4), ("scheduled", 4, 0), ("first_token", 6, 0), end=2 * num)
    breakdown = break_down(marks, steps, "own")
    assert len(breakdown.spans) <= MAX_SPANS
    assert breakdown.num_steps > 4000 and len(breakdown.steps) == 512
    assert_contiguous(breakdown)


def assert_contiguous(breakdown: Breakdown) -> None:
    """And what is drawn of each phase is its time."""
    drawn: Counter[str] = Counter({"unaccounted": 0})
    for span in breakdown.spans:
        drawn[span.phase] += span.end_ns - span.begin_ns
    assert drawn == breakdown.phases
    at = breakdown.begin_ns
    for span in breakdown.spans:
        assert span.begin_ns == at < span.end_ns
        at = span.end_ns
    assert at == breakdown.end_ns


STEPS = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(0, 40),
        st.dictionaries(st.sampled_from(["own", "b", "c"]), st.integers(2, 99), max_size=2),
        st.integers(0, 9),
        st.integers(0, 9),
        st.sampled_from(["", "slots", "blocks", "budget"]),
    )
)
MARKS = st.lists(
    st.tuples(st.sampled_from(STAGES), st.integers(0, 400), st.integers(0, 9)), min_size=1
)


def steps_of(parts) -> list[StepRecord]:
    """Steps as of STEPS, some in flight with the one before."""
    begin = end = 0
    steps = []
    for number, (wait, duration, prefills, drafts, accepted, waits_for) in enumerate(parts):
        begin = max(begin, end - 5) + wait
        end = max(end, begin) + duration
        steps.append(
            step(
                number,
                begin,
                end,
                prefills,
                num_drafts=drafts,
                num_accepted=min(accepted, drafts),
                waits_for=waits_for,
            )
        )
    return steps


@given(STEPS, st.integers(1, 60))
def test_many_spans_keep_the_time_of_their_phases(parts, num_stretches):
    steps = steps_of(parts * 50)
    end = max((step.collected_ns // MS for step in steps), default=0) + 9
    marks = marks_of(("queued", 0), ("scheduled", 0, 0), ("first_token", 1, 0), end=end)
    with patch.multiple(latency, MAX_SPANS=0, NUM_STRETCHES=num_stretches):
        breakdown = break_down(marks, steps, "own")
    num_kinds = len({(span.stage, span.phase) for span in breakdown.spans})
    assert len(breakdown.spans) <= (num_stretches + 1) * num_kinds
    assert_contiguous(breakdown)


@given(MARKS, STEPS)
def test_the_shares_add_up_to_the_whole_and_none_is_negative(marks, parts):
    """Whatever the marks and the steps are: some may be lost, or come in any order."""
    steps = steps_of(parts)
    all_marks = sorted(
        (Mark(stage, at * MS, number) for stage, at, number in marks), key=lambda mark: mark.at_ns
    )
    breakdown = break_down(all_marks, steps, "own")
    assert sum(breakdown.phases.values()) == all_marks[-1].at_ns - all_marks[0].at_ns
    assert min(breakdown.phases.values()) >= 0 and set(breakdown.phases) <= set(PHASES)
    assert_contiguous(breakdown)


def test_an_engine_that_dies_and_its_successor():
    """From the last sign of life on; the next engine counts its steps from 0."""
    marks = marks_of(
        ("queued", 4),
        ("scheduled", 4, 100),
        ("first_token", 14, 100),
        ("engine_lost", 34),
        ("sent", 534),
        ("queued", 535),
        ("scheduled", 535, 0),
        end=605,
    )
    steps = [step(100, 4, 14), *decoding(101, 14, 34)]
    steps += [step(0, 535, 585, {"own": 50}), *decoding(1, 585, 605)]
    shares = explain(marks, steps)
    assert shares["engine_restart"] == 500 + 40  # and what was computed again
    assert shares["decode"] == 20 + 10 + 20 and "unaccounted" not in shares


def test_choices_of_which_some_had_ended_when_the_engine_died():
    marks = marks_of(
        ("queued", 4),
        ("queued", 4),
        ("scheduled", 4, 9),
        ("scheduled", 4, 9),
        ("first_token", 14, 9),
        ("first_token", 14, 9),
        ("finished", 24),
        ("returned", 24),
        ("engine_lost", 24),
        ("sent", 64),
        ("queued", 64),
        ("scheduled", 64, 0),
        end=84,
    )
    steps = [step(9, 4, 14), step(10, 14, 24), *decoding(0, 64, 84)]
    shares = explain(marks, steps)
    assert (shares["engine_restart"], shares["decode"]) == (40, 10 + 20)


def test_parts_one_after_another_are_one_request():
    marks = marks_of(
        ("queued", 4),
        ("scheduled", 4, 10),
        ("first_token", 14, 10),
        ("finished", 14),
        ("returned", 16),
        ("detokenised", 16),
        ("sent", 20),
        ("queued", 21),
        ("scheduled", 24, 12),
        ("first_token", 34, 12),
        end=34,
    )
    steps = [step(10, 4, 14, {"own/0": 7}), step(11, 14, 24), step(12, 24, 34, {"own/1": 7})]
    assert explain(marks, steps) == {
        "parse": 1,
        "tokenise": 1,
        "event_loop": 1 + 4,
        "ipc": 1 + 2 + 1,
        "queue_step": 1 + 3,
        "prefill": 20,
        "detokenise": 1,
        "write": 1,
    }


@pytest.mark.parametrize(
    ("engine_id", "request_id"),
    [("cmpl-a_b", "cmpl-a_b"), ("cmpl-a_b_12", "cmpl-a_b"), ("decision-a/3", "decision-a")],
)
def test_the_request_of_a_choice_or_a_part(engine_id, request_id):
    assert request_of(engine_id) == request_id
