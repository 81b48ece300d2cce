"""One request in flight: what it asked for, what it was given, and the deltas not yet read."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from argosy.engine.serving.core_messages import Delta, EngineRequest, FinishReason

BARREN_CRASHES = 2
"""A request that was running in this many crashes, without a token between them, caused them."""
CRASHES = 4
"""A request that was running in this many crashes is not tried again, whatever it got."""


class DeltaStream:
    """The deltas of one request, for one reader; ends after the delta with `finish`.

    The reader asks to be told (`notify`) and takes. Deltas that wait for it are merged into one, so what waits is
    bounded by the tokens that the request may generate. `close` before the end aborts the request.
    """

    def __init__(
        self,
        request: EngineRequest,
        wire_id: str,
        arrived: float,
        closed: Callable[[DeltaStream], None],
    ) -> None:
        self.wire_id = wire_id
        self.running = False
        """Whether a core has it now."""
        self._request = request
        self._arrived = arrived
        self._closed = closed
        self._output = list(request.output)
        self._prompt_logprobs = 0
        self._repeated = 0
        self._introduced = False
        self._crashes = 0
        self._barren = 0
        self._pending: Delta | None = None
        self._ended = False
        self._heard: Callable[[], None] = _nothing

    @property
    def id(self) -> str:
        """The request's own id."""
        return self._request.id

    @property
    def ended(self) -> bool:
        """Whether its last delta has come (read or not), or it was closed."""
        return self._ended

    def notify(self, heard: Callable[[], None]) -> None:
        """Call `heard` from now on when there is something to take, or the end has come."""
        self._heard = heard
        if self._pending is not None or self._ended:
            heard()

    def take(self) -> Delta | None:
        """All that came since the last one was taken; None when nothing has."""
        delta, self._pending = self._pending, None
        return delta

    def close(self) -> None:
        """Stop reading; a request that still runs is aborted."""
        self._pending = None
        if not self._ended:
            self._ended = True
            self._closed(self)
        self._heard = _nothing

    def feed(self, delta: Delta) -> None:
        """Take what the core gave. What was already given in an earlier life of it is left out."""
        if self._ended:
            return
        new_logprobs = delta.prompt_logprobs
        if new_logprobs:
            known = max(self._prompt_logprobs - self._repeated, 0)
            self._repeated += len(new_logprobs)
            new_logprobs = new_logprobs[known:]
            self._prompt_logprobs = max(self._prompt_logprobs, self._repeated)
        if delta.tokens:
            self._barren = 0
            self._output += delta.tokens
        self._ended = delta.finish is not None
        told = self._introduced
        self._introduced = True
        delta = Delta(
            id=self.id,
            tokens=delta.tokens,
            logprobs=delta.logprobs,
            prompt_logprobs=new_logprobs,
            finish=delta.finish,
            stop_token=delta.stop_token,
            error=delta.error,
            cached_tokens=None if told else delta.cached_tokens,
            queue_s=None if told else delta.queue_s,
            prompt_blocks=b"" if told else delta.prompt_blocks,
        )
        before = self._pending
        self._pending = delta if before is None else _merged(before, delta)
        self._heard()

    def end(self, finish: FinishReason, error: str | None = None) -> None:
        """End it from this side of the wire."""
        self.feed(Delta(id=self.id, finish=finish, error=error))

    def submission(self, now: float, lead: str | None) -> EngineRequest | None:
        """What to send to a core: the request, going on from what it has; None: its time is up."""
        timeout_s = self._request.timeout_s
        if timeout_s is not None:
            timeout_s -= now - self._arrived
            if timeout_s <= 0:
                return None
        self._repeated = 0
        self.running = True
        return msgspec.structs.replace(
            self._request,
            id=self.wire_id,
            output=list(self._output),
            lead=lead,
            timeout_s=timeout_s,
        )

    def survive(self) -> bool:
        """Its core died. Whether it may be tried on another one."""
        if self.running:
            self.running = False
            self._crashes += 1
            self._barren += 1
        return self._barren < BARREN_CRASHES and self._crashes < CRASHES


def _merged(before: Delta, after: Delta) -> Delta:
    return msgspec.structs.replace(
        before,
        tokens=before.tokens + after.tokens,
        logprobs=before.logprobs + after.logprobs,
        prompt_logprobs=before.prompt_logprobs + after.prompt_logprobs,
        finish=after.finish,
        stop_token=after.stop_token,
        error=after.error,
    )


def _nothing() -> None:
    """Nobody waits."""
