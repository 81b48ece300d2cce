"""Requests in flight with their delta streams, which are replayed on the next core after a crash."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

import structlog

from argosy.engine.engine_request import EngineRequest
from argosy.engine.serving.core_messages import AbortRequests, Delta, ToCore
from argosy.engine.serving.engine_core.delta_stream import DeltaStream

PROBATION_TIMEOUT_S = 2.0
"""Wait for a replayed request's first token before the next request is replayed."""
NOT_RESUMED = (
    "the results of this model are not exact, so that the response cannot be resumed; "
    "send the request again"
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.engine")


class InFlightRequests:
    """All requests without a final delta.

    After a crash the surviving requests are replayed one by one, each when the previous one has produced a token. A
    request that crashes cores is therefore the only suspect, and the other requests are not penalised. Not thread-safe:
    use it from one event loop.
    """

    def __init__(self, send: Callable[[ToCore], None]) -> None:
        """Create an empty set of requests. `send` sends a message to the current core."""
        self._send = send
        self._streams: dict[str, DeltaStream] = {}
        self._latest_by_request_id: dict[str, DeltaStream] = {}
        """Latest stream by the request's own id. Several requests may share an id."""
        self._serial_numbers = itertools.count(1)
        self._replay_queue: deque[DeltaStream] = deque()
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

    def queue_replay(self, reason: str, *, is_exact: bool) -> int:
        """Queue the surviving requests for replay after a core exited for `reason`.

        Requests that were running in too many crashes end with an error, and so do those that have output of a model
        that is not exact.

        Returns:
            The number of queued requests.
        """
        self._probation = None
        self._replay_queue.clear()
        for stream in list(self._streams.values()):
            if not stream.record_crash():
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
            if not stream.is_ended and self._submit(stream, None):
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
        if self._latest_by_request_id.get(stream.id) is stream:
            del self._latest_by_request_id[stream.id]
