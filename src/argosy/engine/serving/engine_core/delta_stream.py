"""One request in flight: what it asked for, what it was given, and the deltas not yet read."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from argosy.engine.serving.core_messages import Delta, EngineFinishReason, EngineRequest

MAX_CRASHES_WITHOUT_TOKEN = 2
"""A request that was running in this many crashes, without a token between them, caused them."""
MAX_CRASHES = 4
"""A request that was running in this many crashes is not tried again, whatever it got."""


class DeltaStream:
    """The deltas of one request, for one reader; ends after the delta with `finish`.

    The reader asks to be told (`notify`) and takes. Deltas that wait for it are merged into one, so what waits is
    bounded by the tokens that the request may generate. `close` before the end aborts the request.
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
        """Whether a core has it now."""
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
        self._listener: Callable[[], None] = _ignore_delta

    @property
    def id(self) -> str:
        """The request's own id."""
        return self._request.id

    @property
    def is_ended(self) -> bool:
        """Whether its last delta has come (read or not), or it was closed."""
        return self._is_ended

    def set_listener(self, listener: Callable[[], None]) -> None:
        """Call `heard` from now on when there is something to take, or the end has come."""
        self._listener = listener
        if self._pending is not None or self._is_ended:
            listener()

    def drain(self) -> Delta | None:
        """All that came since the last one was taken; None when nothing has."""
        delta, self._pending = self._pending, None
        return delta

    def close(self) -> None:
        """Stop reading; a request that still runs is aborted."""
        self._pending = None
        if not self._is_ended:
            self._is_ended = True
            self._on_close(self)
        self._listener = _ignore_delta

    def add_delta(self, delta: Delta) -> None:
        """Take what the core gave. What was already given in an earlier life of it is left out."""
        if self._is_ended:
            return
        new_logprobs = delta.prompt_logprobs
        if new_logprobs:
            known = max(self._delivered_prompt_logprobs - self._replayed_prompt_logprobs, 0)
            self._replayed_prompt_logprobs += len(new_logprobs)
            new_logprobs = new_logprobs[known:]
            self._delivered_prompt_logprobs = max(
                self._delivered_prompt_logprobs, self._replayed_prompt_logprobs
            )
        if delta.tokens:
            self._crashes_without_token = 0
            self._output += delta.tokens
        self._is_ended = delta.finish_reason is not None
        told = self._has_first_delta
        self._has_first_delta = True
        delta = Delta(
            id=self.id,
            tokens=delta.tokens,
            logprobs=delta.logprobs,
            prompt_logprobs=new_logprobs,
            finish_reason=delta.finish_reason,
            stop_token=delta.stop_token,
            error=delta.error,
            cached_tokens=None if told else delta.cached_tokens,
            queue_s=None if told else delta.queue_s,
            prompt_block_names=b"" if told else delta.prompt_block_names,
        )
        before = self._pending
        self._pending = delta if before is None else _merge(before, delta)
        self._listener()

    def end_with(self, finish_reason: EngineFinishReason, error: str | None = None) -> None:
        """End it from this side of the wire."""
        self.add_delta(Delta(id=self.id, finish_reason=finish_reason, error=error))

    def build_submission(self, now: float, parent_id: str | None) -> EngineRequest | None:
        """What to send to a core: the request, going on from what it has; None: its time is up."""
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
        """Its core died. Whether it may be tried on another one."""
        if self.is_running:
            self.is_running = False
            self._crashes += 1
            self._crashes_without_token += 1
        return (
            self._crashes_without_token < MAX_CRASHES_WITHOUT_TOKEN and self._crashes < MAX_CRASHES
        )


def _merge(before: Delta, after: Delta) -> Delta:
    return msgspec.structs.replace(
        before,
        tokens=before.tokens + after.tokens,
        logprobs=before.logprobs + after.logprobs,
        prompt_logprobs=before.prompt_logprobs + after.prompt_logprobs,
        finish_reason=after.finish_reason,
        stop_token=after.stop_token,
        error=after.error,
    )


def _ignore_delta() -> None:
    """Nobody waits."""
