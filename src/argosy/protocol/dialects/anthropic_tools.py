"""Tools of the Messages API that clients run and whose type stands for their schema: shell, text editor, memory."""

from __future__ import annotations

from argosy.protocol.openai_requests import JsonObject

_FIRST_INSERT_TEXT = "20250728"
"""First text editor whose `insert` has its text in `insert_text`."""
_FIRST_WITHOUT_UNDO = "20250429"


def describe_client_tool(kind: str) -> tuple[str, JsonObject] | None:
    """Return description and schema of a tool that the client runs; None for tools of Anthropic's servers.

    Args:
        kind: Type of the tool: its name and the date of its version, as `bash_20250124`.
    """
    name, _, date = kind.rpartition("_")
    match name:
        case "bash":
            return _SHELL
        case "text_editor":
            inserted = "new_str" if date < _FIRST_INSERT_TEXT else "insert_text"
            commands = ["undo_edit"] if date < _FIRST_WITHOUT_UNDO else []
            return "View and edit text files.", _describe_editor(commands, {inserted: _INSERTED})
        case "memory":
            renamed = {"old_path": "Path before 'rename'.", "new_path": "Path after 'rename'."}
            texts = {"insert_text": _INSERTED, **renamed}
            description = "View and edit the notes in /memories, which outlive the conversation."
            return description, _describe_editor(["delete", "rename"], texts)
    return None


def _describe_editor(commands: list[str], texts: dict[str, str]) -> JsonObject:
    """Return the schema of an editor with more commands and text parameters than all editors have."""
    line = {"type": "integer", "description": "Line after which 'insert' adds its text."}
    lines = {
        "type": "array",
        "items": {"type": "integer"},
        "description": "First and last line for 'view'. -1 stands for the last one.",
    }
    properties = {
        "command": {"type": "string", "enum": [*_EDITOR_COMMANDS, *commands]},
        **_texts(_EDITOR_TEXTS | texts),
        "insert_line": line,
        "view_range": lines,
    }
    return {"type": "object", "properties": properties, "required": ["command"]}


def _texts(descriptions: dict[str, str]) -> JsonObject:
    return {name: {"type": "string", "description": text} for name, text in descriptions.items()}


_EDITOR_COMMANDS = ("view", "create", "str_replace", "insert")
_EDITOR_TEXTS = {
    "path": "Absolute path of a file or folder.",
    "file_text": "Content for 'create'.",
    "old_str": "Text that 'str_replace' replaces. It occurs once in the file.",
    "new_str": "Text that replaces it.",
}
_INSERTED = "Text for 'insert'."
_SHELL = (
    "Run a command in a shell that keeps its state between calls.",
    {
        "type": "object",
        "properties": {
            **_texts({"command": "Command to run. Needed unless 'restart' is set."}),
            "restart": {"type": "boolean", "description": "Whether to restart the shell."},
        },
    },
)
