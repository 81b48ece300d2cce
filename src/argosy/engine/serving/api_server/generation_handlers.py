"""Handlers for chats and completions: validate the body, generate, and stream or send the response."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import msgspec

from argosy.engine.serving.api_server.adapter_registry import AdapterLease
from argosy.engine.serving.api_server.event_writers import (
    ChatEventWriter,
    CompletionEventWriter,
    EventWriter,
    ReportWriter,
    ResumeMetadataWriter,
)
from argosy.engine.serving.api_server.generation import Generation, RequestMetrics, abort_reason
from argosy.engine.serving.api_server.headers import (
    RESUME_METADATA_HEADER,
    parse_gateway_headers,
    report_ignored_fields,
    report_relaxed_keywords,
)
from argosy.engine.serving.api_server.replica_state import (
    LoadedModel,
    ReplicaState,
    RunningRequest,
)
from argosy.engine.serving.api_server.responses import build_chat_completion, build_completion
from argosy.engine.serving.preprocessing.request_processor import (
    GatewayHeaders,
    RequestProcessor,
)
from argosy.engine.serving.preprocessing.response_spec import ResponseSpec, new_response_id
from argosy.http_server import HttpExchange, SlowReaderError
from argosy.protocol import (
    ADAPTER_HEADER,
    REPORT_CONTENT,
    REPORT_HEADER,
    SSE_DONE,
    ApiError,
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    GenerationRequest,
    format_comment,
    format_event,
    parse_request_body,
    unsupported_task_error,
)

MIN_THREADED_BODY_BYTES = 16 * 1024
"""Bodies of at least this size, and all chats, are prepared in a thread, so that streams are not delayed."""

ARITHMETIC_HEADER = b"x-argosy-arithmetic-id"
"""Header with the id of an arithmetic identity."""
KEEP_ALIVE_COMMENT = format_comment(b"keep-alive")
_SLOW_FIELDS = re.compile(
    rb'"(?:tools|functions|response_format|structured_outputs|guided_\w+|structural_tag|json_schema|grammar|regex|ebnf'
    rb'|sha256:\w+)"'
)
"""Fields that need a grammar, and digests of adapters, for which files may be read. Both need a thread."""

Body = TypeVar("Body", bound=GenerationRequest)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[Body]):
    """Types and functions in which the generation APIs differ."""

    request_type: type[Body]
    id_prefix: str
    prepare_request: Callable[[RequestProcessor, Body, GatewayHeaders], ResponseSpec]
    build_response: Callable[[ResponseSpec], ChatCompletion | Completion]
    writer_type: Callable[[ResponseSpec], EventWriter]
    renders_template: bool
    """Whether requests wait for a render process, which they must not do on the event loop."""


CHAT_ENDPOINT = GenerationEndpoint(
    ChatCompletionRequest,
    "chatcmpl",
    RequestProcessor.prepare_chat,
    build_chat_completion,
    ChatEventWriter,
    renders_template=True,
)
COMPLETION_ENDPOINT = GenerationEndpoint(
    CompletionRequest,
    "cmpl",
    RequestProcessor.prepare_completion,
    build_completion,
    CompletionEventWriter,
    renders_template=False,
)


class GenerationHandlers:
    """Handlers of the two generation APIs."""

    def __init__(self, replica: ReplicaState) -> None:
        self._replica = replica

    async def chat(self, exchange: HttpExchange) -> None:
        """Handle `POST /v1/chat/completions`."""
        with self._replica.track_generation():
            await self._handle(exchange, CHAT_ENDPOINT)

    async def completion(self, exchange: HttpExchange) -> None:
        """Handle `POST /v1/completions`."""
        with self._replica.track_generation():
            await self._handle(exchange, COMPLETION_ENDPOINT)

    async def _handle(self, exchange: HttpExchange, endpoint: GenerationEndpoint[Body]) -> None:
        with AdapterLease() as lease:
            try:
                self._replica.require_ready()  # reject before the body is read
                self._check_arithmetic(exchange)
                raw = await exchange.read_body()
                body, spec = await self._prepare(exchange, endpoint, raw, lease)
            except ApiError as error:
                replica_metrics = self._replica.metrics
                replica_metrics.rejected.add((*replica_metrics.model_label, str(error.status)))
                raise
            await self._respond(exchange, endpoint, body, spec)

    async def _respond(
        self,
        exchange: HttpExchange,
        endpoint: GenerationEndpoint[Body],
        body: Body,
        spec: ResponseSpec,
    ) -> None:
        """Generate and send the response, and record its metrics."""
        if body.request_id is not None:
            exchange.set_request_id(body.request_id)
        metrics = RequestMetrics(self._replica, spec.choices, exchange.arrived_at)
        reason: str | None = "internal_error"
        try:
            await self._generate(exchange, endpoint, body, spec, metrics)
            reason = None
        except SlowReaderError:
            reason = "slow_reader"
            raise
        except (Exception, asyncio.CancelledError) as error:
            reason = abort_reason(error)
            raise
        finally:
            metrics.record_end(reason)

    def _check_arithmetic(self, exchange: HttpExchange) -> None:
        """Reject the resume of a stream that another arithmetic began, even one of the same model."""
        own_id = self._replica.arithmetic_id
        if exchange.get_header(ARITHMETIC_HEADER) not in {"", own_id}:
            message = (
                "Another model or another arithmetic (data type, quantization, kernels, instruction set) began the "
                "answer. Resume it on a replica with the same arithmetic, see /load, or send the request anew."
            )
            raise ApiError(409, "other_model", message)
        if own_id and exchange.get_header(RESUME_METADATA_HEADER) == "1":
            exchange.extra_headers.append((ARITHMETIC_HEADER, own_id.encode()))

    @staticmethod
    def _check_adapter(exchange: HttpExchange, spec: ResponseSpec) -> None:
        """Name the adapter of the response, and reject the resume of a stream that another one began."""
        adapter = spec.choices[0].request.adapter
        began = exchange.get_header(ADAPTER_HEADER)
        if began and (adapter is None or adapter.digest != began):
            message = (
                "Another adapter, or another version of it, began the answer. Send its digest as the model, or send "
                "the request anew."
            )
            raise ApiError(409, "other_model", message)
        if adapter is not None:
            exchange.extra_headers.append((ADAPTER_HEADER, adapter.digest.encode()))

    async def _prepare(
        self,
        exchange: HttpExchange,
        endpoint: GenerationEndpoint[Body],
        raw: bytes,
        lease: AdapterLease,
    ) -> tuple[Body, ResponseSpec]:
        """Validate the request and prepare its response."""
        model = self._replica.require_ready()
        headers = parse_gateway_headers(
            exchange, new_response_id(endpoint.id_prefix), self._replica.config
        )
        if model.pooling is not None:
            raise unsupported_task_error(self._replica.model_names[0], exchange.path, model.tasks)
        prepare = partial(self._prepare_in_thread, endpoint, model, raw, headers, lease)
        is_quick = (
            not endpoint.renders_template
            and len(raw) < MIN_THREADED_BODY_BYTES
            and model.text_processing.tokenizer.has_known_patterns
            and not _SLOW_FIELDS.search(raw)
        )
        body, spec, unknown = (
            prepare() if is_quick else await self._replica.preparation_threads.run(prepare)
        )
        self._replica.require_ready()  # the replica may have begun to drain meanwhile
        self._check_adapter(exchange, spec)
        report_ignored_fields(exchange, unknown + spec.ignored_fields)
        report_relaxed_keywords(exchange, [item.keyword for _, item in spec.plan.relaxations])
        return body, spec

    def _prepare_in_thread(
        self,
        endpoint: GenerationEndpoint[Body],
        model: LoadedModel,
        raw: bytes,
        headers: GatewayHeaders,
        lease: AdapterLease,
    ) -> tuple[Body, ResponseSpec, tuple[str, ...]]:
        """Return the body, the specification of its response, and the unknown fields."""
        body, unknown = parse_request_body(
            endpoint.request_type, raw, refuse_unknown=headers.refuse_unknown
        )
        processor, adapter = model.processor, self._replica.acquire_adapter(body.model, lease)
        if adapter is not None:
            processor, headers = adapter.processor, replace(headers, adapter=adapter.source)
        if not body.model:
            body = msgspec.structs.replace(body, model=self._replica.model_names[0])
        return body, endpoint.prepare_request(processor, body, headers), unknown

    async def _generate(
        self,
        exchange: HttpExchange,
        endpoint: GenerationEndpoint[Body],
        body: Body,
        spec: ResponseSpec,
        metrics: RequestMetrics,
    ) -> None:
        replica = self._replica
        with Generation(replica.engine, spec.choices, metrics.record_delta) as generation:
            replica.on_generation_start(generation, exchange.get_header(b"x-argosy-gateway"))
            watch = exchange.listen_for_disconnect(partial(end_disconnected, generation))
            try:
                if body.stream:
                    writer = self._create_writer(exchange, endpoint, spec)
                    await self._stream_response(exchange, generation, spec, writer)
                else:
                    await generation.wait_complete()
                    _raise_if_timed_out(spec)
                    await exchange.send_response(200, _encode(endpoint.build_response(spec)))
            finally:
                watch.cancel()
                replica.on_generation_end(generation)

    def _create_writer(
        self, exchange: HttpExchange, endpoint: GenerationEndpoint[Body], spec: ResponseSpec
    ) -> EventWriter:
        """Create the writer of a stream. A gateway may ask for resume metadata and for a report."""
        writer = endpoint.writer_type(spec)
        report = exchange.get_header(REPORT_HEADER)
        if report:
            loaded = self._replica.require_loaded()
            writer = ReportWriter(
                spec,
                writer,
                loaded.text_processing.tokenizer,
                includes_content=report == REPORT_CONTENT.decode(),
                no_drafts_reason=loaded.ready.no_drafts_reason,
            )
        return ResumeMetadataWriter(spec, writer) if spec.include_resume_metadata else writer

    async def _stream_response(
        self,
        exchange: HttpExchange,
        generation: Generation,
        spec: ResponseSpec,
        writer: EventWriter,
    ) -> None:
        try:
            await self._send_events(exchange, generation, spec, writer)
        except ApiError as error:
            if exchange.status is not None:  # status 200 was sent, so the error is sent as an event
                await exchange.write(format_event(error.encode_body(exchange.request_id)))
                await exchange.end_stream()
            raise

    async def _send_events(
        self,
        exchange: HttpExchange,
        generation: Generation,
        spec: ResponseSpec,
        writer: EventWriter,
    ) -> None:
        is_done = False
        while not is_done:
            updated = await generation.next_outputs(self._replica.config.sse_keepalive_interval_s)
            is_done = generation.is_done
            if is_done:
                _raise_if_timed_out(spec)
            data = b"".join(map(writer.encode_output, updated))
            if not updated and not is_done:
                data = KEEP_ALIVE_COMMENT
            if is_done:
                data += writer.encode_usage() + SSE_DONE
            if not data:
                continue
            if exchange.status is None:
                await exchange.start_stream()
            await exchange.write(data)
        await exchange.end_stream()


def end_disconnected(request: RunningRequest) -> None:
    """End the request of a disconnected client.

    Each call creates its own error, since a raised error keeps its request's frames alive.
    """
    request.fail(ApiError(499, "client_closed_request", "The client closed the connection."))


def _raise_if_timed_out(spec: ResponseSpec) -> None:
    """Raise `ApiError` (408) if the request timed out before its first token."""
    if spec.has_timed_out_empty:
        message = (
            "The request timed out before its first token. Raise its timeout, or try again later."
        )
        raise ApiError(408, "timeout", message)
