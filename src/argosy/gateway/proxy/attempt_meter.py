"""Meter of one attempt's stream: reports its first token and its token rate to placement."""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Callable

from argosy.gateway.backends import DeliveredOutput, count_resume_tokens, derive_cache_salt
from argosy.gateway.proxy.upstream_call import UpstreamCall
from argosy.gateway.request_fields import RequestFields
from argosy.policy import CacheHitReport, PromptTokensReport
from argosy.policy.placement import Event, FirstToken, SpeedMeasured
from argosy.protocol import unpack_block_names


class AttemptMeter:
    """Measures one attempt.

    Token rates are reported during the stream, because a slow stream may last an hour.

    Args:
        call: The attempt.
        start_tokens: Output tokens that the client had when the attempt started.
        report: Receives the events.
    """

    def __init__(
        self, call: UpstreamCall, start_tokens: int, report: Callable[[Event], None]
    ) -> None:
        self._call = call
        self._start_tokens = start_tokens
        self._report = report
        self._tokens: int | None = None
        """Output tokens at the last measurement of the rate; None while no rate is measured."""
        self._measured_at = 0.0
        self.has_token = False
        """Whether the attempt's first token has arrived."""
        self.is_client_limited = False
        """Whether client backpressure slowed the replica since the last measurement, which is then discarded."""

    def on_first_token(self, delivered: DeliveredOutput, fields: RequestFields, now: float) -> None:
        """Report the first token, with what the replica reports about the prompt."""
        self.has_token = True
        if fields.choice_count == 1:
            self._tokens, self._measured_at = delivered.output_tokens, now
        decision, replica = self._call.attempt.decision, self._call.replica
        uncached_tokens: int | None = None
        cache_report: CacheHitReport | PromptTokensReport | None = None
        if replica.is_native:  # other servers report usage at the end, if at all
            uncached_tokens = delivered.prompt_tokens - delivered.cached_tokens
            if decision.block_keys:
                cache_report = CacheHitReport(
                    decision.block_keys,
                    decision.cached_blocks,
                    decision.prompt_blocks,
                    delivered.prompt_tokens - count_resume_tokens(fields),
                    delivered.cached_tokens,
                    unpack_block_names(a2b_base64(delivered.prompt_blocks)),
                )
        elif delivered.prompt_token_ids is not None and decision.block_keys:
            salt = derive_cache_salt(fields, replica.adapter)
            cache_report = PromptTokensReport(
                decision.block_keys, decision.prompt_blocks, salt, delivered.prompt_token_ids
            )
        self._report(
            FirstToken(
                self._call.attempt,
                now,
                uncached_tokens,
                is_resumed=self._start_tokens > 0,
                cache_report=cache_report,
            )
        )

    def measure(self, tokens: int, now: float) -> None:
        """Report the rate since the last call, at `tokens` output tokens now."""
        if self._tokens is None:
            return
        duration_s = now - self._measured_at
        if duration_s > 0 and not self.is_client_limited:
            self._report(SpeedMeasured(self._call.attempt, tokens - self._tokens, duration_s))
        self._tokens, self._measured_at = tokens, now
