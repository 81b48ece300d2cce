"""Handlers of Ollama's API. Models are loaded by replicas, so requests that would load or change one have no effect."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from argosy.gateway.auth import has_role
from argosy.gateway.dialects.dialect import (
    name_ignored_fields,
    start_rendering,
    start_translation,
)
from argosy.gateway.http_route import Handler
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.pool import Pool
from argosy.gateway.principal import KEEP_ALIVE_FLAG, Principal
from argosy.http_server import HttpExchange
from argosy.protocol import ApiError, ModelCard, ModelDescription, parse_body
from argosy.protocol.dialects import (
    NDJSON_CONTENT_TYPE,
    ObjectTranslator,
    OllamaModelRequest,
    OllamaOutput,
    RenderedRequest,
    TranslatedRequest,
    encode_ollama_error,
    format_timestamp,
    is_load_request,
    strip_tag,
    translate_ollama_chat,
    translate_ollama_embed,
    translate_ollama_embeddings,
    translate_ollama_generate,
)

OLLAMA_VERSION = "0.18.3"
"""Version of Ollama whose API is served. Clients parse it as three numbers."""
MAX_KEEP_ALIVE_S = 3600.0
"""Longest time for which a project may keep a model awake without requests."""
_ARCHITECTURE = "argosy"
_CAPABILITIES = ("completion", "tools", "thinking")
_NO_VECTORS = b'{"data":[]}'
"""Response to a request for the embeddings of no texts."""
_ALWAYS = "9999-12-31T23:59:59Z"
"""Time at which a model leaves memory."""
_encode = msgspec.json.encode


ModelHandler = Callable[[HttpExchange, Principal, str], Awaitable[None]]
"""Handler of a request about the model with a name."""


class OllamaHandlers:
    """Handlers that run Ollama's requests as chats, text completions or embeddings.

    Args:
        models: The models.
        chat: Handler of chats.
        completion: Handler of text completions.
        embeddings: Handler of embeddings.
        tokenizer_info: Handler of `/tokenizer_info`, which is given the model's name.
        refuse_unknown_fields: Whether unknown fields are errors.
    """

    def __init__(
        self,
        models: ModelRouter,
        chat: Handler,
        completion: Handler,
        embeddings: Handler,
        tokenizer_info: ModelHandler,
        *,
        refuse_unknown_fields: bool,
    ) -> None:
        self._models = models
        self._tokenizer_info = tokenizer_info
        self._chat = chat
        self._completion = completion
        self._embeddings = embeddings
        self._refuse_unknown = refuse_unknown_fields

    async def chat(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /api/chat`."""
        await self._run(exchange, principal, translate_ollama_chat)

    async def generate(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /api/generate`."""
        await self._run(exchange, principal, translate_ollama_generate)

    async def embed(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /api/embed`."""
        body = await exchange.read_body()
        request = await exchange.parse_body(
            body,
            partial(translate_ollama_embed, clock=time.time, refuse_unknown=self._refuse_unknown),
        )
        await self._run_embedding(exchange, principal, request)

    async def embeddings(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /api/embeddings`, which embeds one text."""
        body = await exchange.read_body()
        request = await exchange.parse_body(
            body, partial(translate_ollama_embeddings, refuse_unknown=self._refuse_unknown)
        )
        await self._run_embedding(exchange, principal, request)

    async def _run_embedding(
        self, exchange: HttpExchange, principal: Principal, request: RenderedRequest
    ) -> None:
        if not request.body["input"]:  # such a request loads the model
            self._models.resolve_target(request.body["model"], principal, exchange.headers)
            await exchange.send_response(200, request.render(_NO_VECTORS))
            return
        start_rendering(exchange, request, encode_ollama_error)
        await self._embeddings(exchange, principal)

    async def _run(
        self,
        exchange: HttpExchange,
        principal: Principal,
        translate: Callable[..., TranslatedRequest[OllamaOutput]],
    ) -> None:
        body = await exchange.read_body()
        request = await exchange.parse_body(
            body, partial(translate, clock=time.time, refuse_unknown=self._refuse_unknown)
        )
        model, keep_alive_s = request.body["model"], request.output.keep_alive_s
        if is_load_request(request):
            pool = self._models.resolve_target(model, principal, exchange.headers).pool
            if keep_alive_s != 0.0:
                pool.record_unserved(time.monotonic())  # wakes a model up that sleeps
            self._apply_keep_alive(exchange, principal, pool, keep_alive_s)
            request.output.finish_load()
            content = _encode(request.output.build_response())
            await exchange.send_response(200, content)
            return
        if keep_alive_s is not None:
            pool = self._models.find_target(model, principal, exchange.headers).pool
            self._apply_keep_alive(exchange, principal, pool, keep_alive_s)
        request.output.read_first_output_s = exchange.read_first_output_s
        start_translation(exchange, request, encode_ollama_error)
        handler = self._completion if request.is_completion else self._chat
        await handler(exchange, principal)

    def _apply_keep_alive(
        self, exchange: HttpExchange, principal: Principal, pool: Pool, keep_alive_s: float | None
    ) -> None:
        """Keep a model that may sleep in memory for this time without requests. Names the field if it has no effect.

        Only operators of the gateway may keep it for ever. Projects and keys need a flag, and their time is bounded.
        """
        if keep_alive_s is None:
            return
        is_operator = has_role(principal, "operator", "gateway")
        if pool.sleep is None or not (is_operator or KEEP_ALIVE_FLAG in principal.flags):
            name_ignored_fields(exchange, ("keep_alive",))
            return
        pool.keep_alive_s = keep_alive_s if is_operator else min(keep_alive_s, MAX_KEEP_ALIVE_S)

    async def tags(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /api/tags`: the models."""
        descriptions = self._descriptions
        cards = self._models.list_models(principal).data
        models = [_describe_model(card, descriptions.get(card.base_model)) for card in cards]
        await _send(exchange, {"models": models})

    async def running(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /api/ps`: the models with a replica that is ready."""
        available = {pool.model for pool in self._models.all_pools if pool.is_available()}
        descriptions = self._descriptions
        models = [
            {
                **_describe_model(card, descriptions.get(card.base_model)),
                "expires_at": _ALWAYS,
                "size_vram": 0,
                "context_length": card.max_model_len or 0,
            }
            for card in self._models.list_models(principal).data
            if card.base_model in available
        ]
        await _send(exchange, {"models": models})

    async def show(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /api/show`: details of one model."""
        body = await exchange.read_body()
        request = await exchange.parse_body(body, partial(parse_body, OllamaModelRequest))
        card = self._models.get_model(request.require_model(), principal)
        description = self._descriptions.get(card.base_model)
        described = _describe_model(card, description)
        family = described["details"]["family"]
        info: dict[str, Any] = {
            "general.architecture": family,
            "general.basename": card.id,
            f"{family}.context_length": card.max_model_len or 0,
        }
        if description is not None:
            info["general.parameter_count"] = description.parameters
        shown = {
            **{name: described[name] for name in ("modified_at", "details")},
            "modelfile": "",
            "parameters": "",
            "template": "",
            "model_info": info,
            "capabilities": _list_capabilities(card.tasks),
        }
        is_available = any(
            pool.model == card.base_model and pool.is_available() for pool in self._models.all_pools
        )
        if description is None or not is_available:  # only Argosy's replicas have the template
            await _send(exchange, shown)
            return
        reader = ObjectTranslator(
            lambda info: shown | {"template": info.get("chat_template") or ""}, encode_ollama_error
        )
        exchange.translate(b"", reader)
        try:
            await self._tokenizer_info(exchange, principal, card.id)
        except ApiError as error:
            if error.status != 503:
                raise
            exchange.stop_translating()  # no replica answers, so the template is unknown
            await _send(exchange, shown)

    @property
    def _descriptions(self) -> dict[str, ModelDescription | None]:
        """Descriptions by the names of the pools' models."""
        return {pool.model: pool.description for pool in self._models.all_pools}

    async def version(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /api/version`."""
        del principal
        await _send(exchange, {"version": OLLAMA_VERSION})

    async def home(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /`, by which clients test whether a server is Ollama."""
        del principal
        await exchange.send_response(200, b"Ollama is running", b"text/plain; charset=utf-8")

    async def pull(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /api/pull`, which has nothing to do for a model that is served.

        Raises:
            ApiError: 404 if the model is not served.
        """
        body = await exchange.read_body()
        request = await exchange.parse_body(body, partial(parse_body, OllamaModelRequest))
        self._models.get_model(request.require_model(), principal)
        content_type = b"application/json" if request.stream is False else NDJSON_CONTENT_TYPE
        await exchange.send_response(200, _encode({"status": "success"}) + b"\n", content_type)

    async def find_blob(self, exchange: HttpExchange, principal: Principal) -> None:
        """`HEAD /api/blobs/{digest}`, by which clients ask whether they have to upload a file of a model.

        Raises:
            ApiError: 404 always, since no files are kept.
        """
        del exchange, principal
        raise ApiError(404, "not_found", "This server keeps no files of models.")

    async def refuse(self, exchange: HttpExchange, principal: Principal) -> None:
        """Paths of Ollama that manage models.

        Raises:
            ApiError: 501 always.
        """
        del principal
        message = (
            f"{exchange.path[:200]} is not supported. "
            "Change the gateway's configuration to serve other models."
        )
        raise ApiError(501, "not_implemented", message)


def _list_capabilities(tasks: list[str] | None) -> list[str]:
    """Return what a model can do in Ollama's terms. A model whose tasks are unknown generates."""
    if tasks is None:
        return [*_CAPABILITIES]
    generation = _CAPABILITIES if "generate" in tasks else ()
    return [*generation, *(("embedding",) if "embed" in tasks else ())]


async def _send(exchange: HttpExchange, content: dict[str, Any]) -> None:
    await exchange.send_response(200, _encode(content))


def _format_count(count: int) -> str:
    """Format a number of parameters as Ollama does."""
    unit, name = next(
        (each for each in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if count >= each[0]), (1.0, "")
    )
    return f"{count / unit:.1f}".removesuffix(".0") + name


def _describe_model(card: ModelCard, model: ModelDescription | None) -> dict[str, Any]:
    family = _ARCHITECTURE if model is None else model.family.lower()
    return {
        "name": card.id,
        "model": strip_tag(card.id),
        "modified_at": format_timestamp(card.created),
        "size": 0 if model is None else model.size_bytes,
        "digest": hashlib.sha256(card.id.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "" if model is None else model.format,
            "family": family,
            "families": [family],
            "parameter_size": "" if model is None else _format_count(model.parameters),
            "quantization_level": "" if model is None else model.quantization,
        },
    }
