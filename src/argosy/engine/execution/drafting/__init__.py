"""Drafters, which guess the next tokens of sequences, so that one step can verify several.

A `Drafter` decides nothing about an output: a step samples the token at each position as it would without drafts, and a
draft that differs costs only time.
"""

from argosy.engine.execution.drafting.drafter import Drafter
from argosy.engine.execution.drafting.prompt_lookup import PromptLookupDrafter
