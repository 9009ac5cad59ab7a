"""MarkedCallsParser: parses calls between markers, in a section between markers."""

from abc import abstractmethod

from servd.api.output.incremental import Steps
from servd.api.output.tool_parser import ToolParser


class MarkedCallsParser(ToolParser):
    """A parser of a section with one or more calls. The first three `markers` begin a section, end
    a section, and begin a call.
    """

    @abstractmethod
    def call(self) -> Steps[bool]:
        """Read a call after its first marker, up to its end. Return whether it was well formed."""

    def body(self) -> Steps[None]:
        yield from self.read_to_end(self.markers[0], call=self._calls)

    def _calls(self) -> Steps[bool]:
        return (yield from self.calls_until(self.markers[1], self.markers[2], self.call))
