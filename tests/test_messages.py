"""Messages: every struct survives the wire, and every union member is found by its tag."""

import types
import typing
from functools import cache

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from servd.messages import engine as messages
from servd.messages.engine import FromEngine, FromWorker, Message, ToEngine, ToWorker

STRUCTS = [
    kind
    for kind in vars(messages).values()
    if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
]
UNIONS = {
    "ToEngine": ToEngine,
    "FromEngine": FromEngine,
    "ToWorker": ToWorker,
    "FromWorker": FromWorker,
}
# The same examples in each run; a failure is shown as it was found, as shrinking takes minutes.
QUICK = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


PLAIN = {
    inspect.BytesType: st.binary(max_size=8),
    inspect.BoolType: st.booleans(),
    inspect.NoneType: st.none(),
}


def values(kind: inspect.Type) -> st.SearchStrategy:
    """Any value within the bounds of a field's type; fails on a type that it does not know."""
    match kind:
        case inspect.Metadata(type=inner):
            return values(inner)
        case inspect.UnionType(types=types):
            return st.one_of([values(member) for member in types])
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
        case inspect.ListType(item_type=item, min_length=length):
            return st.lists(values(item), min_size=length or 0, max_size=3)
        case inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=3).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(values, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=3)
        case inspect.LiteralType(values=allowed) | inspect.EnumType(cls=allowed):
            return st.sampled_from(allowed)
        case inspect.IntType(ge=low, gt=None, le=high, lt=None):
            return st.integers(
                -(2**63) if low is None else low, 2**64 - 1 if high is None else high
            )
        case inspect.FloatType(ge=low, gt=above, le=high, lt=None):
            lowest = above if low is None else low
            return st.floats(lowest, high, exclude_min=above is not None, allow_nan=False)
        case inspect.StrType(min_length=length):
            return st.text(min_size=length or 0, max_size=8)
    return PLAIN[type(kind)]


@cache
def any_of(kind: type | types.UnionType) -> st.SearchStrategy:
    """Any message of a struct or a union."""
    return values(inspect.type_info(kind))


@pytest.mark.parametrize("kind", STRUCTS, ids=lambda k: k.__name__)
@QUICK
@given(data=st.data())
def test_every_struct_survives_the_wire(kind, data):
    message = data.draw(any_of(kind))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message


@pytest.mark.parametrize("name", UNIONS)
@QUICK
@given(data=st.data())
def test_a_union_gives_back_the_member_that_was_sent(name, data):
    message = data.draw(any_of(UNIONS[name]))
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
