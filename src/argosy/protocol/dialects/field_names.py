"""Names of request fields in errors: requests of other APIs run as chats, whose errors name the fields of a chat."""

from __future__ import annotations

import re

import msgspec

from argosy.protocol.dialects.dialect_output import OutputError

_SCHEMA = r"\bresponse_format\.json_schema\.schema\b"
_MAX_TOKENS = r"\bmax_(?:completion_)?tokens\b"  # also without quotes, in remedies
_TOOL = r"\b(tools\[\d+\])\.function"


class FieldNames:
    """Renames the fields of a chat to those of a client's request.

    Args:
        rules: Regular expressions of names or paths, and their replacements. They are applied in this order.
    """

    def __init__(self, *rules: tuple[str, str]) -> None:
        self._rules = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def rename(self, error: OutputError) -> OutputError:
        """Return the error with the client's names."""
        param = None if error.param is None else self._replace(f"'{error.param}'")[1:-1]
        return msgspec.structs.replace(error, message=self._replace(error.message), param=param)

    def _replace(self, text: str) -> str:
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return text


RESPONSES_FIELDS = FieldNames(
    # Without the index, because the chat has other messages than the input has items.
    (r"'messages(?:[\[.][^']*)?'", "'input'"),
    (_SCHEMA, "text.format.schema"),
    (r"\bresponse_format\b", "text.format"),
    (_MAX_TOKENS, "max_output_tokens"),
    (r"'reasoning_effort'", "'reasoning.effort'"),
    (_TOOL, r"\1"),
)
MESSAGES_FIELDS = FieldNames(
    (r"'stop(?=['\[])", "'stop_sequences"),
    (_SCHEMA, "output_config.format.schema"),
    (r"'reasoning_effort'", "'output_config.effort'"),
    (rf"{_TOOL}\.parameters", r"\1.input_schema"),
    (_TOOL, r"\1"),
)
OLLAMA_FIELDS = FieldNames(
    (_SCHEMA, "format"),
    (_MAX_TOKENS, "options.num_predict"),
    (r"'(stop|temperature|top_p|top_k|min_p|seed)(?=['\[])", r"'options.\1"),
    (r"'reasoning_effort'", "'think'"),
)
