"""GLM 4.5 to 4.7: `<tool_call>F<arg_key>P</arg_key><arg_value>value</arg_value></tool_call>`."""

import re

from servd.api.output.incremental import Steps
from servd.api.output.tool_parsers._parameters import ParametersParser

KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"

_NAME = re.compile(r"[\w.-]*")


class Glm45ToolParser(ParametersParser):
    """A parser for names without a tag; GLM 4.5 and 4.6 write line breaks between tags. Forced
    calls use a JSON array, because grammars of arguments cannot contain the tags, which are tokens.
    """

    markers = ("<tool_call>", "</tool_call>", KEY, KEY_END, VALUE, VALUE_END)
    signs = (KEY,)
    function = ("", "")
    function_end = "</tool_call>"
    parameter = (KEY, KEY_END)
    parameter_end = VALUE_END

    def function_name(self) -> Steps[str | None]:
        name = yield from self.reader.run(_NAME)
        yield from self.reader.space()
        return name if (yield from self.reader.peek()) == "<" else None

    def parameter_name(self) -> Steps[str | None]:
        name = yield from self.reader.until(KEY_END)
        yield from self.reader.space()
        return name if (yield from self.reader.accept(VALUE)) else None
