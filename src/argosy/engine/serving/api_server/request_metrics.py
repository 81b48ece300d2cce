"""Metrics of one request: latencies of its choices and how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from argosy.engine.serving.api_server.replica_state import ReplicaState
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.text.choice import Choice
from argosy.engine.serving.text.parsed_choice import ParsedChoice
from argosy.protocol import ApiError
from argosy.telemetry import SequenceTimes


@dataclass(slots=True)
class _SequenceTimeline:
    queued_s: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None


class RequestMetrics:
    """Records the metrics of one request that was sent to the engine. Times are `time.monotonic` seconds."""

    def __init__(self, replica: ReplicaState, choices: list[Choice], arrived_at: float) -> None:
        self._replica = replica
        self._choices = choices
        self._arrived_at = arrived_at
        self._submitted_at = time.monotonic()
        self._timelines = [_SequenceTimeline() for _ in choices]
        replica.metrics.record_accepted(len(choices))

    def record_delta(self, choice: Choice, delta: Delta) -> None:
        """Record the arrival of a delta."""
        metrics = self._replica.metrics
        timeline = self._timelines[choice.index]
        if delta.queue_s is not None:
            timeline.queued_s = delta.queue_s
        if delta.tokens:
            now = time.monotonic()
            if timeline.first_token_at is None or timeline.last_token_at is None:
                timeline.first_token_at = now
                metrics.record_first_token(now - self._arrived_at)
            else:
                metrics.record_inter_token_gap(now - timeline.last_token_at)
            timeline.last_token_at = now

    def record_end(self, reason: str | None) -> None:
        """Record the end of the request. `reason` is set if the request was aborted or failed."""
        metrics = self._replica.metrics
        now = time.monotonic()
        if reason is not None:
            metrics.record_abort(reason)
        for choice, timeline in zip(self._choices, self._timelines, strict=True):
            if isinstance(choice, ParsedChoice):
                incomplete = choice.started_calls - choice.ended_calls
                metrics.record_tool_calls(choice.ended_calls, incomplete)
            times = SequenceTimes(
                arrived_at=self._arrived_at,
                queued_s=timeline.queued_s,
                submitted_at=self._submitted_at,
                first_token_at=timeline.first_token_at,
                last_token_at=timeline.last_token_at,
                ended_at=now,
            )
            failure = "error" if reason in _ENGINE_ERROR_CODES else "cancelled"
            metrics.record_sequence_end(
                choice.early_stop or choice.finish_reason or failure,
                times,
                prompt_tokens=len(choice.prompt.token_ids),
                output_tokens=choice.generated_tokens,
                max_tokens=choice.request.max_tokens,
            )


_ENGINE_ERROR_CODES = frozenset({"engine_error", "engine_unavailable", "internal_error"})
_ABORT_REASONS = _ENGINE_ERROR_CODES | {
    "client_closed_request",
    "draining",
    "cancelled",
    "timeout",
    "slow_reader",
}


def abort_reason(error: BaseException) -> str:
    """Return the metric label for `error`, from a bounded set."""
    if isinstance(error, ApiError):
        return error.code if error.code in _ABORT_REASONS else "other"
    return "internal_error"
