# ruff: noqa: RUF001 - DeepSeek's markers contain full-width bars
"""Reasoning that a rendered prompt has opened."""

from __future__ import annotations

import re

from argosy.engine.serving.output_parsing.output_format import OutputFormat

_TURN_MARKER = re.compile(
    r"<[|｜]|[|｜]>|</?s>|\[/?(?:INST|SYSTEM_PROMPT)\]|<(?:start|end)_of_turn>", re.IGNORECASE
)


def prompt_opens_reasoning(output_format: OutputFormat, prompt_text: str) -> bool:
    """Return whether the prompt ends within a reasoning block.

    An opening marker in an earlier message does not count, because the marker of a turn follows it.
    """
    for block in output_format.thinking:
        before, opener, rest = prompt_text.rpartition(block.open)
        del before
        if opener and block.close not in rest and _TURN_MARKER.search(rest) is None:
            return True
    return False
