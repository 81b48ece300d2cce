"""Measurements of replicas by their attempts: when tokens arrive, and which prompts are cached."""

from __future__ import annotations

from argosy.policy.placement.attempt import Attempt
from argosy.policy.prefix_cache_index import CacheHitReport, PromptTokensReport


def record_first_token(
    attempt: Attempt,
    received_at: float,
    uncached_tokens: int | None = None,
    cache_report: CacheHitReport | PromptTokensReport | None = None,
    *,
    is_resumed: bool = False,
) -> None:
    """Record the first token of an attempt: the end of its prefill, and what the replica had in its cache.

    Args:
        attempt: The attempt.
        received_at: When the token arrived.
        uncached_tokens: Tokens of the prompt that the replica computed, if it reports them.
        cache_report: What the replica reports about its cache.
        is_resumed: Whether the stream continues an earlier one, so that its delay says nothing about the prompt.
    """
    if attempt.is_ended:
        return
    replica, record, chosen = attempt.replica, attempt.record, attempt.chosen
    record.first_token_at = received_at
    replica.on_prefill_done(chosen.uncached_tokens, record.chosen_at)
    if record.sent_at is None or is_resumed:
        return
    replica.on_first_token(
        received_at - record.sent_at,
        chosen.uncached_tokens if uncached_tokens is None else uncached_tokens,
        received_at,
    )
    if isinstance(cache_report, CacheHitReport):
        replica.prefix_index.on_cache_hit_report(cache_report)
    elif cache_report is not None:
        replica.prefix_index.on_prompt_tokens_report(cache_report)
