"""Generation of the choices of one request, which consumes deltas and reports a common end, and its metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Self

import structlog

from argosy.engine.serving.api_server.replica_state import ReplicaState
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.engine.serving.engine_core.in_flight_requests import DeltaStream
from argosy.engine.serving.text.choice import Choice, ParsedChoice
from argosy.protocol import ApiError
from argosy.telemetry import SequenceTimes

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.server")


class Generation:
    """Running choices of one HTTP request, as a context manager.

    Leaving the `with` block aborts the unfinished choices in the core. Output that a slow consumer has not read is
    merged, so memory is bounded by the requested tokens.
    """

    def __init__(
        self,
        engine: EngineClient,
        choices: list[Choice],
        on_delta: Callable[[Choice, Delta], None],
    ) -> None:
        self.choices = choices
        self.tier = choices[0].request.tier
        self._engine = engine
        self._delta_callback = on_delta
        self._streams: dict[int, DeltaStream] = {}
        """Streams of unfinished choices by choice index."""
        self._pending_choices: dict[int, Choice] = {}
        """Choices with unread deltas by choice index."""
        self._error: ApiError | None = None
        self._output_waiter: asyncio.Future[None] | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        """Timer shared by all waits. When it fires early, it is moved to the latest deadline."""
        self._idle_deadline = 0.0

    def __enter__(self) -> Self:
        try:
            for choice in self.choices:  # in order, so that a parent precedes its siblings
                if choice.finish_reason is None:
                    stream = self._streams[choice.index] = self._engine.generate(choice.request)
                    stream.set_listener(partial(self._on_delta_available, choice))
        except BaseException:
            self._close_streams()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._close_streams()

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended and its output was read."""
        return not self._streams

    def fail(self, error: ApiError) -> None:
        """End the request with `error`. Later errors are ignored."""
        if self._error is None:
            self._error = error
        self._wake_waiter()

    async def next_outputs(self, idle_timeout_s: float | None = None) -> list[Choice]:
        """Wait for the choices with new output.

        Returns:
            These choices, or an empty list after `idle_timeout_s` without output.

        Raises:
            ApiError: The error that ended the request.
        """
        if self._streams and not self._pending_choices and self._error is None:
            await self._wait_for_output(idle_timeout_s)
        pending = list(self._pending_choices.values())
        self._pending_choices.clear()
        updated = [choice for choice in pending if self._apply_delta(choice)]
        if self._error is not None and not updated:
            raise self._error
        return updated

    async def wait_complete(self) -> None:
        """Wait until every choice has ended.

        Raises:
            ApiError: The error that ended the request.
        """
        while self._streams:
            await self.next_outputs()
        if self._error is not None:
            raise self._error

    def _apply_delta(self, choice: Choice) -> bool:
        """Apply a choice's unread delta. Return whether there was one."""
        stream = self._streams.get(choice.index)
        try:
            delta = None if stream is None else stream.drain()
            if delta is None:
                return False
            choice.push(delta)
            self._delta_callback(choice, delta)
        except ApiError as error:
            self.fail(error)
            return False
        except Exception:
            log.exception("generation_failed", request=choice.request.id)
            self.fail(ApiError(500, "internal_error", "An internal error ended the request."))
            return False
        if choice.finish_reason is not None:
            self._streams.pop(choice.index).close()
        return True

    def _on_delta_available(self, choice: Choice) -> None:
        if choice.index in self._streams:
            self._pending_choices[choice.index] = choice
            self._wake_waiter()

    async def _wait_for_output(self, idle_timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        if idle_timeout_s is not None:
            self._idle_deadline = loop.time() + idle_timeout_s
            if self._idle_timer is None:
                self._idle_timer = loop.call_at(self._idle_deadline, self._on_idle_timer)
        self._output_waiter = loop.create_future()
        try:
            await self._output_waiter
        finally:
            self._output_waiter = None

    def _on_idle_timer(self) -> None:
        self._idle_timer = None
        loop = asyncio.get_running_loop()
        if self._output_waiter is None:
            return
        if loop.time() < self._idle_deadline:
            self._idle_timer = loop.call_at(self._idle_deadline, self._on_idle_timer)
        else:
            self._wake_waiter()

    def _wake_waiter(self) -> None:
        if self._output_waiter is not None and not self._output_waiter.done():
            self._output_waiter.set_result(None)

    def _close_streams(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._error = None  # a raised error references the waiter's frames and keeps them alive
        while self._streams:
            self._streams.popitem()[1].close()


class RequestMetrics:
    """Records the metrics of one request that was sent to the engine. Times are `time.monotonic` seconds."""

    def __init__(self, replica: ReplicaState, choices: list[Choice], arrived_at: float) -> None:
        self._replica = replica
        self._choices = choices
        self._arrived_at = arrived_at
        now = time.monotonic()
        self._times = [SequenceTimes(arrived_at, now) for _ in choices]
        replica.metrics.choices.observe(replica.metrics.model_label, len(choices))

    def record_delta(self, choice: Choice, delta: Delta) -> None:
        """Record the arrival of a delta."""
        metrics = self._replica.metrics
        times = self._times[choice.index]
        if delta.queue_s is not None:
            times.queued_s = choice.queue_s = delta.queue_s
        if delta.tokens:
            now = time.monotonic()
            if times.first_token_at is None or times.last_token_at is None:
                times.first_token_at = now
                metrics.ttft.observe(metrics.model_label, now - self._arrived_at)
            else:
                metrics.itl.observe(metrics.model_label, now - times.last_token_at)
            times.last_token_at = now

    def record_end(self, reason: str | None) -> None:
        """Record the end of the request. `reason` is set if the request was aborted or failed."""
        metrics = self._replica.metrics
        now = time.monotonic()
        if reason is not None:
            metrics.aborted.add((*metrics.model_label, reason))
        for choice, times in zip(self._choices, self._times, strict=True):
            if isinstance(choice, ParsedChoice):
                incomplete = choice.started_calls - choice.ended_calls
                metrics.record_tool_calls(choice.ended_calls, incomplete)
            times.ended_at = now
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
