"""Measurements of replicas by their attempts: when tokens arrive, how fast, and which prompts are cached."""

from __future__ import annotations

from argosy.policy.placement.messages import AttemptSent, FirstToken, SpeedMeasured
from argosy.policy.prefix_cache_index import CacheHitReport


def record_sent(event: AttemptSent, now: float) -> None:
    """Record when an attempt's request is sent."""
    record = event.attempt.record
    record.sent_at = now
    if event.is_restarted:
        record.delivered_tokens = event.request.output_tokens = 0


def record_first_token(event: FirstToken, now: float) -> None:
    """Record the first token of an attempt: the end of its prefill, and what the replica had in its cache."""
    del now
    attempt, record = event.attempt, event.attempt.record
    if attempt.is_ended:
        return
    replica, decision = attempt.replica, attempt.decision
    record.first_token_at = event.received_at
    replica.on_prefill_done(decision.uncached_tokens, record.chosen_at)
    if record.sent_at is None or event.is_resumed:
        return
    uncached = event.uncached_tokens
    replica.on_first_token(
        event.received_at - record.sent_at,
        decision.uncached_tokens if uncached is None else uncached,
        event.received_at,
    )
    report = event.cache_report
    if isinstance(report, CacheHitReport):
        replica.prefix_index.on_cache_hit_report(report)
    elif report is not None:
        replica.prefix_index.on_prompt_tokens_report(report)


def record_speed(event: SpeedMeasured, now: float) -> None:
    """Record the token rate of a replica."""
    del now
    event.attempt.replica.on_tokens_streamed(event.tokens, event.duration_s)
