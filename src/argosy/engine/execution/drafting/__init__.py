"""Drafters, which guess the next tokens of sequences, so that one step can verify several.

A `Drafter` decides nothing about an output: a step samples the token at each position as it would without drafts, and a
draft that differs costs only time.
"""

from collections.abc import Callable, Collection

import structlog

from argosy.engine.execution.drafting.domain_window import DomainWindowDrafter
from argosy.engine.execution.drafting.drafter import Draft, Drafter
from argosy.engine.execution.drafting.forced_tokens import ForcedTokensDrafter
from argosy.engine.execution.drafting.prediction import PredictionDrafter
from argosy.engine.execution.drafting.prompt_lookup import PromptLookupDrafter
from argosy.native import NativeUnavailableError

log = structlog.get_logger(__name__)


def create_drafters(
    methods: Collection[str],
    find_forced_tokens: Callable[[int], list[int]],
    *,
    min_lookup_match: int,
) -> list[Drafter]:
    """Return the drafters with the given names, the most reliable ones first.

    `find_forced_tokens` maps the row of a sequence to the tokens that its grammar forces. Prompt lookup drafts after
    `min_lookup_match` equal tokens or more.
    """
    create_by_name: dict[str, Callable[[], Drafter]] = {
        ForcedTokensDrafter.name: lambda: ForcedTokensDrafter(find_forced_tokens),
        PredictionDrafter.name: PredictionDrafter,
        PromptLookupDrafter.name: lambda: PromptLookupDrafter(min_lookup_match),
        DomainWindowDrafter.name: DomainWindowDrafter,
    }
    drafters = []
    for name, create in create_by_name.items():
        try:
            if name in methods:
                drafters.append(create())
        except NativeUnavailableError as error:
            log.warning("drafter_unavailable", drafter=name, reason=str(error))
    return drafters
