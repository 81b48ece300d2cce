"""One answer under way: fed by one replica after another until it is whole, the client noticing a pause at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from argosy.gateway.backends import (
    BackendAdapter,
    ReportedUsage,
    ResponseIdentity,
    StreamContinuation,
    StreamParser,
    count_resume_tokens,
    estimate_response_tokens,
    parse_finish_reasons,
    parse_usage,
)
from argosy.gateway.pool import ReplicaEndpoint
from argosy.gateway.proxy.attempts import UpstreamRefusedError
from argosy.gateway.proxy.fast_path import SpliceProgress
from argosy.gateway.proxy.fast_path_switch import FastPathSwitch
from argosy.gateway.proxy.final_events import build_final_events
from argosy.gateway.proxy.response_writers import ResponseWriter
from argosy.gateway.proxy.token_rate_meter import TokenRateMeter
from argosy.gateway.request_context import FilterState, RequestContext
from argosy.gateway.upstream import UpstreamError, UpstreamResponse
from argosy.policy import AttemptOutcome, classify_status, weighted_tokens


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    """How long a stream may be silent, in seconds."""

    first_token_timeout_s: float
    """The replica, before its first token: then it counts as stalled."""
    stream_idle_timeout_s: float
    """The same, after it."""
    sse_keepalive_interval_s: float
    """Towards the client: then it gets a comment."""
    slow_reader_timeout_s: float
    """The client, while much waits for it to be taken: then it is cut off."""


class ResponseRelay:
    """Watches the client and passes on what its replica gives, piece by piece, without a task between.

    The `visits` of the stages are told of each piece that brought tokens, once it was passed on; a finish reason that
    one gives ends the answer there. `charge` is called each second, `leave` when nobody is to work for it any more.
    """

    def __init__(
        self,
        context: RequestContext,
        writer: ResponseWriter,
        continuation: StreamContinuation,
        *,
        filter_states: Sequence[FilterState],
        charge: Callable[[float], None],
        cancel: Callable[[], object],
        fast_path_switch: FastPathSwitch | None,
    ) -> None:
        self.client_disconnected = False
        self.disconnected_as_slow = False
        """The client has gone because it took nothing, and was cut off."""
        self.early_finish_reason: str | None = None
        """The finish reason with which a limit ended it, or its deadline."""
        self.aborted = False
        """It has called `leave`."""
        self._context = context
        self._delivered = context.delivered
        self._writer = writer
        self._continuation = continuation
        self._filter_states = filter_states
        self._charge = charge
        self._cancel = cancel
        self._fast_path_switch = fast_path_switch
        self._output_tokens = 0
        self._attempt_start_tokens = 0
        """Output tokens that the client had when the attempt began."""
        self._first_token_at: float | None = None
        """When the attempt's first token came."""
        self._token_rate: TokenRateMeter | None = None
        self._charged_tokens = 0.0
        self._client_backpressure = False
        self._backpressure_since: float | None = None
        self._response: UpstreamResponse | None = None
        self._replica: ReplicaEndpoint | None = None
        self._parser: StreamParser | None = None
        self._progress_at = 0.0
        """When the answer last got on. A comment says that a server lives, not that it gets on."""
        self._keepalive_at = 0.0
        """When the client was last given a comment."""

    def attach_upstream(
        self, response: UpstreamResponse, replica: ReplicaEndpoint, parser: StreamParser
    ) -> None:
        """Pass on what `reader` makes of what `attempt` gives; `out` must have begun."""
        self._response = response
        self._replica = replica
        self._attempt_start_tokens = self._output_tokens
        self._first_token_at = self._token_rate = None
        self._progress_at = response.last_activity_at
        self._parser = parser
        if self._client_backpressure:
            response.pause_reading()
        response.stream_body(self._on_data)

    def finish_upstream(self) -> None:
        """Pass on the end of the attempt that has ended. Raises UpstreamError when that was no answer's end.

        RefusedError when the server has only now said that it does not take the request.
        """
        self._measure_rate()
        self._response = None
        self.charge_delivered()
        if self.early_finish_reason is not None:
            return  # its end was there already
        reader = self._parser
        assert reader is not None  # noqa: S101 - the attempt has fed it
        missing = b"" if reader.is_done else self._synthesize_tail(reader)
        self._record_prompt_tokens()
        try:
            self._write(missing or reader.flush())
        except ValueError as error:
            raise UpstreamError(f"the end of its stream cannot be read ({error})") from error
        self._context.pool.on_completed(self._output_tokens / self._context.fields.choice_count)

    def _synthesize_tail(self, reader: StreamParser) -> bytes:
        """What is still to be told of an answer whose stream ended without `[DONE]`. Raises as `finish` does."""
        whole = self._continuation.is_finished and not reader.failure
        ending = self.build_tail() if whole else None
        if ending is not None:
            return ending
        if (
            self._output_tokens == self._attempt_start_tokens
            and classify_status(reader.failure_status or 500) is not AttemptOutcome.FAILURE
        ):
            raise UpstreamRefusedError(reader.failure_status, reader.failure)
        raise UpstreamError(reader.failure or "the stream ended before its end")

    def build_tail(self) -> bytes | None:
        """What is still to be told of an answer that was told to its last token; None: it was not."""
        ending = self._continuation.build_missing_tail()
        if (
            ending is None
            and self._continuation.is_finished
            and not count_resume_tokens(self._context.fields)
        ):
            return self._build_final_events()
        return ending

    def _build_final_events(self, reason: str = "") -> bytes:
        """The events with which the answer ends here; those of its choices that have not end for `reason`."""
        context, replica = self._context, self._replica
        assert replica is not None  # noqa: S101 - it gave what there is
        ours = ResponseIdentity(
            context.response_id, int(context.started_at), replica.upstream_model
        )
        return build_final_events(context, self._continuation.response_identity or ours, reason)

    def write_tail(self, events: bytes) -> None:
        """Pass on the end of an answer that its replica could no longer tell."""
        self._write(events)

    def detach(self) -> None:
        """The attempt failed: what was not told for good is forgotten."""
        self._measure_rate()
        self.charge_delivered()
        self._response = self._parser = None

    def record_buffered(self, body: bytes, received_at: float, adapter: BackendAdapter) -> None:
        """An answer came in one piece: count what it says it used, about so much where it does not say.

        Tokens that a replica of ours was given to go on after were read as its prompt was.
        """
        context, delivered = self._context, self._delivered
        if context.attempt_trace is not None:
            context.attempt_trace.first_token_at = received_at
        usage = parse_usage(body, context.fields, adapter) or ReportedUsage()
        resumed = count_resume_tokens(context.fields) if adapter.is_native else 0
        delivered.prompt_tokens = context.fields.estimated_prompt_tokens
        usage.apply_to(delivered)
        delivered.prompt_tokens += resumed
        if usage.completion_tokens is None:
            delivered.output_tokens = estimate_response_tokens(body)
        else:
            context.pool.on_completed(usage.completion_tokens / context.fields.choice_count)
            delivered.output_tokens = max(0, usage.completion_tokens - resumed)
        delivered.finish_reasons.update(parse_finish_reasons(body))
        self.charge_delivered()
        self._notify_filters((received_at,))

    def restart(self) -> None:
        """Forget what was delivered of an answer that is sent whole: the client has none of it."""
        self._writer.discard()
        self._delivered.reset()
        self._output_tokens = 0

    def exit_fast_path(self) -> bytes:
        """Take the stream back from the fast path, if it is there; what came from the replica and was not read."""
        news = None if self._fast_path_switch is None else self._fast_path_switch.exit()
        self._apply_progress(news, self._filter_states)
        return b"" if news is None else news.unread

    def on_deadline(self) -> None:
        """The request's deadline has passed: its answer ends with what there is."""
        self.exit_fast_path()
        if self._replica is not None:
            self._end_early("timeout")
        else:
            self._abort()

    def charge_delivered(self) -> None:
        """Charge the tenant's share for what came since the last time."""
        told = self._delivered
        got = weighted_tokens(told.prompt_tokens - told.cached_tokens, told.output_tokens)
        if got != self._charged_tokens:
            came, self._charged_tokens = got - self._charged_tokens, got
            self._charge(came)

    def check_timeouts(self, now: float, timeouts: StreamTimeouts) -> None:
        """Called each second: end what has stalled, and show the client that somebody is there."""
        if self._client_backpressure:
            self._progress_at = now  # it may not
            self._backpressure_since = self._backpressure_since or now
            if now - self._backpressure_since > timeouts.slow_reader_timeout_s:
                self.disconnected_as_slow = True
                self._context.exchange.abort()
        attempt = self._response
        if attempt is None:
            if self._replica is not None:  # another is waited for
                self._send_keepalive_if_due(now, timeouts)
            return
        if self._fast_path_switch is not None:
            self._apply_progress(
                self._fast_path_switch.poll_progress(), self._fast_path_switch.notified_states
            )
        self.charge_delivered()
        if self._token_rate is not None:
            self._token_rate.measure(self._output_tokens, now)
            self._token_rate.is_client_limited = self._client_backpressure
        patience = (
            timeouts.first_token_timeout_s
            if self._first_token_at is None
            else timeouts.stream_idle_timeout_s
        )
        if now - self._progress_at > patience:
            self.exit_fast_path()
            attempt.abort(f"nothing came for {patience:g} s")
        else:
            self._send_keepalive_if_due(now, timeouts)

    def _on_data(self, body: bytes) -> None:
        reader, attempt = self._parser, self._response
        if reader is None or attempt is None or self.early_finish_reason is not None:
            return
        data = reader.feed(body)
        if data and not self.client_disconnected:
            if data.startswith(b":"):
                self._keepalive_at = attempt.last_activity_at
            else:
                self._progress_at = attempt.last_activity_at
            self._writer.write_events(data)
        told = self._delivered.output_tokens
        if told != self._output_tokens:
            self._progress_at = attempt.last_activity_at  # also where their text is held back
            if self._first_token_at is None:
                self._record_prompt_tokens()
                self._on_first_token()
            self._output_tokens = told
            reason = self._notify_filters((attempt.last_activity_at,)) or (
                "length" if self._writer.is_full else None
            )
            if reason is not None:
                self._end_early(reason)
                return
            if self._fast_path_switch is not None and self._fast_path_switch.observe_chunk():
                # What was pushed is with the kernel by then.
                asyncio.get_running_loop().call_soon(self._enter_fast_path)
        if (
            reader.stopped_early or reader.failure_status
        ):  # what that status means is for `finish` to say
            attempt.finish_early()
        elif reader.failure:
            attempt.abort(reader.failure)

    def _record_prompt_tokens(self) -> None:
        """There is an answer, so its prompt counts: about so many tokens, as long as no server says."""
        told = self._delivered
        told.prompt_tokens = told.prompt_tokens or self._context.fields.estimated_prompt_tokens

    def _notify_filters(self, times: Sequence[float]) -> str | None:
        """Tell all stages that more was delivered; the finish reason of one that ends the answer here."""
        ends = None
        for visit in self._filter_states:
            ends = visit.on_tokens(times) or ends
        return ends

    def _enter_fast_path(self) -> None:
        """Let the stream go on by itself, if it can at this moment."""
        attempt, reader = self._response, self._parser
        if self._fast_path_switch is None or attempt is None or reader is None:
            return
        if reader.can_use_fast_path and not (
            self._client_backpressure or self.client_disconnected or self.early_finish_reason
        ):
            self._fast_path_switch.enter(attempt, self._output_tokens, self._resume_reading)

    def _resume_reading(self) -> None:
        """Take the stream back from there, and go on."""
        rest = self.exit_fast_path()
        if self._response is not None:
            self._response.reclaim_socket(rest)
            if self._client_backpressure and self._response is not None:
                self._response.pause_reading()

    def _send_keepalive_if_due(self, now: float, limits: StreamTimeouts) -> None:
        if now - max(self._progress_at, self._keepalive_at) > limits.sse_keepalive_interval_s:
            self._keepalive_at = now
            self._send_keepalive()

    def _send_keepalive(self) -> None:
        self._resume_reading()
        self._writer.send_keepalive()

    def _apply_progress(self, news: SpliceProgress | None, visits: Sequence[FilterState]) -> None:
        attempt = self._response
        if attempt is None or news is None or not news.chunk_times:
            return
        self._delivered.token_id_pieces.setdefault(0, []).append(news.token_ids)
        self._delivered.output_tokens = self._output_tokens = news.output_tokens
        attempt.last_activity_at = self._progress_at = news.chunk_times[-1]
        for visit in visits:
            visit.on_tokens(news.chunk_times)

    def _on_first_token(self) -> None:
        """The attempt's first token came: what does that say of its replica?"""
        attempt, replica, told = self._response, self._replica, self._delivered
        tried, picked = self._context.attempt_trace, self._context.decision
        if attempt is None or replica is None or tried is None or picked is None:
            return
        self._first_token_at = tried.first_token_at = attempt.last_activity_at
        if self._context.fields.choice_count == 1:
            self._token_rate = TokenRateMeter(replica, told.output_tokens, attempt.last_activity_at)
            self._token_rate.is_client_limited = self._client_backpressure
        replica.on_prefill_done(picked.uncached_tokens, tried.chosen_at)
        if tried.sent_at is None or self._attempt_start_tokens:
            return
        uncached = picked.uncached_tokens
        if replica.kind == "argosy":  # others tell at the end, if at all
            uncached = told.prompt_tokens - told.cached_tokens
            prompt = told.prompt_tokens - count_resume_tokens(self._context.fields)
            picked.record_cache_hits(prompt, told.cached_tokens, told.prompt_blocks)
        elif told.prompt_token_ids is not None:
            picked.record_prompt_tokens(told.prompt_token_ids, self._context.fields)
        replica.on_first_token(
            attempt.last_activity_at - tried.sent_at, uncached, attempt.last_activity_at
        )

    def _measure_rate(self) -> None:
        """The attempt is over."""
        if self._response is not None and self._token_rate is not None:
            self._token_rate.measure(self._output_tokens, self._response.last_activity_at)

    def _end_early(self, reason: str) -> None:
        """End the answer here, unless its replica just has."""
        context = self._context
        if (
            self.early_finish_reason is not None
            or len(self._delivered.finish_reasons) == context.fields.choice_count
        ):
            return
        self.early_finish_reason = reason
        self._write(self._continuation.flush_held_text() + self._build_final_events(reason))
        for choice in range(context.fields.choice_count):
            self._delivered.finish_reasons.setdefault(choice, reason)
        if self._response is not None:
            self._response.abort("the answer was ended here")
        else:  # the next replica is waited for
            self._abort()

    def _abort(self) -> None:
        self.aborted = True
        self._cancel()

    def _write(self, data: bytes) -> None:
        if data and not self.client_disconnected:
            self._writer.write_events(data)

    # --- what the client's connection calls --------------------------------------------------------

    def on_backpressure(self) -> None:
        """The client is behind: the replica waits."""
        self._client_backpressure = True
        if self._token_rate is not None:
            self._token_rate.is_client_limited = True
        if self._response is not None:
            self._response.pause_reading()

    def on_writable(self) -> None:
        """It has caught up."""
        self._client_backpressure = False
        self._backpressure_since = None
        if self._response is not None:
            self._response.resume_reading()

    def on_half_close(self) -> None:
        """It will send no more: what it is sent tells whether it is there."""
        if not self._client_backpressure:
            self._send_keepalive()

    def on_disconnect(self) -> None:
        """Nobody waits any more: the replica learns of it at once."""
        self.client_disconnected = True
        self.exit_fast_path()
        self._abort()
