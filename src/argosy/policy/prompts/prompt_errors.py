"""Errors of prompt templates."""

from __future__ import annotations


class PromptError(ValueError):
    """Raised if a template is not accepted, or cannot be rendered with some values. The message says what to change."""
