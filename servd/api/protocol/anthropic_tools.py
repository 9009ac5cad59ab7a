"""Anthropic's tools whose schemas its models know and that the client runs: a shell, an editor."""

import re
from typing import Any


def _tool(name: str, description: str, required: list[str], **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"name": name, "description": description, "input_schema": schema}


def _text(description: str, **rules: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **rules}


SHELL = _tool(
    "bash",
    "Run a command in a bash shell that stays open between calls.",
    [],
    command=_text("The command. Required unless `restart` is true."),
    restart={"type": "boolean", "description": "Start a new shell."},
)
COMMANDS = ["view", "create", "str_replace", "insert"]
EDITOR = {
    "path": _text("Absolute path of a file, or of a directory to view."),
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "For `view` of a file: first and last line, from 1; -1 is the end.",
    },
    "file_text": _text("For `create`: the content of the file."),
    "old_str": _text("For `str_replace`: the text to replace. It must occur exactly once."),
    "insert_line": {
        "type": "integer",
        "description": "For `insert`: the line after which the text goes, 0 for the beginning.",
    },
}
ACTION = "View, create and edit files."
NEW_EDITOR = _tool(
    "str_replace_based_edit_tool",
    ACTION,
    ["command", "path"],
    command=_text("What to do.", enum=COMMANDS),
    **EDITOR,
    new_str=_text("For `str_replace`: the new text."),
    insert_text=_text("For `insert`: the new text."),
)
OLD_EDITOR = _tool(
    "str_replace_editor",
    ACTION,
    ["command", "path"],
    command=_text("What to do.", enum=[*COMMANDS, "undo_edit"]),
    **EDITOR,
    new_str=_text("For `str_replace` and `insert`: the new text."),
)


def as_function(tool: Any) -> Any:
    """Return a tool as one with a name and an `input_schema`, or None if servd does not know it."""
    kind = tool.get("type")
    if kind in (None, "custom"):
        return tool
    if re.fullmatch(r"bash_\d+", kind):
        return SHELL
    if kind in ("text_editor_20241022", "text_editor_20250124"):
        return OLD_EDITOR
    return NEW_EDITOR if re.fullmatch(r"text_editor_\d+", kind) else None
