"""Conversion between text and tokens for one model.

A `Tokenizer` encodes prompts and maps tokens to bytes. A `ChatTemplate` renders messages to the prompt text.
`template_probe` finds what it takes (`TemplateCapabilities`), and `message_forms` brings conversations into this form.
The `Detokenizer` turns generated tokens into text incrementally, and a `StopStringMatcher` finds stop strings in it.
Each choice of a response is a `Choice`, which consumes the core's deltas and keeps text, tokens and finish reason.
"""

from argosy.engine.serving.text.chat_template import ChatTemplate
from argosy.engine.serving.text.template_capabilities import TemplateCapabilities
from argosy.engine.serving.text.tokenizer import Tokenizer
