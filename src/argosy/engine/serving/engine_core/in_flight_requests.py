"""Delta streams of the requests in flight, which are replayed on the next core after a crash."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

import msgspec
import structlog

from argosy.engine.engine_request import EngineRequest
from argosy.engine.serving.core_messages import AbortRequests, Delta, EngineFinishReason, ToCore

MAX_CRASHES_WITHOUT_TOKEN = 2
"""A request is blamed if it was running in this many crashes without a token between them."""
MAX_CRASHES = 4
"""A request that was running in this many crashes is not retried, whatever it produced."""
PROBATION_TIMEOUT_S = 2.0
"""Wait for a replayed request's first token before the next request is replayed."""
NOT_RESUMED = (
    "the results of this model are not exact, so that the response cannot be resumed; "
    "send the request again"
)
log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.engine")


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
        self.id = request.id
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
        self.is_ended = False
        """Whether the last delta has arrived (read or not), or the stream was closed."""
        self._listener: Callable[[], None] = _ignore_notification

    @property
    def adapter(self) -> str:
        """Digest of the request's adapter; empty without one."""
        return "" if self._request.adapter is None else self._request.adapter.digest

    @property
    def has_output(self) -> bool:
        """Whether the request has generated tokens."""
        return bool(self._output)

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a delta is available or the stream has ended."""
        self._listener = listener
        if self._pending is not None or self.is_ended:
            listener()

    def drain(self) -> Delta | None:
        """Return everything since the last call as one delta, or None if nothing is new."""
        delta, self._pending = self._pending, None
        return delta

    def close(self) -> None:
        """Stop reading. A request that still runs is aborted."""
        self._pending = None
        if not self.is_ended:
            self.is_ended = True
            self._on_close(self)
        self._listener = _ignore_notification

    def add_delta(self, delta: Delta) -> None:
        """Add a delta of the core, which belongs to the stream from now on.

        Prompt log-probabilities that a previous core delivered are dropped.
        """
        if self.is_ended:
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
        self.is_ended = delta.finish_reason is not None
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
    pending.accepted_drafts += later.accepted_drafts
    pending.draft_saved_s += later.draft_saved_s


def _ignore_notification() -> None:
    """Listener of a stream without a reader."""


class InFlightRequests:
    """All requests without a final delta.

    After a crash the surviving requests are replayed one by one, each when the previous one has produced a token. A
    request that crashes cores is therefore the only suspect, and the other requests are not penalised. If the core was
    replaced on purpose, all are replayed at once. Not thread-safe: use it from one event loop.
    """

    def __init__(self, send: Callable[[ToCore], None], on_idle: Callable[[], None]) -> None:
        """Create an empty set of requests.

        `send` sends a message to the current core. `on_idle` is called when the last request has ended.
        """
        self._send = send
        self._on_idle = on_idle
        self._streams: dict[str, DeltaStream] = {}
        self._latest_by_request_id: dict[str, DeltaStream] = {}
        """Latest stream by the request's own id. Several requests may share an id."""
        self._serial_numbers = itertools.count(1)
        self._replay_queue: deque[DeltaStream] = deque()
        self._has_suspects = True
        """Whether a request of the replay queue may have crashed the core."""
        self._probation: DeltaStream | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, request: EngineRequest) -> DeltaStream:
        """Send a request to the core and return its stream. Closing the stream aborts the request."""
        core_request_id = f"{request.id}~{next(self._serial_numbers)}"
        stream = DeltaStream(request, core_request_id, time.monotonic(), self._on_stream_closed)
        parent = (
            self._latest_by_request_id.get(request.parent_id)
            if request.parent_id is not None
            else None
        )
        self._streams[core_request_id] = self._latest_by_request_id[request.id] = stream
        self._submit(stream, parent)
        return stream

    def find_adapters(self) -> tuple[set[str], set[str]]:
        """Return the digests of the adapters that generate tokens, and of others whose requests wait."""
        with_adapter = [stream for stream in self._streams.values() if stream.adapter]
        running = {stream.adapter for stream in with_adapter if stream.has_output}
        return running, {stream.adapter for stream in with_adapter} - running

    def deliver(self, delta: Delta) -> bool:
        """Deliver a delta to its stream. Return whether the delta ended the request."""
        stream = self._streams.get(delta.id)
        if stream is None:  # the request was aborted
            return False
        stream.add_delta(delta)
        if stream.is_ended:
            self._remove(stream)
        if delta.tokens or stream.is_ended:
            self._end_probation(stream)
        return stream.is_ended

    def queue_replay(self, reason: str, *, is_exact: bool, is_crash: bool = True) -> int:
        """Queue the surviving requests for replay after a core exited for `reason`.

        Requests that were running in too many crashes end with an error, and so do those that have output of a model
        that is not exact. Without `is_crash`, no request is suspected.

        Returns:
            The number of queued requests.
        """
        self._probation = None
        self._replay_queue.clear()
        self._has_suspects = is_crash
        for stream in list(self._streams.values()):
            if is_crash and not stream.record_crash():
                log.error("request_quarantined", request=stream.id, reason=reason)
                self._fail(stream, f"the engine failed each time it ran this request ({reason})")
            elif stream.has_output and not is_exact:
                log.error("request_not_resumed", request=stream.id, reason=reason)
                self._fail(stream, f"the engine failed ({reason}), and {NOT_RESUMED}")
            else:
                self._replay_queue.append(stream)
        return len(self._replay_queue)

    def replay_next(self) -> None:
        """Send the next queued request to the core, which must be running."""
        self._probation = None
        while self._replay_queue and self._probation is None:
            stream = self._replay_queue.popleft()
            if not stream.is_ended and self._submit(stream, None) and self._has_suspects:
                self._probation = stream
                asyncio.get_running_loop().call_later(
                    PROBATION_TIMEOUT_S, self._end_probation, stream
                )

    def fail_all(self, message: str) -> None:
        """End every request with an error."""
        for stream in list(self._streams.values()):
            self._fail(stream, message)

    def _fail(self, stream: DeltaStream, message: str) -> None:
        self._remove(stream)
        stream.end_with("error", message)

    def _submit(self, stream: DeltaStream, parent: DeltaStream | None) -> bool:
        """Send a request with its tokens so far. Return False if it has timed out, which ends it."""
        request = stream.build_submission(
            time.monotonic(), parent.core_request_id if parent else None
        )
        if request is None:
            self._remove(stream)
            stream.end_with("timeout")
            return False
        self._send(request)
        return True

    def _end_probation(self, stream: DeltaStream) -> None:
        if stream is self._probation:
            self.replay_next()

    def _on_stream_closed(self, stream: DeltaStream) -> None:
        self._remove(stream)
        if stream.is_running:
            self._send(AbortRequests([stream.core_request_id]))
        self._end_probation(stream)

    def _remove(self, stream: DeltaStream) -> None:
        self._streams.pop(stream.core_request_id, None)
        if not self._streams:
            self._on_idle()
        if self._latest_by_request_id.get(stream.id) is stream:
            del self._latest_by_request_id[stream.id]
