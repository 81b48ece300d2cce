"""Prompt templates: what they consist of, and how they are checked, compiled and rendered.

A `PromptContent` is one version of a prompt. `compile_prompt` checks its templates and returns a `CompiledPrompt`,
whose `render` puts values in the places of variables. Templates are those of Jinja with expressions that only read
plain data, and both steps are bounded in time and memory, so that authors need not be trusted.
"""

from argosy.policy.prompts.prompt_content import (
    MAX_PROMPT_CHARS,
    PARAMETERS,
    REQUEST_MESSAGES,
    PromptContent,
    PromptMessage,
)
from argosy.policy.prompts.prompt_errors import PromptError
from argosy.policy.prompts.prompt_renderer import (
    CompiledPrompt,
    RenderedPrompt,
    compile_prompt,
    decode_prompt,
    is_compiled,
)
