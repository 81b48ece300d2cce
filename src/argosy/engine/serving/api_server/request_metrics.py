"""What one request tells the metrics: its choices' stations on the way, and how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from argosy.engine.serving.api_server.replica_state import Replica
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.text.choice import Choice
from argosy.protocol import ApiError
from argosy.telemetry import SequenceTimes


@dataclass(slots=True)
class _Timeline:
    queued_s: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Recorder:
    """Observes one request that went to the engine. Times are `time.monotonic` seconds."""

    def __init__(self, replica: Replica, choices: list[Choice], arrived: float) -> None:
        self._replica = replica
        self._choices = choices
        self._arrived = arrived
        self._submitted = time.monotonic()
        self._timelines = [_Timeline() for _ in choices]
        replica.metrics.accepted(len(choices))

    def progress(self, choice: Choice, delta: Delta) -> None:
        """A delta came."""
        metrics = self._replica.metrics
        line = self._timelines[choice.index]
        if delta.queue_s is not None:
            line.queued_s = delta.queue_s
        if delta.tokens:
            now = time.monotonic()
            if line.first_token is None or line.last_token is None:
                line.first_token = now
                metrics.first_token(now - self._arrived)
            else:
                metrics.next_tokens(now - line.last_token)
            line.last_token = now

    def ended(self, reason: str | None) -> None:
        """The request is over; `reason` says why when it did not run to its end."""
        metrics = self._replica.metrics
        now = time.monotonic()
        if reason is not None:
            metrics.aborted(reason)
        for choice, line in zip(self._choices, self._timelines, strict=True):
            times = SequenceTimes(
                arrived=self._arrived,
                queued_s=line.queued_s,
                submitted=self._submitted,
                first_token=line.first_token,
                last_token=line.last_token,
                ended=now,
            )
            metrics.sequence_ended(
                choice.finish or ("error" if reason in _FAULTS else "cancelled"),
                times,
                prompt_tokens=len(choice.prompt.token_ids),
                output_tokens=choice.generated,
                max_tokens=choice.request.params.max_tokens,
            )


_FAULTS = frozenset({"engine_error", "engine_unavailable", "internal_error"})
_REASONS = _FAULTS | {"client_closed_request", "draining", "cancelled", "timeout", "slow_reader"}


def reason_of(error: BaseException) -> str:
    """The bounded name under which `error` is counted."""
    if isinstance(error, ApiError):
        return error.code if error.code in _REASONS else "other"
    return "internal_error"
