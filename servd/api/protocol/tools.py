"""The tools of a chat, and the choice which of them the model may or must call."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from servd.api.protocol.validation import OpenObject
from servd.api.text.prompt import TextGrammar
from servd.messages.params import MAX_GRAMMAR_BYTES


def _check_parameters(parameters: Any) -> Any:
    # Templates and grammars need an object; an empty schema means one without properties.
    if isinstance(parameters, dict) and parameters and parameters.get("type") != "object":
        raise PydanticCustomError("parameters", 'must be a JSON schema with "type": "object"')
    return parameters


def check_tool(tool: Any) -> Any:
    """Return `tool` if servd knows its type. Raise PydanticCustomError if it does not."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        message = "tools of type {kind} are not supported: servd runs no tools, send functions"
        raise PydanticCustomError("tool", message, {"kind": str(kind)[:64]})
    return tool


class HostedTool(OpenObject):
    """A tool that servd does not know, such as a search that the server would run. The model does
    not see it.
    """

    type: Annotated[str, Field(max_length=64)]


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
IS_OBJECT = {"properties": {"type": {"const": "object"}}, "required": ["type"]}
Parameters = Annotated[
    dict[str, Any], Field(json_schema_extra={"anyOf": [{"maxProperties": 0}, IS_OBJECT]})
]


class Function(OpenObject):
    """A function that the model may call. `parameters` is a JSON schema."""

    name: ToolName
    description: NotRequired[str | None]
    parameters: NotRequired[Annotated[Parameters | None, AfterValidator(_check_parameters)]]


class Tool(OpenObject):
    """A function of the request, as the chat template gets it."""

    type: Literal["function"]
    function: Function


class CustomGrammar(OpenObject):
    """The grammar that a custom tool's text follows: Lark, or a regular expression."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_BYTES)]


class CustomText(OpenObject):
    """The form of a custom tool's text: any, or that of a grammar."""

    type: Literal["text", "grammar"]
    grammar: NotRequired[CustomGrammar | None]


def _check_text(text: CustomText) -> CustomText:
    if text["type"] == "grammar" and not text.get("grammar"):
        raise PydanticCustomError("format", "of the type grammar must have a `grammar`")
    return text


class Custom(OpenObject):
    """A tool that takes a text. The model sees a function with one string."""

    name: ToolName
    description: NotRequired[str | None]
    format: NotRequired[Annotated[CustomText, AfterValidator(_check_text)] | None]


class CustomTool(OpenObject):
    """A custom tool of the request."""

    type: Literal["custom"]
    custom: Custom


AnyChatTool = Annotated[Tool | CustomTool, Field(discriminator="type")]
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def name_of(tool: Any) -> str:
    """Return the name of a tool, of a call, or of a tool that a `tool_choice` names."""
    return tool["custom" if tool.get("type") == "custom" else "function"]["name"]


def as_function(tool: Any) -> dict[str, Any]:
    """Return a tool as the function that the model sees."""
    if tool["type"] == "function":
        return tool
    custom = tool["custom"]
    parts = [custom.get("description") or ""]
    if grammar := grammar_of(tool):
        parts.append(f"`input` follows this {grammar.syntax} grammar:\n{grammar.definition}")
    function: dict[str, Any] = {"name": custom["name"]}
    if description := "\n\n".join(filter(None, parts)):
        function["description"] = description
    return {"type": "function", "function": function | {"parameters": CUSTOM_PARAMETERS}}


def grammar_of(tool: CustomTool) -> TextGrammar | None:
    text = tool["custom"].get("format") or {}
    grammar = text.get("grammar") if text.get("type") == "grammar" else None
    return TextGrammar(grammar["syntax"], grammar["definition"]) if grammar else None


def _check_tools(tools: list[AnyChatTool]) -> list[AnyChatTool]:
    names: set[str] = set()
    num_chars = 0
    for tool in tools:
        name = name_of(tool)
        if name in names:
            raise PydanticCustomError("tools", "two functions have the name {name}", {"name": name})
        names.add(name)
        grammar = grammar_of(tool) if tool["type"] == "custom" else None
        num_chars += len(grammar.definition) if grammar else 0
    if num_chars > MAX_GRAMMAR_BYTES:
        message = "the grammars have {size} characters together, at most {limit} are accepted"
        raise PydanticCustomError("tools", message, {"size": num_chars, "limit": MAX_GRAMMAR_BYTES})
    return tools


class FunctionName(OpenObject):
    """The name of a tool in `tools`."""

    name: str


class NamedFunction(OpenObject):
    """A function of `tools`. As `tool_choice`, the function that the model must call."""

    type: NotRequired[Literal["function"]]
    function: FunctionName


class NamedCustom(OpenObject):
    """A custom tool of `tools`. As `tool_choice`, the tool that the model must call."""

    type: Literal["custom"]
    custom: FunctionName


def kind_of(tool: Any) -> str:
    """Return the kind of a tool's name or call, whose type may be absent: function or custom."""
    return "custom" if isinstance(tool, dict) and tool.get("type") == "custom" else "function"


NamedTool = Annotated[
    Annotated[NamedFunction, Tag("function")] | Annotated[NamedCustom, Tag("custom")],
    Discriminator(kind_of),
]


class AllowedTools(OpenObject):
    """The functions of `tools` that the model may call, or of which it must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=1024)]


class AllowedToolsChoice(OpenObject):
    """A `tool_choice` that is limited to some of `tools`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _kind_of_choice(choice: Any) -> str:
    if not isinstance(choice, dict):
        return "word"
    return choice["type"] if choice.get("type") in ("allowed_tools", "custom") else "named"


def own_and_hosted(*own_types: str | None) -> Discriminator:
    """Return the discriminator of a client's own tools, which have these types, and hosted ones."""

    def kind(tool: Any) -> str:
        kind = tool.get("type") if isinstance(tool, dict) else None
        return "hosted tool" if isinstance(kind, str) and kind not in own_types else "own tool"

    return Discriminator(kind)


def allow_both(schema: dict[str, Any]) -> None:
    """Change the JSON schema of a union so that a value may match several members."""
    schema["anyOf"] = schema.pop("oneOf")


Tools = Annotated[
    list[Annotated[AnyChatTool, BeforeValidator(check_tool)]],
    Field(fail_fast=True, max_length=1024),
    AfterValidator(_check_tools),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedFunction, Tag("named")]
    | Annotated[NamedCustom, Tag("custom")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(_kind_of_choice),
]
