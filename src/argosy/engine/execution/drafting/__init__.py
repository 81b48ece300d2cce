"""Drafters, which guess the next tokens of sequences, so that one step can verify several.

A `Drafter` decides nothing about an output: a step samples the token at each position as it would without drafts, and a
draft that differs costs only time.
"""

import structlog

from argosy.engine.execution.drafting.drafter import Draft, Drafter
from argosy.engine.execution.drafting.prediction import PredictionDrafter
from argosy.engine.execution.drafting.prompt_lookup import PromptLookupDrafter
from argosy.native import NativeUnavailableError

log = structlog.get_logger(__name__)


def create_drafters() -> list[Drafter]:
    """Return the drafters of a core, the most reliable ones first."""
    drafters: list[Drafter] = [PredictionDrafter()]
    try:
        drafters.append(PromptLookupDrafter())
    except NativeUnavailableError as error:
        log.warning("drafter_unavailable", drafter=PromptLookupDrafter.name, reason=str(error))
    return drafters
