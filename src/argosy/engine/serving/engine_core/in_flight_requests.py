"""The requests in flight: each with the stream of its deltas, taken to the next core when one dies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

import structlog

from argosy.engine.serving.core_messages import AbortRequests, Delta, EngineRequest, ToCore
from argosy.engine.serving.engine_core.delta_stream import DeltaStream

PROBATION_TIMEOUT_S = 2.0
"""How long the next survivor of a crash waits for the one before it to get a token."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.engine")


class InFlightRequests:
    """Every request whose last delta has not come yet.

    The survivors of a crash are resumed one by one, each when the one before it got a token. So a
    request that kills cores is alone under suspicion, and its neighbours are spared. Belongs to one
    event loop.
    """

    def __init__(self, send: Callable[[ToCore], None]) -> None:
        """`send` tells the core that is up."""
        self._send = send
        self._streams: dict[str, DeltaStream] = {}
        self._latest_by_request_id: dict[str, DeltaStream] = {}
        """By the request's own id, which several may share."""
        self._serial_numbers = itertools.count(1)
        self._replay_queue: deque[DeltaStream] = deque()
        self._probation: DeltaStream | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, request: EngineRequest) -> DeltaStream:
        """Send a request to the core; closing its stream aborts it."""
        wire_id = f"{request.id}~{next(self._serial_numbers)}"
        stream = DeltaStream(request, wire_id, time.monotonic(), self._on_stream_closed)
        lead = (
            self._latest_by_request_id.get(request.parent_id)
            if request.parent_id is not None
            else None
        )
        self._streams[wire_id] = self._latest_by_request_id[request.id] = stream
        self._submit(stream, lead)
        return stream

    def deliver(self, delta: Delta) -> bool:
        """Give a request what the core gave; whether that ended it."""
        stream = self._streams.get(delta.id)
        if stream is None:  # aborted meanwhile
            return False
        stream.add_delta(delta)
        if stream.is_ended:
            self._remove(stream)
        if delta.tokens or stream.is_ended:
            self._end_probation(stream)
        return stream.is_ended

    def queue_replay(self, reason: str) -> int:
        """The core died of `reason`: how many requests the next one is to go on with; others end."""
        self._probation = None
        self._replay_queue.clear()
        for stream in list(self._streams.values()):
            if stream.record_crash():
                self._replay_queue.append(stream)
            else:
                log.error("request_quarantined", request=stream.id, reason=reason)
                self._remove(stream)
                stream.end_with(
                    "error", f"the engine failed each time it ran this request ({reason})"
                )
        return len(self._replay_queue)

    def replay_next(self) -> None:
        """A core is up: send it the next survivor."""
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
            self._remove(stream)
            stream.end_with("error", message)

    def _submit(self, stream: DeltaStream, parent: DeltaStream | None) -> bool:
        """Send it as it stands; False: its time is up, and it has ended."""
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
