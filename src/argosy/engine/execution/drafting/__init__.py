"""Drafters, which guess the next tokens of sequences, so that one step can verify several.

A `Drafter` decides nothing about an output: a step samples the token at each position as it would without drafts, and a
draft that differs costs only time.
"""

from collections.abc import Callable

import structlog

from argosy.engine.execution.drafting.drafter import Draft, Drafter
from argosy.engine.execution.drafting.forced_tokens import ForcedTokensDrafter
from argosy.engine.execution.drafting.prediction import PredictionDrafter
from argosy.engine.execution.drafting.prompt_lookup import PromptLookupDrafter
from argosy.native import NativeUnavailableError

log = structlog.get_logger(__name__)


def create_drafters(find_forced_tokens: Callable[[int], list[int]]) -> list[Drafter]:
    """Return the drafters of a core, the most reliable ones first.

    `find_forced_tokens` maps the row of a sequence to the tokens that its grammar forces.
    """
    drafters: list[Drafter] = [ForcedTokensDrafter(find_forced_tokens), PredictionDrafter()]
    try:
        drafters.append(PromptLookupDrafter())
    except NativeUnavailableError as error:
        log.warning("drafter_unavailable", drafter=PromptLookupDrafter.name, reason=str(error))
    return drafters
