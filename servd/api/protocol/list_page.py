"""ListPage: a page of the files, batches or items that clients list."""

from typing import Generic, TypeVar

import msgspec

Entry = TypeVar("Entry")


class ListPage(msgspec.Struct, Generic[Entry], tag_field="object", tag="list"):
    """A page of a list, see `servd.api.http.paging.Page`."""

    data: list[Entry]
    first_id: str | None
    last_id: str | None
    has_more: bool
