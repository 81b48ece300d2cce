"""Constraints of generated output: from request fields to grammars, without a tokenizer and without torch.

The gateway and the replica share this package, so both refuse the same schemas.
"""

from argosy.constraints.tools import (
    CUSTOM_INPUT,
    TOOL_FIELDS,
    ToolChoice,
    ToolDefinition,
    ToolRequest,
    read_tools,
)

__all__ = [
    "CUSTOM_INPUT",
    "TOOL_FIELDS",
    "ToolChoice",
    "ToolDefinition",
    "ToolRequest",
    "read_tools",
]
