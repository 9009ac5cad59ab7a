"""The tools of a chat, and the choice which of them the model may or must call."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from servd.api.protocol.validation import OpenObject


def _check_parameters(parameters: Any) -> Any:
    # Templates and grammars need an object; an empty schema means one without properties.
    if isinstance(parameters, dict) and parameters and parameters.get("type") != "object":
        raise PydanticCustomError("parameters", 'must be a JSON schema with "type": "object"')
    return parameters


def check_tool(tool: Any) -> Any:
    """Return `tool` if it is a function. Raise PydanticCustomError if it is not."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "custom":
        message = (
            "tools of type custom are not supported: send a function with a string for the text"
        )
        raise PydanticCustomError("tool", message)
    if kind != "function":
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
    """A tool of the request, as the chat template gets it."""

    type: Literal["function"]
    function: Function


def _check_tools(tools: list[Tool]) -> list[Tool]:
    names: set[str] = set()
    for tool in tools:
        name = tool["function"]["name"]
        if name in names:
            raise PydanticCustomError("tools", "two functions have the name {name}", {"name": name})
        names.add(name)
    return tools


class FunctionName(OpenObject):
    """The name of a function in `tools`."""

    name: str


class NamedTool(OpenObject):
    """A function of `tools`. As `tool_choice`, the function that the model must call."""

    type: NotRequired[Literal["function"]]
    function: FunctionName


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
    return "allowed_tools" if choice.get("type") == "allowed_tools" else "named"


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
    list[Annotated[Tool, BeforeValidator(check_tool)]],
    Field(fail_fast=True, max_length=1024),
    AfterValidator(_check_tools),
]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedToolsChoice, Tag("allowed_tools")],
    Discriminator(_kind_of_choice),
]
