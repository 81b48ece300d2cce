"""Delta stream of one request: its output so far, and the deltas that were not read yet."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from argosy.engine.engine_request import EngineRequest
from argosy.engine.serving.core_messages import Delta, EngineFinishReason

MAX_CRASHES_WITHOUT_TOKEN = 2
"""A request is blamed if it was running in this many crashes without a token between them."""
MAX_CRASHES = 4
"""A request that was running in this many crashes is not retried, whatever it produced."""


class DeltaStream:
    """Deltas of one request, for one reader. Ends after the delta with `finish_reason`.

    The reader registers a listener with `set_listener` and then calls `drain`. Unread deltas are merged into one, so
    memory is bounded by the tokens that the request may generate. Closing the stream before the end aborts the request.
    """

    def __init__(
        self,
        request: EngineRequest,
        core_request_id: str,
        arrived_at: float,
        on_close: Callable[[DeltaStream], None],
    ) -> None:
        self.core_request_id = core_request_id
        self.is_running = False
        """Whether a core has the request now."""
        self._request = request
        self._arrived_at = arrived_at
        self._on_close = on_close
        self._output = list(request.resumed_tokens)
        self._delivered_prompt_logprobs = 0
        self._replayed_prompt_logprobs = 0
        self._has_first_delta = False
        self._crashes = 0
        self._crashes_without_token = 0
        self._pending: Delta | None = None
        self._is_ended = False
        self._listener: Callable[[], None] = _ignore_notification

    @property
    def id(self) -> str:
        """The request's own id."""
        return self._request.id

    @property
    def is_ended(self) -> bool:
        """Whether the last delta has arrived (read or not), or the stream was closed."""
        return self._is_ended

    @property
    def has_output(self) -> bool:
        """Whether the request has generated tokens."""
        return bool(self._output)

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a delta is available or the stream has ended."""
        self._listener = listener
        if self._pending is not None or self._is_ended:
            listener()

    def drain(self) -> Delta | None:
        """Return everything since the last call as one delta, or None if nothing is new."""
        delta, self._pending = self._pending, None
        return delta

    def close(self) -> None:
        """Stop reading. A request that still runs is aborted."""
        self._pending = None
        if not self._is_ended:
            self._is_ended = True
            self._on_close(self)
        self._listener = _ignore_notification

    def add_delta(self, delta: Delta) -> None:
        """Add a delta of the core, which belongs to the stream from now on.

        Prompt log-probabilities that a previous core delivered are dropped.
        """
        if self._is_ended:
            return
        delta.id = self.id
        if delta.prompt_logprobs:
            duplicates = max(self._delivered_prompt_logprobs - self._replayed_prompt_logprobs, 0)
            self._replayed_prompt_logprobs += len(delta.prompt_logprobs)
            del delta.prompt_logprobs[:duplicates]
            self._delivered_prompt_logprobs = max(
                self._delivered_prompt_logprobs, self._replayed_prompt_logprobs
            )
        if delta.tokens:
            self._crashes_without_token = 0
            self._output += delta.tokens
        self._is_ended = delta.finish_reason is not None
        if self._has_first_delta:  # another core starts the request again
            delta.cached_tokens = delta.queue_s = None
            delta.prompt_block_names = b""
        self._has_first_delta = True
        if self._pending is None:
            self._pending = delta
        else:
            _append(self._pending, delta)
        self._listener()

    def end_with(self, finish_reason: EngineFinishReason, error: str | None = None) -> None:
        """End the request without a message from the core."""
        self.add_delta(Delta(id=self.id, finish_reason=finish_reason, error=error))

    def build_submission(self, now: float, parent_id: str | None) -> EngineRequest | None:
        """Build the request for a core, continuing after the tokens it has so far.

        Returns:
            The request, or None if it has timed out.
        """
        timeout_s = self._request.timeout_s
        if timeout_s is not None:
            timeout_s -= now - self._arrived_at
            if timeout_s <= 0:
                return None
        self._replayed_prompt_logprobs = 0
        self.is_running = True
        return msgspec.structs.replace(
            self._request,
            id=self.core_request_id,
            resumed_tokens=list(self._output),
            parent_id=parent_id,
            timeout_s=timeout_s,
        )

    def record_crash(self) -> bool:
        """Record that the request's core exited. Return whether the request may be retried."""
        if self.is_running:
            self.is_running = False
            self._crashes += 1
            self._crashes_without_token += 1
        return (
            self._crashes_without_token < MAX_CRASHES_WITHOUT_TOKEN and self._crashes < MAX_CRASHES
        )


def _append(pending: Delta, later: Delta) -> None:
    pending.tokens += later.tokens
    pending.logprobs += later.logprobs
    pending.prompt_logprobs += later.prompt_logprobs
    pending.finish_reason, pending.stop_token = later.finish_reason, later.stop_token
    pending.error, pending.error_code = later.error, later.error_code
    pending.pooled = later.pooled


def _ignore_notification() -> None:
    """Listener of a stream without a reader."""
