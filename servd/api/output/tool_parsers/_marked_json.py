"""MarkedJsonParser: parses calls in a JSON array after a marker."""

from typing import ClassVar

from servd.api.output.incremental import Steps
from servd.api.output.tool_parser import ToolParser


class MarkedJsonParser(ToolParser):
    """A parser of `[{"name": ..., "arguments": {...}}]` after one of `begins`, which may have the
    bracket; `end` may follow.
    """

    begins: ClassVar[tuple[str, ...]]
    end: ClassVar[str] = ""

    @classmethod
    def openings(cls) -> tuple[str, ...]:
        return cls.begins

    def body(self) -> Steps[None]:
        yield from self.read_to_end(*self.begins, call=self._calls)

    def _calls(self) -> Steps[bool]:
        self.reader.untake("[" if self.reader.consumed.endswith("[") else "")
        yield from self.reader.space()
        if not (yield from self.json_calls()):
            return False
        if self.end:
            yield from self.reader.accept_after_space(self.end)
        return True
