"""Parsing of model output into reasoning, content and tool calls, and the formats of model families.

An `OutputFormat` describes a family as data. The function `detect_format` finds it from the chat template, or a setting
names one of `FORMATS`. By it, `prompt_opens_reasoning` sees whether an output begins within reasoning,
`build_output_grammar` makes calls valid by construction, and `OutputParser` turns the pieces of an output into events.
"""

from argosy.engine.serving.output_parsing.events import MarkerToken, Piece
from argosy.engine.serving.output_parsing.format_detection import (
    detect_format,
    prompt_opens_reasoning,
)
from argosy.engine.serving.output_parsing.formats import FORMATS
from argosy.engine.serving.output_parsing.output_format import OutputFormat
from argosy.engine.serving.output_parsing.output_grammar import OutputGrammar, build_output_grammar
from argosy.engine.serving.output_parsing.output_parser import OutputParser
