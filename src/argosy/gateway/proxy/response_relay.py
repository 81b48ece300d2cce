"""Relay of one response to the client, fed by one replica after another until the response is complete."""

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
    parse_usage,
    record_finish_reasons,
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
from argosy.protocol import EarlyStopReason


@dataclass(frozen=True, slots=True)
class StreamTimeouts:
    """Limits on the silence of a stream, in seconds."""

    first_token_timeout_s: float
    """Silence of the replica before its first token, after which the attempt fails."""
    stream_idle_timeout_s: float
    """Silence of the replica after its first token, after which the attempt fails."""
    sse_keepalive_interval_s: float
    """Silence towards the client, after which an SSE comment is sent."""
    slow_reader_timeout_s: float
    """How long a client may apply backpressure before it is disconnected."""


class ResponseRelay:
    """Forwards chunks from the replica to the client in callbacks, and observes the client's connection.

    After each chunk with new tokens the filter states are notified. A filter that returns a reason ends the response.
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
        """Create a relay that no replica is attached to yet.

        Args:
            context: The request.
            writer: Writes to the client.
            continuation: State across replicas.
            filter_states: Notified of tokens.
            charge: Called with new tokens.
            cancel: Cancels the request.
            fast_path_switch: None disables it.
        """
        self.client_disconnected = False
        self.disconnected_as_slow = False
        """Whether the gateway disconnected the client because it did not read."""
        self.is_ended_early = False
        """Whether a limit, the deadline or the writer's size limit ended the response early."""
        self.aborted = False
        """Whether `cancel` was called."""
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
        """Output tokens that the client had when the attempt started."""
        self._first_token_at: float | None = None
        """When the attempt's first token arrived."""
        self._token_rate: TokenRateMeter | None = None
        self._charged_tokens = 0.0
        self._client_backpressure = False
        self._backpressure_since: float | None = None
        self._response: UpstreamResponse | None = None
        self._replica: ReplicaEndpoint | None = None
        self._parser: StreamParser | None = None
        self._progress_at = 0.0
        """Time of the latest progress. A comment shows that the server is alive, but is not progress."""
        self._keepalive_at = 0.0
        """When the client was last sent a comment."""

    def attach_upstream(
        self, response: UpstreamResponse, replica: ReplicaEndpoint, parser: StreamParser
    ) -> None:
        """Forward the stream of an attempt, as its parser rewrites it. The writer must have been started."""
        self._response = response
        self._replica = replica
        self._attempt_start_tokens = self._output_tokens
        self._first_token_at = self._token_rate = None
        self._progress_at = response.last_activity_at
        self._parser = parser
        if self._client_backpressure:
            response.pause_reading()
        response.stream_body(self._on_data)

    @property
    def replica(self) -> ReplicaEndpoint | None:
        """Replica of the attached stream; None between two attempts."""
        return None if self._response is None else self._replica

    def move(self) -> None:
        """End the attempt although the replica works, so that another replica resumes the stream."""
        if self._response is not None and not self.is_ended_early:
            self.exit_fast_path()
            self._response.abort_for_move()

    def finish_upstream(self) -> None:
        """Forward the end of the attached stream, which has ended.

        Raises:
            UpstreamError: The stream ended too early.
            UpstreamRefusedError: The server rejected the request within its stream.
        """
        self._measure_rate()
        self._response = None
        self.charge_delivered()
        if self.is_ended_early:
            return  # the final events were written before
        parser = self._parser
        assert parser is not None  # noqa: S101 - set by attach_upstream
        tail = b"" if parser.is_done else self._synthesize_tail(parser)
        self._record_prompt_tokens()
        try:
            self._write(tail or parser.flush())
        except ValueError as error:
            raise UpstreamError(f"the end of the stream is malformed ({error})") from error
        self._context.pool.on_completed(self._output_tokens / self._context.fields.choice_count)

    def _synthesize_tail(self, parser: StreamParser) -> bytes:
        """Build the missing end of a stream that ended without `[DONE]`. Raises as `finish_upstream` does."""
        is_finished = self._continuation.is_finished and not parser.failure
        tail = self.build_tail() if is_finished else None
        if tail is not None:
            return tail
        if (
            self._output_tokens == self._attempt_start_tokens
            and classify_status(parser.failure_status or 500) is not AttemptOutcome.FAILURE
        ):
            raise UpstreamRefusedError(parser.failure_status, parser.failure)
        raise UpstreamError(parser.failure or "the stream ended without its final events")

    def build_tail(self) -> bytes | None:
        """Build the events missing after the last token (finish reasons, usage, `[DONE]`).

        Returns:
            The events, or None if tokens are missing too.
        """
        tail = self._continuation.build_missing_tail()
        if (
            tail is None
            and self._continuation.is_finished
            and not count_resume_tokens(self._context.fields)
        ):
            return self._build_final_events()
        return tail

    def _build_final_events(self, stop_reason: EarlyStopReason | None = None) -> bytes:
        """Build the final events of the response. Choices that have not finished end early with `stop_reason`."""
        context, replica = self._context, self._replica
        assert replica is not None  # noqa: S101 - set by attach_upstream
        default_identity = ResponseIdentity(
            context.response_id, int(context.started_at), replica.upstream_model
        )
        return build_final_events(
            context, self._continuation.response_identity or default_identity, stop_reason
        )

    def write_tail(self, events: bytes) -> None:
        """Write the end of a stream that its replica could not send."""
        self._write(events)

    def detach(self) -> None:
        """Detach a failed attempt. Events that were held back for it are dropped."""
        self._measure_rate()
        self.charge_delivered()
        self._response = self._parser = None

    def record_buffered(self, body: bytes, received_at: float, adapter: BackendAdapter) -> None:
        """Record usage, finish reasons and timing of a buffered response.

        Usage that the replica does not report is estimated. For native replicas the tokens of `resume` count as prompt.
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
        record_finish_reasons(body, delivered)
        self.charge_delivered()
        self._notify_filters((received_at,))

    def restart(self) -> None:
        """Reset the delivered output before a buffered attempt. The client must have received nothing."""
        self._writer.discard()
        self._delivered.reset()
        self._output_tokens = 0

    def exit_fast_path(self) -> bytes:
        """Take the stream back from the fast path. Returns bytes of the replica that are still to be parsed."""
        progress = None if self._fast_path_switch is None else self._fast_path_switch.exit()
        self._apply_progress(progress, self._filter_states)
        return b"" if progress is None else progress.unread

    def on_deadline(self) -> None:
        """End the response with the tokens so far, because the request's deadline has passed."""
        self.exit_fast_path()
        if self._replica is not None:
            self._end_early("deadline")
        else:
            self._abort()

    def start_early(self, now: float) -> None:
        """Start a stream although no replica answers yet, unless the response has started."""
        if self._context.exchange.status is None:
            self._keepalive_at = now
            self._writer.start_early()

    def charge_delivered(self) -> None:
        """Charge the tenant for the tokens delivered since the last call."""
        delivered = self._delivered
        total = weighted_tokens(
            delivered.prompt_tokens - delivered.cached_tokens, delivered.output_tokens
        )
        if total != self._charged_tokens:
            increment, self._charged_tokens = total - self._charged_tokens, total
            self._charge(increment)

    def check_timeouts(self, now: float, timeouts: StreamTimeouts) -> None:
        """Abort a stalled attempt, disconnect a slow client, and send keep-alive comments. Called every second."""
        if self._client_backpressure:
            self._progress_at = now  # the replica is paused
            self._backpressure_since = self._backpressure_since or now
            if now - self._backpressure_since > timeouts.slow_reader_timeout_s:
                self.disconnected_as_slow = True
                self._context.exchange.abort()
        response = self._response
        if response is None:  # no replica answers yet
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
        idle_timeout_s = (
            timeouts.first_token_timeout_s
            if self._first_token_at is None
            else timeouts.stream_idle_timeout_s
        )
        if now - self._progress_at > idle_timeout_s:
            self.exit_fast_path()
            response.abort(f"no data for {idle_timeout_s:g} s")
        else:
            self._send_keepalive_if_due(now, timeouts)

    def _on_data(self, body: bytes) -> None:
        parser, response = self._parser, self._response
        if parser is None or response is None or self.is_ended_early:
            return
        events = parser.feed(body)
        if events and not self.client_disconnected:
            if events.startswith(b":"):
                self._keepalive_at = response.last_activity_at
            else:
                self._progress_at = response.last_activity_at
            self._writer.write_events(events)
        output_tokens = self._delivered.output_tokens
        if output_tokens != self._output_tokens:
            # Tokens are progress even if their text is held back.
            self._progress_at = response.last_activity_at
            if self._first_token_at is None:
                self._record_prompt_tokens()
                self._on_first_token()
            self._output_tokens = output_tokens
            stop_reason = self._notify_filters((response.last_activity_at,))
            if stop_reason is not None or self._writer.is_full:
                self._end_early(stop_reason)
                return
            if self._fast_path_switch is not None and self._fast_path_switch.observe_chunk():
                # In the next iteration of the loop, when the kernel has the events that were written.
                asyncio.get_running_loop().call_soon(self._enter_fast_path)
        if parser.stopped_early or parser.failure_status:  # finish_upstream handles the status
            response.finish_early()
        elif parser.failure:
            response.abort(parser.failure)

    def _record_prompt_tokens(self) -> None:
        """Record the prompt's tokens, estimated until the server reports them, because the response has started."""
        delivered = self._delivered
        delivered.prompt_tokens = (
            delivered.prompt_tokens or self._context.fields.estimated_prompt_tokens
        )

    def _notify_filters(self, chunk_times: Sequence[float]) -> EarlyStopReason | None:
        """Notify all filter states of new tokens. Returns the reason if one of them ends the response."""
        stop_reason = None
        for state in self._filter_states:
            stop_reason = state.on_tokens(chunk_times) or stop_reason
        return stop_reason

    def _enter_fast_path(self) -> None:
        """Move the stream to the fast path, if its state allows."""
        response, parser = self._response, self._parser
        if self._fast_path_switch is None or response is None or parser is None:
            return
        if parser.can_use_fast_path and not (
            self._client_backpressure or self.client_disconnected or self.is_ended_early
        ):
            self._fast_path_switch.enter(response, self._output_tokens, self.reclaim_stream)

    def reclaim_stream(self) -> None:
        """Take the stream back from the fast path and read it here again."""
        unread = self.exit_fast_path()
        if self._response is not None:
            self._response.reclaim_socket(unread)
            if self._client_backpressure and self._response is not None:
                self._response.pause_reading()

    def _send_keepalive_if_due(self, now: float, timeouts: StreamTimeouts) -> None:
        if now - max(self._progress_at, self._keepalive_at) > timeouts.sse_keepalive_interval_s:
            self._keepalive_at = now
            self._send_keepalive()

    def _send_keepalive(self) -> None:
        self.reclaim_stream()
        self._writer.send_keepalive()

    def _apply_progress(
        self, progress: SpliceProgress | None, filter_states: Sequence[FilterState]
    ) -> None:
        response = self._response
        if response is None or progress is None or not progress.chunk_times:
            return
        self._delivered.token_id_pieces.setdefault(0, []).append(progress.token_ids)
        self._delivered.output_tokens = self._output_tokens = progress.output_tokens
        response.last_activity_at = self._progress_at = progress.chunk_times[-1]
        for state in filter_states:
            state.on_tokens(progress.chunk_times)

    def _on_first_token(self) -> None:
        """Report prefill time and cache hits to the replica's statistics at the attempt's first token."""
        response, replica, delivered = self._response, self._replica, self._delivered
        trace, decision = self._context.attempt_trace, self._context.decision
        if response is None or replica is None or trace is None or decision is None:
            return
        self._first_token_at = trace.first_token_at = response.last_activity_at
        if self._context.fields.choice_count == 1:
            self._token_rate = TokenRateMeter(
                replica, delivered.output_tokens, response.last_activity_at
            )
            self._token_rate.is_client_limited = self._client_backpressure
        replica.on_prefill_done(decision.uncached_tokens, trace.chosen_at)
        if trace.sent_at is None or self._attempt_start_tokens:
            return
        uncached_tokens = decision.uncached_tokens
        if replica.kind == "argosy":  # other servers report usage at the end, if at all
            uncached_tokens = delivered.prompt_tokens - delivered.cached_tokens
            prompt_tokens = delivered.prompt_tokens - count_resume_tokens(self._context.fields)
            decision.record_cache_hits(
                prompt_tokens, delivered.cached_tokens, delivered.prompt_blocks
            )
        elif delivered.prompt_token_ids is not None:
            decision.record_prompt_tokens(delivered.prompt_token_ids, self._context.fields)
        replica.on_first_token(
            response.last_activity_at - trace.sent_at, uncached_tokens, response.last_activity_at
        )

    def _measure_rate(self) -> None:
        """Measure the token rate up to the end of the attempt."""
        if self._response is not None and self._token_rate is not None:
            self._token_rate.measure(self._output_tokens, self._response.last_activity_at)

    def _end_early(self, stop_reason: EarlyStopReason | None) -> None:
        """End all choices that have not finished. The reason is None if the response is too long for the writer."""
        context = self._context
        if (
            self.is_ended_early
            or len(self._delivered.finish_reasons) == context.fields.choice_count
        ):
            return
        self.is_ended_early = True
        self._write(self._continuation.flush_held_text() + self._build_final_events(stop_reason))
        for choice in range(context.fields.choice_count):
            if choice not in self._delivered.finish_reasons:
                self._delivered.record_finish(choice, "length", stop_reason)
        if self._response is not None:
            self._response.abort("response ended early by the gateway")
        else:  # between two attempts
            self._abort()

    def _abort(self) -> None:
        self.aborted = True
        self._cancel()

    def _write(self, events: bytes) -> None:
        if events and not self.client_disconnected:
            self._writer.write_events(events)

    # --- callbacks of the client's connection ------------------------------------------------------

    def on_backpressure(self) -> None:
        """Pause the replica, because the client reads more slowly than tokens arrive."""
        self._client_backpressure = True
        if self._token_rate is not None:
            self._token_rate.is_client_limited = True
        if self._response is not None:
            self._response.pause_reading()

    def on_writable(self) -> None:
        """Resume the replica, because the client's buffer has drained."""
        self._client_backpressure = False
        self._backpressure_since = None
        if self._response is not None:
            self._response.resume_reading()

    def on_half_close(self) -> None:
        """Send a comment after the client shut down its sending side.

        A failing write then shows that it disconnected.
        """
        if not self._client_backpressure:
            self._send_keepalive()

    def on_disconnect(self) -> None:
        """Cancel the request at once, because the client disconnected."""
        self.client_disconnected = True
        self.exit_fast_path()
        self._abort()
