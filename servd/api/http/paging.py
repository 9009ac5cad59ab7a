"""Page: cursor pagination of lists, as OpenAI's clients use it."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field

from servd.base.errors import InvalidRequest

T = TypeVar("T")


class Page(BaseModel):
    """The query parameters that select a page of a list."""

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None

    def of(
        self, entries: Sequence[T], id_of: Callable[[T], str]
    ) -> tuple[list[T], str | None, str | None, bool]:
        """Return the page, the ids of its first and last entry, and whether more entries follow.
        `entries` is the whole list, oldest first. Raise InvalidRequest if no entry has the id
        `after`.
        """
        if self.order == "desc":
            entries = entries[::-1]
        if self.after:
            places = [place for place, entry in enumerate(entries) if id_of(entry) == self.after]
            if not places:
                value = repr(self.after[:200])
                raise InvalidRequest(f"`after`: there is no {value} in the list", param="after")
            entries = entries[places[0] + 1 :]
        chosen = list(entries[: self.limit])
        first, last = (id_of(chosen[0]), id_of(chosen[-1])) if chosen else (None, None)
        return chosen, first, last, len(entries) > self.limit
