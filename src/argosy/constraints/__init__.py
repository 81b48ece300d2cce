"""Constraints of generated output: from request fields to grammars, without a tokenizer and without torch.

The gateway and the replica share this package, so both refuse the same schemas. The function `read_constraint` finds
the constraint of a request, in every spelling that clients use. The function `schema_grammar` compiles one JSON schema,
also for the parameters of a tool. Both return an `OutputConstraint`, whose grammar text is all that an engine needs.
The function `check_grammar` compiles such a text as an engine would. The function `validate_document` checks a finished
document against the parts of a schema that the grammar does not enforce.
"""

from argosy.constraints.grammar_check import check_grammar
from argosy.constraints.grammar_text import input_grammars
from argosy.constraints.limits import MAX_GRAMMAR_TEXT_BYTES, PARSER_LIMITS
from argosy.constraints.output_constraint import (
    JsonWhitespace,
    OutputConstraint,
    Relaxation,
    validate_document,
)
from argosy.constraints.request_constraint import read_constraint
from argosy.constraints.schema_compiler import schema_grammar
from argosy.constraints.schema_vocabulary import json_type, resolve_local, schema_types
from argosy.constraints.tools import (
    CUSTOM_INPUT,
    TOOL_FIELDS,
    Tool,
    ToolChoice,
    ToolChoiceMode,
    ToolRequest,
    read_tools,
)
