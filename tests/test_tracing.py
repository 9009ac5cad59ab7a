"""Timeline: marks of several processes in one order, and a bounded memory of finished requests."""

import time

from hypothesis import given
from hypothesis import strategies as st

from servd.tracing import STAGES, Mark, Tracer


@given(
    st.lists(st.tuples(st.sampled_from(STAGES), st.integers(1, 10**6), st.booleans()), min_size=1)
)
def test_marks_are_in_order_of_time_wherever_they_were_taken(marks):
    tracer = Tracer()
    for stage, at_ns, is_foreign in marks:
        if is_foreign:
            tracer.extend("r", [Mark(stage, at_ns)])
        else:
            tracer.mark("r", stage, at_ns)
    running = tracer.get("r")
    finished = tracer.finish("r")
    assert running == finished == tracer.get("r")
    assert [m.at_ns for m in finished] == sorted(at_ns for _, at_ns, _ in marks)


def test_a_mark_without_a_time_is_now():
    tracer = Tracer()
    before = time.monotonic_ns()
    tracer.mark("r", "received")
    assert before <= tracer.finish("r")[0].at_ns <= time.monotonic_ns()


def test_only_the_most_recent_finished_requests_are_kept():
    tracer = Tracer(keep=3)
    for i in range(10):
        tracer.mark(str(i), "received")
        tracer.finish(str(i))
    assert [i for i in range(10) if tracer.get(str(i))] == [7, 8, 9]
    assert tracer.marks == {}


def test_a_timeline_is_shown_to_its_owner_alone_and_forgotten_with_its_request():
    tracer = Tracer(keep=2)
    for i, owner in enumerate("aabb"):
        tracer.owners[str(i)] = owner
        tracer.mark(str(i), "received")
    tracer.forget("0")
    assert [i for i in "0123" if tracer.get(i, "a")] == ["1"]
    assert [i for i in "0123" if tracer.get(i, "b")] == ["2", "3"]
    assert not any(tracer.get(i) for i in "0123")
    for i in "123":
        tracer.finish(i)
    assert not tracer.get("1", "a") and tracer.get("3", "b")
    assert tracer.owners == {"2": "b", "3": "b"}


def test_an_unknown_request_has_no_timeline():
    assert Tracer().get("r") is None
