"""Application of the replica: routes requests and converts every failure to one response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar
from urllib.parse import parse_qs, parse_qsl

import msgspec
import structlog

from argosy.engine.serving.api_server.adapter_handlers import AdapterHandlers
from argosy.engine.serving.api_server.adapter_registry import ServedAdapter
from argosy.engine.serving.api_server.generation_handlers import GenerationHandlers
from argosy.engine.serving.api_server.headers import (
    refuses_unknown_fields,
    report_ignored_fields,
)
from argosy.engine.serving.api_server.kv_events_handler import stream_kv_events
from argosy.engine.serving.api_server.pooling_handlers import ReplicaPoolingHandlers
from argosy.engine.serving.api_server.replica_state import LoadedModel, ReplicaState
from argosy.http_server import (
    HttpExchange,
    HttpRequest,
    Route,
    RouteMatch,
    RouteTable,
    check_json_content_type,
    check_method,
    check_no_page_request,
    run_handler,
)
from argosy.protocol import (
    EVENTS_MEDIA_TYPE,
    TEXT_SCHEMA,
    DetokenizeRequest,
    DetokenizeResponse,
    DrainRequest,
    KvEvent,
    LoadLoraAdapterRequest,
    LoadResponse,
    ModelCard,
    ModelList,
    Operation,
    RerankRequest,
    RerankResponse,
    SleepingResponse,
    SleepQuery,
    StatusResponse,
    TokenizeRequest,
    TokenizeResponse,
    UnloadLoraAdapterRequest,
    VersionResponse,
    WakeUpQuery,
    json_operation,
    parse_body,
    parse_query,
    parse_request_body,
    render_openapi,
    shared_operations,
)
from argosy.telemetry import METRICS_CONTENT_TYPE as METRICS_TYPE
from argosy.telemetry import CoalescedScrape, bind_request
from argosy.version import VERSION

_GENERATION_ERRORS = {
    "400": "The request is invalid. `param` names the parameter to change.",
    "404": "The replica does not serve this model.",
    "408": "The request timed out before its first token or before its body was complete.",
    "413": "The body is too large.",
    "415": "Compressed bodies are not supported.",
    "499": "The request was cancelled.",
    "500": "The engine failed.",
    "503": "The replica is not ready or is draining. Retry after `Retry-After` seconds.",
}
_UTILITY_ERRORS = {
    code: _GENERATION_ERRORS[code] for code in ("400", "404", "408", "413", "415", "503")
}
_UNAVAILABLE = {"503": _GENERATION_ERRORS["503"]}
_DRAIN_ERRORS = _UTILITY_ERRORS | {
    "403": "A web page sent the request.",
    "415": "The body is compressed or not declared as `application/json`.",
}
_SLEEP_ERRORS = {code: _DRAIN_ERRORS[code] for code in ("400", "403", "503")}
_ADAPTER_ERRORS = _DRAIN_ERRORS | {
    "400": "The name or the adapter cannot be used.",
    "404": "There is no adapter of this name, or the replica loads none by request.",
    "409": "The name is being loaded.",
}


OPERATIONS = shared_operations(
    _GENERATION_ERRORS,
    _UTILITY_ERRORS,
    listing=_UNAVAILABLE,
    ready=_UNAVAILABLE,
    health=_UNAVAILABLE,
    operator={},
) | {
    "/tokenizer_info": json_operation("tokenizerInfo", {"type": "object"}, _UNAVAILABLE),
    "/v2/rerank": json_operation("rerankV2", RerankResponse, _GENERATION_ERRORS, RerankRequest),
    "/load": json_operation("load", LoadResponse, _UNAVAILABLE),
    "/kv_events": Operation("followKvEvents", {EVENTS_MEDIA_TYPE: KvEvent}, _UNAVAILABLE),
    "/drain": json_operation(
        "drain",
        StatusResponse,
        _DRAIN_ERRORS,
        DrainRequest,
        is_body_optional=True,
        refuses_unknown_fields=True,
    ),
    "/v1/load_lora_adapter": Operation(
        "loadLoraAdapter", {"text/plain": TEXT_SCHEMA}, _ADAPTER_ERRORS, LoadLoraAdapterRequest
    ),
    "/v1/unload_lora_adapter": Operation(
        "unloadLoraAdapter", {"text/plain": TEXT_SCHEMA}, _ADAPTER_ERRORS, UnloadLoraAdapterRequest
    ),
    "/undrain": json_operation(
        "undrain", StatusResponse, _UNAVAILABLE | {"403": _DRAIN_ERRORS["403"]}
    ),
    "/sleep": json_operation("sleep", StatusResponse, _SLEEP_ERRORS, query=SleepQuery),
    "/wake_up": json_operation("wakeUp", StatusResponse, _SLEEP_ERRORS, query=WakeUpQuery),
    "/is_sleeping": json_operation("isSleeping", SleepingResponse, _UNAVAILABLE),
}
"""Operations by path."""


Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)
ExchangeHandler = Callable[[HttpExchange], Awaitable[None]]

_DEBUG_LOG_ROUTES = frozenset({"/health", "/ready", "/load", "/kv_events", "/metrics"})

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.server")
_encode = msgspec.json.Encoder().encode


class ReplicaApp:
    """Handles requests. Every request gets exactly one response, and no exception is passed to the server."""

    def __init__(self, replica: ReplicaState) -> None:
        self._replica = replica
        self._scrape = CoalescedScrape(self._render_metrics)
        generation_handlers = GenerationHandlers(replica)
        rows: list[tuple[str, str, ExchangeHandler]] = [
            ("POST", "/v1/chat/completions", generation_handlers.chat),
            ("POST", "/v1/completions", generation_handlers.completion),
            *(("POST", *row) for row in ReplicaPoolingHandlers(replica).handlers.items()),
            *(("POST", *row) for row in AdapterHandlers(replica).handlers.items()),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/detokenize", self._detokenize),
            ("GET", "/tokenizer_info", self._tokenizer_info),
            ("GET", "/v1/models", self._list_models),
            ("GET", "/v1/models/{model...}", self._get_model),
            ("GET", "/health", self._health),
            ("GET", "/ready", self._ready),
            ("GET", "/load", self._load),
            ("GET", "/kv_events", partial(stream_kv_events, replica)),
            ("GET", "/version", self._version),
            ("GET", "/metrics", self._metrics),
            ("POST", "/drain", self._drain),
            ("POST", "/undrain", self._undrain),
            ("POST", "/sleep", self._sleep),
            ("POST", "/wake_up", self._wake_up),
            ("GET", "/is_sleeping", self._is_sleeping),
            ("GET", "/openapi.json", self._openapi),
        ]
        self._openapi_document = b""
        """Rendered when it is first requested."""
        self._routes = RouteTable(Route(*row, OPERATIONS[row[1]]) for row in rows)

    async def __call__(self, request: HttpRequest) -> None:
        """Handle one HTTP request."""
        exchange = HttpExchange(request, self._replica.config)
        self._replica.on_request_start()
        bind_request(exchange.request_id, exchange.get_header(b"traceparent"))
        match = self._routes.find(exchange.path)
        try:
            await run_handler(exchange, self._handle(exchange, match))
        finally:
            self._replica.on_request_end()
            self._record_response(exchange, "other" if match is None else match.label)

    async def _handle(self, exchange: HttpExchange, match: RouteMatch[Route] | None) -> None:
        if match is None:
            raise self._routes.not_found_error(exchange.path)
        check_method(exchange, match.methods)
        exchange.path_parameters = match.parameters
        await match.route.handler(exchange)

    def _record_response(self, exchange: HttpExchange, template: str) -> None:
        status = exchange.status or 499
        metrics = self._replica.metrics
        metrics.http_requests.add((*metrics.model_label, template, str(status)))
        # Gateways and clients keep asking while the model loads. The change of state has a line of its own.
        is_waiting = exchange.error_code == "engine_unavailable"
        log_request = log.debug if is_waiting or template in _DEBUG_LOG_ROUTES else log.info
        log_request(
            "request",
            method=exchange.method,
            route=template,
            status=status,
            error=exchange.error_code,
            ms=exchange.elapsed_ms(),
        )

    # --- model endpoints -------------------------------------------------------------------------

    async def _list_models(self, exchange: HttpExchange) -> None:
        model = self._replica.require_loaded()
        names = self._replica.model_names
        cards = [self._model_card(name, model, None) for name in names]
        if self._replica.adapters is not None:
            cards += [
                self._model_card(name, model, adapter)
                for name, adapter in self._replica.adapters.named.items()
            ]
        model_list = ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id)
        await exchange.send_response(200, _encode(model_list))

    async def _get_model(self, exchange: HttpExchange) -> None:
        model = self._replica.require_loaded()
        name = exchange.path_parameters["model"]
        adapter = await self._replica.preparation_threads.run(
            partial(self._replica.find_adapter, name)
        )
        await exchange.send_response(200, _encode(self._model_card(name, model, adapter)))

    def _model_card(
        self, name: str, model: LoadedModel, adapter: ServedAdapter | None
    ) -> ModelCard:
        base = self._replica.model_names[0]
        digest = self._replica.model_digest if adapter is None else adapter.source.digest
        return ModelCard(
            id=name,
            created=model.created_at if adapter is None else adapter.created_at,
            root=base if adapter is None else digest,
            parent=None if adapter is None else base,
            max_model_len=model.ready.max_model_len,
            tasks=sorted(model.tasks),
            digest=digest or None,
        )

    async def _tokenize(self, exchange: HttpExchange) -> None:
        model = self._replica.require_loaded()

        def tokenize(
            body: TokenizeRequest,
            *,
            refuse_unknown: bool,
        ) -> tuple[TokenizeResponse, tuple[str, ...]]:
            adapter = self._replica.find_adapter(body.model)
            processor = model.processor if adapter is None else adapter.processor
            prompt = processor.tokenize(body, refuse_unknown=refuse_unknown)
            ids = prompt.token_ids
            names = map(model.text_processing.tokenizer.vocabulary_token, ids)
            response = TokenizeResponse(
                count=len(ids),
                max_model_len=model.ready.max_model_len,
                tokens=ids,
                token_strs=list(names) if body.return_token_strs else None,
            )
            return response, prompt.ignored_fields

        await self._process(exchange, TokenizeRequest, tokenize)

    async def _detokenize(self, exchange: HttpExchange) -> None:
        model = self._replica.require_loaded()

        def detokenize(
            body: DetokenizeRequest,
            **_: bool,
        ) -> tuple[DetokenizeResponse, tuple[str, ...]]:
            self._replica.find_adapter(body.model)
            return DetokenizeResponse(prompt=model.processor.detokenize(body)), ()

        await self._process(exchange, DetokenizeRequest, detokenize)

    async def _process(
        self,
        exchange: HttpExchange,
        body_type: type[Body],
        process: Callable[..., tuple[object, tuple[str, ...]]],
    ) -> None:
        """Parse a body, and send what `process` returns for it. Both run in a thread.

        `process` gets the body and, as `refuse_unknown`, whether to refuse what it would ignore. It returns the
        response and the paths of what it ignored.
        """
        raw = await exchange.read_body()
        refuse_unknown = refuses_unknown_fields(self._replica.config, exchange)

        def run() -> tuple[bytes, tuple[str, ...]]:
            body, unknown = parse_request_body(body_type, raw, refuse_unknown=refuse_unknown)
            response, ignored = process(body, refuse_unknown=refuse_unknown)
            return _encode(response), unknown + ignored

        response, ignored = await self._replica.preparation_threads.run(run)
        report_ignored_fields(exchange, ignored)
        await exchange.send_response(200, response)

    async def _tokenizer_info(self, exchange: HttpExchange) -> None:
        model = self._replica.require_loaded()
        await exchange.send_response(200, _encode(model.text_processing.tokenizer_info))

    # --- operator endpoints ----------------------------------------------------------------------

    async def _health(self, exchange: HttpExchange) -> None:
        if self._replica.engine.state == "failed":
            raise self._replica.unavailable_error()
        await exchange.send_response(200, _encode(StatusResponse(status="ok")))

    async def _ready(self, exchange: HttpExchange) -> None:
        self._replica.require_ready()
        await exchange.send_response(200, _encode(StatusResponse(status="ready")))

    async def _load(self, exchange: HttpExchange) -> None:
        await exchange.send_response(
            200, _encode(self._replica.load_report(exchange.get_header(b"x-argosy-gateway")))
        )

    async def _version(self, exchange: HttpExchange) -> None:
        await exchange.send_response(200, _encode(VersionResponse(version=VERSION)))

    async def _openapi(self, exchange: HttpExchange) -> None:
        if not self._openapi_document:
            self._openapi_document = render_openapi(
                "Argosy replica",
                "The OpenAI API for one model, and endpoints for operators.",
                self._routes.list_operations(),
                has_keys=False,
            )
        await exchange.send_response(200, self._openapi_document)

    async def _metrics(self, exchange: HttpExchange) -> None:
        await exchange.send_response(200, await self._scrape.get_text(), METRICS_TYPE)

    async def _render_metrics(self) -> bytes:
        replica = self._replica
        engine = replica.engine
        replica.metrics.update_stats(
            engine.stats,
            ready=replica.state == "ready",
            memory_bytes=engine.usage.memory_bytes,
            memory_bound_bytes=engine.memory_bound_bytes,
            sleep=engine.sleep_stats,
        )
        text = await asyncio.to_thread(replica.metrics.exposition)
        if replica.config.vllm_metrics:
            replica.update_lora_metrics()
            text += await asyncio.to_thread(replica.metrics.vllm_exposition)
        return text

    async def _drain(self, exchange: HttpExchange) -> None:
        check_no_page_request(exchange)
        raw = await exchange.read_body()
        if raw:
            check_json_content_type(exchange)
        body = parse_body(DrainRequest, raw) if raw.strip() else DrainRequest()
        self._replica.drain(body.deadline_s)
        await exchange.send_response(200, _encode(StatusResponse(status="draining")))

    async def _undrain(self, exchange: HttpExchange) -> None:
        check_no_page_request(exchange)
        self._replica.undrain()
        await self._send_state(exchange)

    async def _sleep(self, exchange: HttpExchange) -> None:
        check_no_page_request(exchange)
        query = parse_query(SleepQuery, dict(parse_qsl(exchange.query.decode("latin-1"))))
        await self._replica.sleep(query.level, query.deadline_s)
        await self._send_state(exchange)

    async def _wake_up(self, exchange: HttpExchange) -> None:
        check_no_page_request(exchange)
        await self._replica.wake_up(parse_qs(exchange.query.decode("latin-1")).get("tags", []))
        await self._send_state(exchange)

    async def _is_sleeping(self, exchange: HttpExchange) -> None:
        is_sleeping = self._replica.is_sleeping
        await exchange.send_response(200, _encode(SleepingResponse(is_sleeping=is_sleeping)))

    async def _send_state(self, exchange: HttpExchange) -> None:
        await exchange.send_response(200, _encode(StatusResponse(status=self._replica.state)))
