"""Relay of one response to the client, fed by one replica after another until the response is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from argosy.deployment import GatewayConfig
from argosy.gateway.backends import (
    BackendAdapter,
    ResponseIdentity,
    StreamContinuation,
    StreamParser,
    count_resume_tokens,
    is_set,
    is_token_ids_requested,
)
from argosy.gateway.proxy.fast_path import FastPath
from argosy.gateway.proxy.placement_driver import PlacementDriver
from argosy.gateway.proxy.response_writers import ResponseWriter, StreamingWriter
from argosy.gateway.proxy.start_wait import StartNotifier, waits_for_start
from argosy.gateway.proxy.stream_splice import StreamSplice
from argosy.gateway.proxy.upstream_call import (
    BufferedResponse,
    UpstreamCall,
    UpstreamRefusedError,
)
from argosy.gateway.request_context import CHAT, CLIENT_GONE, EndReason, RequestContext
from argosy.gateway.upstream import StreamPausedError, UpstreamError
from argosy.http_server import ClientListener
from argosy.policy import AttemptOutcome, classify_status, weighted_tokens
from argosy.protocol import SSE_DONE, EarlyStopReason, format_event


class ResponseRelay(ClientListener):
    """Forwards chunks from the replica to the client in callbacks, and observes the client's connection.

    After each chunk with new tokens the filters are notified. A filter that returns a reason ends the response.
    """

    _splice: StreamSplice | None = None
    """Moves the stream to native code, which supports a single choice; None if it stays here."""
    _start_notifier: StartNotifier | None = None
    """Writes to the client while the model starts."""
    _output_tokens = 0
    _charged_tokens = 0.0
    _client_backpressure = False
    _backpressure_since: float | None = None
    _progress_at = 0.0
    """Time of the latest progress. A comment shows that the server is alive, but is not progress."""
    _keepalive_at = 0.0
    """When the client was last sent a comment."""
    _call: UpstreamCall | None = None
    """The attempt whose stream is forwarded; None between two attempts."""
    _parser: StreamParser | None = None
    _upstream_model: str | None = None
    """Name of the model at the last replica; None before the first one answered."""

    def __init__(
        self,
        context: RequestContext,
        writer: ResponseWriter,
        continuation: StreamContinuation,
        driver: PlacementDriver,
        *,
        task: asyncio.Task[Any],
        settings: GatewayConfig,
        fast_path: FastPath | None = None,
    ) -> None:
        """Create a relay that no replica is attached to yet.

        Args:
            context: The request.
            writer: Writes to the client.
            continuation: State across replicas.
            driver: Receives the events for placement.
            task: Task of the request, cancelled after `RequestContext.end_reason` was set.
            settings: Settings of the gateway, with its timeouts.
            fast_path: Native code that may forward the stream; None for none.
        """
        self._context = context
        self._delivered = context.delivered
        self._writer = writer
        self._continuation = continuation
        self._driver = driver
        self._task = task
        self._settings = settings
        if (
            fast_path is not None
            and isinstance(writer, StreamingWriter)
            and context.fields.choice_count == 1
        ):
            self._splice = StreamSplice(fast_path, writer, context)

    def attach(self, call: UpstreamCall, parser: StreamParser) -> None:
        """Forward the stream of an attempt, as its parser rewrites it. The writer must have been started."""
        self._call, self._parser = call, parser
        self._upstream_model = call.replica.upstream_model
        call.start_tokens = self._output_tokens
        call.is_client_limited = self._client_backpressure
        self._progress_at = call.last_activity_at
        if self._client_backpressure:
            call.pause_reading()
        call.stream_body(self._on_data)

    def pause(self, reason: str) -> None:
        """End the attempt although the replica works, so that the stream is resumed later."""
        if self._call is not None and not self._is_stopped:
            self.end_splice()
            self._call.abort(StreamPausedError(reason))

    def finish_upstream(self) -> None:
        """Forward the end of the attached stream, which has ended.

        Raises:
            UpstreamError: The stream ended too early.
            UpstreamRefusedError: The server rejected the request within its stream.
        """
        call, parser = self._call, self._parser
        assert call is not None  # noqa: S101 - set by `attach`
        assert parser is not None  # noqa: S101 - set by `attach`
        call.measure(self._output_tokens, call.last_activity_at)
        if self._context.end_reason is EndReason.STOPPED:
            self.end()
            return  # the final events were written before
        tail = b"" if parser.is_done else self._synthesize_tail(call, parser)
        self._record_prompt_tokens()
        self.end()
        try:
            self._write(tail or parser.flush())
        except ValueError as error:
            raise UpstreamError(f"the end of the stream is malformed ({error})") from error

    @property
    def completed_tokens_per_choice(self) -> float | None:
        """Output tokens per choice of a complete stream; None if it was ended early."""
        if self._is_stopped:
            return None
        return self._output_tokens / self._context.fields.choice_count

    @property
    def _is_stopped(self) -> bool:
        """Whether the client has received final events that the gateway wrote."""
        return self._context.end_reason is EndReason.STOPPED

    def _synthesize_tail(self, call: UpstreamCall, parser: StreamParser) -> bytes:
        """Build the missing end of a stream that ended without `[DONE]`. Raises as `finish_upstream` does."""
        is_finished = self._continuation.is_finished and not parser.failure
        tail = self._build_tail() if is_finished else None
        if tail is not None:
            return tail
        outcome = classify_status(parser.failure_status or 500)
        has_progress = self._output_tokens != call.start_tokens
        if outcome is AttemptOutcome.SUCCESS or not (
            outcome is AttemptOutcome.FAILURE or has_progress
        ):
            raise UpstreamRefusedError(parser.failure_status, parser.failure)
        raise UpstreamError(parser.failure or "the stream ended without its final events")

    def _build_tail(self) -> bytes | None:
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
        """Build the final events of the response: finish reasons, usage and `[DONE]`.

        Choices that have not finished end early with `stop_reason`; it is None if only their length is the reason.
        """
        context, fields, delivered = self._context, self._context.fields, self._delivered
        identity = self._continuation.response_identity or ResponseIdentity(
            context.response_id, int(context.started_at), self._upstream_model or ""
        )
        final_choice: dict[str, Any] = {"delta": {}} if context.api is CHAT else {"text": ""}
        final_choice |= {
            "logprobs": None,
            "finish_reason": self._writer.finish_reason,
            "stop_reason": stop_reason,
        }
        if is_token_ids_requested(fields):
            final_choice["token_ids"] = []
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": choice, **final_choice}]}
            for choice in range(fields.choice_count)
            if choice not in delivered.finish_reasons
        ]
        if fields.include_usage:
            chunks = [chunk | {"usage": None} for chunk in chunks]
            chunks.append({"choices": [], "usage": delivered.usage.to_wire()})
        envelope = {
            "id": identity.id,
            "object": context.api.chunk_object_type,
            "created": identity.created,
            "model": identity.model,
        }
        events = [format_event(msgspec.json.encode(envelope | chunk)) for chunk in chunks]
        return b"".join([*events, SSE_DONE])

    def complete_lost_stream(self) -> bool:
        """Write the end of a stream whose replica was lost after its last token.

        Returns whether the stream was complete but for its end.
        """
        tail = self._build_tail()
        if tail is not None:
            self._write(tail)
        return tail is not None

    def detach(self) -> None:
        """Detach a failed attempt. Events that were held back for it are dropped."""
        self._measure_rate()
        self.charge_delivered()
        self._call = self._parser = None

    def record_buffered(
        self, buffered: BufferedResponse, received_at: float, adapter: BackendAdapter
    ) -> float | None:
        """Record usage, finish reasons and timing of a buffered response.

        Usage that the replica does not report, or that cannot be true, is estimated. For native replicas the tokens of
        `resume` count as prompt.

        Returns:
            The reported output tokens per choice; None if the replica does not report them.
        """
        context, delivered = self._context, self._delivered
        usage = buffered.parsed.find_usage(context.fields, adapter)
        resumed = count_resume_tokens(context.fields) if adapter.is_native else 0
        delivered.prompt_tokens = context.fields.estimated_prompt_tokens
        if usage.completion_tokens == 0 and not is_set(context.fields, "echo"):
            delivered.output_tokens = buffered.parsed.content_tokens
        usage.apply_to(delivered)
        delivered.prompt_tokens += resumed
        tokens_per_choice = None
        if not context.fields.generates:
            delivered.output_tokens = 0
        elif usage.completion_tokens is None:
            delivered.output_tokens = buffered.parsed.estimate_tokens(len(buffered.body))
        elif usage.completion_tokens:
            tokens_per_choice = usage.completion_tokens / context.fields.choice_count
            delivered.output_tokens = max(0, usage.completion_tokens - resumed)
        buffered.parsed.record_finish_reasons(delivered)
        self.charge_delivered()
        self._notify_filters((received_at,))
        return tokens_per_choice

    def restart(self) -> None:
        """Reset the delivered output before a buffered attempt. The client must have received nothing."""
        self._writer.discard()
        self._delivered.reset()
        self._output_tokens = 0

    def end_splice(self) -> bytes:
        """Take the stream back from native code. Returns bytes of the replica that are still to be parsed."""
        if self._splice is None:
            return b""
        chunk_times, unread = self._splice.end()
        self._record_spliced_chunks(chunk_times)
        self._context.count_usage()
        return unread

    def on_deadline(self) -> None:
        """End the response with the tokens so far, because the request's deadline has passed."""
        self.end_splice()
        if self._upstream_model is not None:
            self._end_early("deadline")
        else:
            self._abort(EndReason.DEADLINE)

    def start_early(self, now: float) -> None:
        """Start a stream although no replica answers yet, unless the response has started."""
        if self._context.exchange.status is None:
            self._keepalive_at = now
            self._writer.start_early()

    def charge_delivered(self) -> None:
        """Charge the tenant for the tokens delivered since the last call."""
        delivered = self._delivered
        uncached_tokens = delivered.prompt_tokens - delivered.cached_tokens
        total = weighted_tokens(uncached_tokens, delivered.output_tokens)
        if total != self._charged_tokens:
            increment, self._charged_tokens = total - self._charged_tokens, total
            request = self._context.placement
            assert request is not None  # noqa: S101 - set before tokens arrive
            self._driver.record_progress(request, delivered.output_tokens, increment)

    def end(self) -> None:
        """End the attached attempt, if there is one, whether its stream is complete or not."""
        if self._call is not None:
            self.charge_delivered()
            self._call = None

    def check_timeouts(self, now: float) -> None:
        """Abort a stalled attempt, disconnect a slow client, and send keep-alive comments. Called every second."""
        settings, call = self._settings, self._call
        if self._client_backpressure:
            self._progress_at = now  # the replica is paused
            self._backpressure_since = self._backpressure_since or now
            if now - self._backpressure_since > settings.slow_reader_timeout_s:
                self._context.end_reason = EndReason.SLOW_CLIENT
                self._context.exchange.abort()
        if call is not None:  # otherwise no replica answers yet
            if self._splice is not None:
                self._record_spliced_chunks(self._splice.poll())
            self.charge_delivered()
            self._measure_rate(now)
            call.is_client_limited = self._client_backpressure
            timeouts = settings.timeouts
            limit_s = (
                timeouts.stream_idle_timeout_s if call.has_token else timeouts.first_token_timeout_s
            )
            if now - self._progress_at > limit_s:
                self.end_splice()
                call.abort(f"no data for {limit_s:g} s")
                return
        if waits_for_start(self._context):
            self._start_notifier = self._start_notifier or StartNotifier(
                self._context, self._writer, settings.cold_start
            )
            self._start_notifier.notify(now)
        elif now - max(self._progress_at, self._keepalive_at) > settings.sse_keepalive_interval_s:
            self._keepalive_at = now
            self._send_keepalive()

    def _on_data(self, body: bytes) -> None:
        parser, call, context = self._parser, self._call, self._context
        if parser is None or call is None or context.end_reason is EndReason.STOPPED:
            return
        events = parser.feed(body)
        if events and context.end_reason is None:
            if events.startswith(b":"):
                self._keepalive_at = call.last_activity_at
            else:
                self._progress_at = call.last_activity_at
            self._writer.write_events(events)
        output_tokens = self._delivered.output_tokens
        if output_tokens != self._output_tokens:
            # Tokens are progress even if their text is held back.
            self._progress_at = call.last_activity_at
            if not call.has_token:
                self._record_prompt_tokens()
                call.record_first_token(self._delivered, context)
            self._output_tokens = output_tokens
            if context.fields.stream:
                context.count_usage()
            stop_reason = self._notify_filters((call.last_activity_at,))
            if stop_reason is not None or self._writer.is_full:
                self._end_early(stop_reason)
                return
            if self._splice is not None and self._splice.should_begin():
                # In the next iteration of the loop, when the kernel has the events that were written.
                asyncio.get_running_loop().call_soon(self._begin_splice)
        if parser.stopped_early or parser.failure_status:  # finish_upstream handles the status
            call.finish_early()
        elif parser.failure:
            call.abort(parser.failure)

    def _record_prompt_tokens(self) -> None:
        """Record the prompt's tokens, estimated until the server reports them, because the response has started."""
        if not self._delivered.prompt_tokens:
            self._delivered.prompt_tokens = self._context.fields.estimated_prompt_tokens

    def _notify_filters(self, chunk_times: Sequence[float]) -> EarlyStopReason | None:
        """Notify all filters of new tokens. Returns the reason if one of them ends the response."""
        context, stop_reason = self._context, None
        for each in context.filters:
            stop_reason = each.on_tokens(context, chunk_times) or stop_reason
        return stop_reason

    def _begin_splice(self) -> None:
        """Let native code forward the stream, if its state allows."""
        call, parser = self._call, self._parser
        if call is None or parser is None or not parser.can_use_fast_path:
            return
        if (
            self._splice is not None
            and not self._client_backpressure
            and self._context.end_reason is None
        ):
            self._splice.begin(call, self.take_back_stream)

    def take_back_stream(self) -> None:
        """Take the stream back from native code and read it here again."""
        unread = self.end_splice()
        if self._call is not None:
            self._call.reclaim_socket(unread)
            if self._client_backpressure and self._call is not None:
                self._call.pause_reading()

    def _record_spliced_chunks(self, chunk_times: Sequence[float]) -> None:
        """Record the chunks that native code has forwarded, and counted in the usage log."""
        if not chunk_times:
            return
        self._output_tokens = self._delivered.output_tokens
        self._notify_filters(chunk_times)
        if self._call is not None:
            self._call.last_activity_at = self._progress_at = chunk_times[-1]

    def _send_keepalive(self) -> None:
        self.take_back_stream()
        self._writer.send_keepalive()

    def _measure_rate(self, now: float | None = None) -> None:
        """Measure the token rate of the attempt, up to its last chunk by default."""
        call = self._call
        if call is not None:
            call.measure(self._output_tokens, call.last_activity_at if now is None else now)

    def _end_early(self, stop_reason: EarlyStopReason | None) -> None:
        """End all choices that have not finished. The reason is None if the response is too long for the writer."""
        context = self._context
        if (
            context.end_reason is not None
            or len(self._delivered.finish_reasons) == context.fields.choice_count
        ):
            return
        context.end_reason = EndReason.STOPPED
        self._write(self._continuation.flush_held_text() + self._build_final_events(stop_reason))
        for choice in range(context.fields.choice_count):
            if choice not in self._delivered.finish_reasons:
                self._delivered.record_finish(choice, self._writer.finish_reason, stop_reason)
        if self._call is not None:
            self._call.abort("response ended early by the gateway")
        else:  # between two attempts
            self._task.cancel()

    def _abort(self, reason: EndReason) -> None:
        if self._context.end_reason is not EndReason.SLOW_CLIENT:
            self._context.end_reason = reason
        self._task.cancel()

    def abandon(self) -> None:
        """End the attempt, because a larger model is to answer."""
        self.end_splice()
        self._abort(EndReason.ESCALATED)

    def _write(self, events: bytes) -> None:
        if events and self._context.end_reason not in CLIENT_GONE:
            self._writer.write_events(events)

    # --- callbacks of the client's connection ------------------------------------------------------

    def on_backpressure(self) -> None:
        """Pause the replica, because the client reads more slowly than tokens arrive."""
        self._client_backpressure = True
        if self._call is not None:
            self._call.is_client_limited = True
            self._call.pause_reading()

    def on_writable(self) -> None:
        """Resume the replica, because the client's buffer has drained."""
        self._client_backpressure = False
        self._backpressure_since = None
        if self._call is not None:
            self._call.resume_reading()

    def on_half_close(self) -> None:
        """Send a comment after the client shut down its sending side.

        A failing write then shows that it disconnected.
        """
        if not self._client_backpressure:
            self._send_keepalive()

    def on_disconnect(self) -> None:
        """Cancel the request at once, because the client disconnected, unless others wait for its response."""
        self.end_splice()
        if self._writer.continue_without_client(partial(self._abort, EndReason.CLIENT_LEFT)):
            self._context.end_reason = None  # it may have been a slow client
            self.on_writable()
        else:
            self._abort(EndReason.CLIENT_LEFT)
