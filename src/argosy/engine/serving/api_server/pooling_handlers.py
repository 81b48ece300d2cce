"""Handlers of models that pool: validate the body, compute the result, and send it in one piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from argosy.engine.serving.api_server.generation import abort_reason
from argosy.engine.serving.api_server.generation_handlers import (
    MIN_THREADED_BODY_BYTES,
    end_disconnected,
)
from argosy.engine.serving.api_server.headers import (
    parse_gateway_headers,
    report_ignored_fields,
)
from argosy.engine.serving.api_server.pooling_endpoints import (
    POOLING_ENDPOINTS,
    Body,
    Inputs,
    PoolingCall,
    PoolingEndpoint,
)
from argosy.engine.serving.api_server.replica_state import ReplicaState
from argosy.engine.serving.pooling import PoolingResult
from argosy.engine.serving.preprocessing.request_processor import salt_cache_domain
from argosy.engine.serving.preprocessing.response_spec import new_response_id
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError, parse_request_body, unsupported_task_error
from argosy.telemetry import SequenceTimes

MIN_THREADED_VALUES = 8192
"""Vectors with at least this many values are encoded in a thread, so that streams are not delayed."""


class PoolingRun:
    """Running request, which `fail` ends early."""

    def __init__(self, tier: int) -> None:
        self.tier = tier
        self._task: asyncio.Future[PoolingResult] | None = None
        self._error: ApiError | None = None

    async def wait(self, computing: Awaitable[PoolingResult]) -> PoolingResult:
        """Return the result.

        Raises:
            ApiError: The request failed.
        """
        self._task = asyncio.ensure_future(computing)
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._error is None:
                raise
            raise self._error from None
        finally:
            self._task.cancel()

    def fail(self, error: ApiError) -> None:
        """End the request with `error`. Later errors are ignored."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()


class ReplicaPoolingHandlers:
    """Handlers of the APIs of models that pool."""

    def __init__(self, replica: ReplicaState) -> None:
        self._replica = replica
        self.handlers: dict[str, Callable[[HttpExchange], Awaitable[None]]] = {
            path: partial(self._handle, endpoint=endpoint)
            for path, endpoint in POOLING_ENDPOINTS.items()
        }
        """Handler of `POST` by path."""

    async def _handle(
        self, exchange: HttpExchange, endpoint: PoolingEndpoint[Body, Inputs]
    ) -> None:
        replica = self._replica
        with replica.track_generation():
            try:
                replica.require_ready()  # reject before the body is read
                raw = await exchange.read_body()
                call = await self._prepare(exchange, endpoint, raw)
            except ApiError as error:
                replica.metrics.rejected.add((*replica.metrics.model_label, str(error.status)))
                raise
            result = await self._compute(exchange, call)
            encode = partial(call.encode_response, result)
            is_quick = sum(values.size for values in result.values) < MIN_THREADED_VALUES
            body = encode() if is_quick else await replica.preparation_threads.run(encode)
            await exchange.send_response(200, body)

    async def _prepare(
        self, exchange: HttpExchange, endpoint: PoolingEndpoint[Body, Inputs], raw: bytes
    ) -> PoolingCall[Body, Inputs]:
        """Validate a request.

        Raises:
            ApiError: The request is invalid, or the model has none of the endpoint's tasks.
        """
        model = self._replica.require_ready()
        headers = parse_gateway_headers(
            exchange, new_response_id(endpoint.id_prefix), self._replica.config
        )

        def read() -> tuple[Body, Inputs, tuple[str, ...]]:
            body, ignored = parse_request_body(
                endpoint.request_type, raw, refuse_unknown=headers.refuse_unknown
            )
            chat, inputs = body.read_chat(), endpoint.read_inputs(body)
            if chat is not None:
                prompt = model.processor.tokenize(chat, refuse_unknown=headers.refuse_unknown)
                inputs = cast("Inputs", [prompt.token_ids])
                ignored += prompt.ignored_fields
            return body, inputs, ignored

        # The template of a conversation is rendered by another process.
        is_quick = len(raw) < MIN_THREADED_BODY_BYTES and b'"messages"' not in raw
        body, inputs, ignored = (
            read() if is_quick else await self._replica.preparation_threads.run(read)
        )
        name = self._replica.check_model(body.model)
        if model.pooling is None or endpoint.tasks.isdisjoint(model.tasks):
            raise unsupported_task_error(name, exchange.path, model.tasks)
        report_ignored_fields(exchange, ignored)
        if body.request_id is not None:
            exchange.set_request_id(body.request_id)
        headers = replace(
            headers,
            tier=headers.tier + (body.priority or 0),
            cache_domain=salt_cache_domain(headers.cache_domain, body.cache_salt),
        )
        return PoolingCall(name, model.pooling, endpoint, body, inputs, headers)

    async def _compute(self, exchange: HttpExchange, call: PoolingCall[Any, Any]) -> PoolingResult:
        """Compute the result, until the client disconnects.

        Raises:
            ApiError: The request failed, or an input is invalid for the model.
        """
        replica, run, submitted_at = self._replica, PoolingRun(call.headers.tier), time.monotonic()
        replica.metrics.choices.observe(replica.metrics.model_label, len(call.inputs))
        replica.on_generation_start(run, exchange.get_header(b"x-argosy-gateway"))
        watch = exchange.listen_for_disconnect(partial(end_disconnected, run))
        try:
            result = await run.wait(self._run_job(call))
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, ApiError) and error.status == 400:
                replica.metrics.rejected.add((*replica.metrics.model_label, str(error.status)))
            else:
                replica.metrics.aborted.add((*replica.metrics.model_label, abort_reason(error)))
            raise
        finally:
            watch.cancel()
            replica.on_generation_end(run)
        now = time.monotonic()
        times = SequenceTimes(exchange.arrived_at, submitted_at, ended_at=now)
        for tokens in result.prompt_tokens:
            replica.metrics.record_sequence_end(
                "stop", times, prompt_tokens=tokens, output_tokens=0, max_tokens=0
            )
        return result

    async def _run_job(self, call: PoolingCall[Any, Any]) -> PoolingResult:
        prepare = partial(call.endpoint.prepare, call)
        job = await self._replica.preparation_threads.run(prepare)
        return await job.run(self._replica.engine)
