"""The tools of a Responses request, as the tools of a chat."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Discriminator, Field, Tag

from servd.api.protocol.tools import CustomGrammar, Function, HostedTool, ToolName, allow_both
from servd.api.protocol.validation import OpenObject

SEPARATOR = "__"  # between the names of a namespace and its tool


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]
    strict: NotRequired[bool | None]


class FreeText(OpenObject):
    """A custom tool takes any text."""

    type: Literal["text"]


class GrammarText(CustomGrammar):
    """A custom tool takes texts of a grammar."""

    type: Literal["grammar"]


class CustomTool(OpenObject):
    """A tool that takes a text in place of JSON arguments."""

    type: Literal["custom"]
    name: ToolName
    description: NotRequired[str | None]
    format: NotRequired[Annotated[FreeText | GrammarText, Field(discriminator="type")] | None]


OWN_TYPES = ("function", "custom")


def _kind(tool: Any) -> str:
    kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
    if not isinstance(kind, str):
        return "function"  # which says what is wrong
    return kind if kind in (*OWN_TYPES, "namespace") else "hosted tool"


GroupedTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[HostedTool, Tag("hosted tool")],
    Discriminator(lambda tool: _kind(tool).replace("namespace", "hosted tool")),
    Field(json_schema_extra=allow_both),
]


class Namespace(OpenObject):
    """A group of tools, whose names need to differ in the group only."""

    type: Literal["namespace"]
    name: ToolName
    description: NotRequired[str | None]
    tools: Annotated[list[GroupedTool], Field(fail_fast=True, max_length=1024)]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Namespace, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted tool")],
    Discriminator(_kind),
    Field(json_schema_extra=allow_both),
]


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a tool."""
    return name if namespace is None else f"{namespace.rstrip('_')}{SEPARATOR}{name}"


def flattened(tools: Iterable[Any]) -> Iterator[tuple[str | None, Any]]:
    """Yield each tool with the name of its namespace."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from ((tool["name"], inner) for inner in tool["tools"])
        else:
            yield None, tool


def chat_tools(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the client's own tools as a chat has them. The model sees no others."""
    converted: list[dict[str, Any]] = []
    for namespace, tool in flattened(tools):
        kind = tool["type"]
        if kind not in OWN_TYPES:
            continue
        fields = {key: value for key, value in tool.items() if key != "type"}
        fields["name"] = flat_name(namespace, tool["name"])
        text_format = tool.get("format")
        if kind == "custom" and text_format and text_format["type"] == "grammar":
            grammar = {key: text_format[key] for key in ("syntax", "definition")}
            fields["format"] = {"type": "grammar", "grammar": grammar}
        converted.append({"type": kind, kind: fields})
    return converted


def names_of(tools: Iterable[Any]) -> dict[str, tuple[str | None, str]]:
    """Return the namespace and the name of each tool, by the name that the model sees."""
    return {
        flat_name(namespace, tool["name"]): (namespace, tool["name"])
        for namespace, tool in flattened(tools)
        if tool["type"] in OWN_TYPES
    }


def hosted_types(tools: Iterable[Any]) -> set[str]:
    """Return the types of the tools that the model does not see."""
    return {tool["type"] for _, tool in flattened(tools)}.difference(OWN_TYPES)
