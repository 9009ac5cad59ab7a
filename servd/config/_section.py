"""The base class of the sections of Config, and common types of options."""

import types
import typing
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base class of all sections. The docstring below a field describes the option."""


def plain(hint: Any) -> tuple[Any, list[Meta]]:
    """Return the type without Annotated and None, and all its Meta, outermost first."""
    metas: list[Meta] = []
    while True:
        if typing.get_origin(hint) is Annotated:
            hint, *more = typing.get_args(hint)
            metas += more
        elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
        else:
            return hint, metas
