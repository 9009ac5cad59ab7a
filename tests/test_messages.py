"""Messages: every struct of the module survives the wire, and every union member is found by its
tag.
"""

import inspect
import types
import typing
from enum import Enum

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from servd import messages
from servd.messages import FromEngine, FromWorker, Message, ToEngine, ToWorker

STRUCTS = [
    kind
    for _, kind in inspect.getmembers(messages, inspect.isclass)
    if issubclass(kind, Message) and kind is not Message
]
UNIONS = {
    "ToEngine": ToEngine,
    "FromEngine": FromEngine,
    "ToWorker": ToWorker,
    "FromWorker": FromWorker,
}


def values(kind: typing.Any) -> st.SearchStrategy:
    """Strategy for any type that a message field has; fails on one that it does not know."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(a) for a in args])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return st.builds(
            kind, **{f.name: values(hints[f.name]) for f in msgspec.structs.fields(kind)}
        )
    return {
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        types.NoneType: st.none(),
    }[kind]


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda k: k.__name__)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_struct_survives_the_wire(kind, data):
    message = data.draw(values(kind))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message


@pytest.mark.parametrize("name", UNIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_union_gives_back_the_member_that_was_sent(name, data):
    message = data.draw(values(UNIONS[name]))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=UNIONS[name])
    assert type(received) is type(message)
    assert received == message


def test_every_tagged_message_belongs_to_a_border():
    members = {member for union in UNIONS.values() for member in typing.get_args(union)}
    assert {kind for kind in STRUCTS if kind.__struct_config__.tag is not None} == members


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda k: k.__name__)
def test_fields_without_a_default_come_first(kind):
    # Positional on the wire: an older reader must be able to stop early.
    defaults = [not f.required for f in msgspec.structs.fields(kind)]
    assert defaults == sorted(defaults)


def test_num_tokens_of_a_step_is_the_sum_over_its_requests():
    step = messages.SchedulerOutput(
        step=1,
        scheduled=[
            messages.ScheduledRequest(slot=0, num_tokens=5),
            messages.ScheduledRequest(slot=3, num_tokens=1),
        ],
    )
    assert step.num_tokens == 6


def test_a_message_of_another_border_is_refused():
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(messages.Shutdown()), type=ToEngine)
