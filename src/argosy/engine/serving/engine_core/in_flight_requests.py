"""The requests in flight: each with the stream of its deltas, taken to the next core when one dies."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable

import structlog

from argosy.engine.serving.core_messages import Abort, Delta, EngineRequest, ToCore
from argosy.engine.serving.engine_core.delta_stream import DeltaStream

TRIAL_S = 2.0
"""How long the next survivor of a crash waits for the one before it to get a token."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.engine")


class InFlight:
    """Every request whose last delta has not come yet.

    The survivors of a crash are resumed one by one, each when the one before it got a token. So a
    request that kills cores is alone under suspicion, and its neighbours are spared. Belongs to one
    event loop.
    """

    def __init__(self, send: Callable[[ToCore], None]) -> None:
        """`send` tells the core that is up."""
        self._send = send
        self._streams: dict[str, DeltaStream] = {}
        self._latest: dict[str, DeltaStream] = {}
        """By the request's own id, which several may share."""
        self._serial = itertools.count(1)
        self._suspects: deque[DeltaStream] = deque()
        self._on_trial: DeltaStream | None = None

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, request: EngineRequest) -> DeltaStream:
        """Send a request to the core; closing its stream aborts it."""
        wire_id = f"{request.id}~{next(self._serial)}"
        stream = DeltaStream(request, wire_id, time.monotonic(), self._closed)
        lead = self._latest.get(request.lead) if request.lead is not None else None
        self._streams[wire_id] = self._latest[request.id] = stream
        self._submit(stream, lead)
        return stream

    def deliver(self, delta: Delta) -> bool:
        """Give a request what the core gave; whether that ended it."""
        stream = self._streams.get(delta.id)
        if stream is None:  # aborted meanwhile
            return False
        stream.feed(delta)
        if stream.ended:
            self._forget(stream)
        if delta.tokens or stream.ended:
            self._end_trial(stream)
        return stream.ended

    def survive(self, reason: str) -> int:
        """The core died of `reason`: how many requests the next one is to go on with; others end."""
        self._on_trial = None
        self._suspects.clear()
        for stream in list(self._streams.values()):
            if stream.survive():
                self._suspects.append(stream)
            else:
                log.error("request_given_up", request=stream.id, reason=reason)
                self._forget(stream)
                stream.end("error", f"the engine failed each time it ran this request ({reason})")
        return len(self._suspects)

    def resume(self) -> None:
        """A core is up: send it the next survivor."""
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            stream = self._suspects.popleft()
            if not stream.ended and self._submit(stream, None):
                self._on_trial = stream
                asyncio.get_running_loop().call_later(TRIAL_S, self._end_trial, stream)

    def end_all(self, message: str) -> None:
        """End every request with an error."""
        for stream in list(self._streams.values()):
            self._forget(stream)
            stream.end("error", message)

    def _submit(self, stream: DeltaStream, lead: DeltaStream | None) -> bool:
        """Send it as it stands; False: its time is up, and it has ended."""
        request = stream.submission(time.monotonic(), lead.wire_id if lead else None)
        if request is None:
            self._forget(stream)
            stream.end("timeout")
            return False
        self._send(request)
        return True

    def _end_trial(self, stream: DeltaStream) -> None:
        if stream is self._on_trial:
            self.resume()

    def _closed(self, stream: DeltaStream) -> None:
        self._forget(stream)
        if stream.running:
            self._send(Abort([stream.wire_id]))
        self._end_trial(stream)

    def _forget(self, stream: DeltaStream) -> None:
        self._streams.pop(stream.wire_id, None)
        if self._latest.get(stream.id) is stream:
            del self._latest[stream.id]
