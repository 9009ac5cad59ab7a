"""Anthropic's tools whose schemas its models know and that the client runs: a shell, an editor."""

import re
from typing import Any

TEXT = {"type": "string"}
BASH = {
    "name": "bash",
    "description": "Run a command in a bash shell that stays open between calls.",
    "input_schema": {
        "type": "object",
        "properties": {
            "command": {**TEXT, "description": "The command. Required unless `restart` is true."},
            "restart": {"type": "boolean", "description": "Start a new shell."},
        },
    },
}
COMMANDS = ["view", "create", "str_replace", "insert"]
LINES = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
LINES_RULE = "For `view` of a file: first and last line, from 1; -1 is the end."
INSERT_RULE = "For `insert`: the line after which the text goes, 0 for the beginning."


def as_function(tool: Any) -> Any:
    """Return a tool as one with a name and an `input_schema`, or None if servd does not know it."""
    kind = tool.get("type")
    if kind in (None, "custom"):
        return tool
    if re.fullmatch(r"bash_\d+", kind):
        return BASH
    if re.fullmatch(r"text_editor_\d+", kind):
        return _editor(is_old=kind in ("text_editor_20241022", "text_editor_20250124"))
    return None


def _editor(is_old: bool) -> dict[str, Any]:
    """Return the editor. The old one can undo, and inserts the text of `new_str`."""
    properties = {
        "command": {**TEXT, "enum": [*COMMANDS, "undo_edit"] if is_old else COMMANDS},
        "path": {**TEXT, "description": "Absolute path of a file, or of a directory to view."},
        "view_range": {**LINES, "description": LINES_RULE},
        "file_text": {**TEXT, "description": "For `create`: the content of the file."},
        "old_str": {
            **TEXT,
            "description": "For `str_replace`: the text to replace, exactly as in the file, where "
            "it must occur once.",
        },
        "new_str": {**TEXT, "description": "For `str_replace`: the new text."},
        "insert_line": {"type": "integer", "description": INSERT_RULE},
    }
    if is_old:
        properties["new_str"]["description"] = "For `str_replace` and `insert`: the new text."
    else:
        properties["insert_text"] = {**TEXT, "description": "For `insert`: the new text."}
    return {
        "name": "str_replace_editor" if is_old else "str_replace_based_edit_tool",
        "description": "View, create and edit files.",
        "input_schema": {
            "type": "object",
            "properties": properties,
            "required": ["command", "path"],
        },
    }
