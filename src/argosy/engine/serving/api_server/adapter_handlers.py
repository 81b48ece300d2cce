"""Handlers of vLLM's endpoints that load LoRA adapters at run time and remove them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from argosy.engine.serving.api_server.adapter_registry import AdapterRegistry
from argosy.engine.serving.api_server.headers import (
    refuses_unknown_fields,
    report_ignored_fields,
)
from argosy.engine.serving.api_server.replica_state import ReplicaState
from argosy.http_server import HttpExchange, check_json_content_type, check_no_page_request
from argosy.protocol import (
    ApiError,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
    parse_request_body,
)

TEXT_CONTENT_TYPE = b"text/plain; charset=utf-8"
Body = TypeVar("Body", LoadLoraAdapterRequest, UnloadLoraAdapterRequest)


class AdapterHandlers:
    """Handlers for operators, which need `--allow-adapter-loading`. The messages are vLLM's."""

    def __init__(self, replica: ReplicaState) -> None:
        self._replica = replica
        self.handlers: dict[str, Callable[[HttpExchange], Awaitable[None]]] = {
            "/v1/load_lora_adapter": self._load,
            "/v1/unload_lora_adapter": self._unload,
        }

    async def _load(self, exchange: HttpExchange) -> None:
        body, adapters = await self._parse(exchange, LoadLoraAdapterRequest)
        prepare = partial(
            adapters.prepare_load, body.lora_name, body.lora_path, in_place=body.load_inplace
        )
        adapter = await self._replica.preparation_threads.run(prepare)
        await adapters.load(body.lora_name, adapter, is_pinned=body.pinned)
        await _send_success(exchange, body.lora_name, "added")

    async def _unload(self, exchange: HttpExchange) -> None:
        body, adapters = await self._parse(exchange, UnloadLoraAdapterRequest)
        adapters.unload(body.lora_name)
        await _send_success(exchange, body.lora_name, "removed")

    async def _parse(
        self, exchange: HttpExchange, body_type: type[Body]
    ) -> tuple[Body, AdapterRegistry]:
        """Parse a body, and return it with the registry that it changes.

        Raises:
            ApiError: 404 if the replica does not allow it.
        """
        check_no_page_request(exchange)
        self._replica.require_ready()
        raw = await exchange.read_body()
        check_json_content_type(exchange)
        config, adapters = self._replica.config, self._replica.adapters
        if adapters is None or not config.allow_adapter_loading:
            message = "This replica loads no adapters by request. Start it with --enable-lora --allow-adapter-loading."
            raise ApiError(404, "not_found", message)
        body, ignored = parse_request_body(
            body_type, raw, refuse_unknown=refuses_unknown_fields(config, exchange)
        )
        report_ignored_fields(exchange, ignored)
        return body, adapters


async def _send_success(exchange: HttpExchange, name: str, change: str) -> None:
    text = f"Success: LoRA adapter '{name}' {change} successfully."
    await exchange.send_response(200, text.encode(), TEXT_CONTENT_TYPE)
