"""State of the Responses API behind the event loop: calls of the store in threads, with errors for clients."""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec
import structlog
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from argosy.blob_store import BlobStoreError, BlobStoreFullError
from argosy.deployment import ContentRule
from argosy.gateway.content_session import ContentSession
from argosy.gateway.event_loop import TenantSlots
from argosy.gateway.filters import LimitFilter
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import CHAT
from argosy.gateway.request_fields import parse_request_fields
from argosy.http_server import HttpExchange
from argosy.process import run_in_daemon_thread
from argosy.protocol import ApiError, JsonObject
from argosy.protocol.dialects import ReasoningCipher
from argosy.store import (
    FileInUseError,
    HistoryTooLongError,
    IdempotencyStore,
    ItemOwner,
    NotFoundError,
    StorageQuotaError,
    Store,
    StoredResponse,
    StoreError,
    UploadError,
)
from argosy.telemetry import RepeatedWarning

T = TypeVar("T")

STORE_TIMEOUT_S = 5.0
"""Time after which a request that needs the store fails."""
DAY_S = 86_400.0
EXPIRY_INTERVAL_S = 600.0
START_DELAY_S = 5.0
"""Time until a gateway reads what tenants store. Until then it has more urgent work."""
MAX_CONCURRENT_PER_TENANT = 8
"""Maximum concurrent requests of one tenant that read or store items, each of which may take 32 MiB."""
RETRY_AFTER_S = 5.0
CHAT_ID_PREFIX = "chatcmpl-"
"""Beginning of the ids of stored chats, which are no responses that can be continued."""
STORAGE_QUOTA_EXCEEDED = "storage_quota_exceeded"
_SECRET_NAME = "reasoning"  # noqa: S105 - the name of a key, not the key
_KEY_BYTES = 64
_ENCRYPTED_PREFIX = "argosy1."
"""Start of every encrypted text, with the version of its format."""

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


def item_owner(principal: Principal) -> ItemOwner:
    """Return the owner of a principal's responses: its project, or its user or key without a project."""
    return ItemOwner(principal.organisation, principal.project or principal.user or principal.key)


def check_response_id(response_id: str) -> None:
    """Raise ApiError (404) for the id of a stored chat, which the store of responses has too."""
    if response_id.startswith(CHAT_ID_PREFIX):
        message = f"{response_id[:200]!r} is a chat completion. Read it from /v1/chat/completions."
        raise ApiError(404, "not_found", message)


class ResponseState:
    """Stored responses and conversations. Not thread-safe: use it from one event loop.

    Args:
        store: The store; None for a gateway without one, which stores nothing.
        keep_days: Days to keep responses and conversations after their last use.
        idempotency_store: Idempotency keys of background responses; None to ignore keys.
        limits: Limits that requests for stored responses and conversations count against; None for none.
        models: The models, whose content rules say how items are stored; None to store them as they are.
        max_file_bytes: Maximum size of a file.
    """

    def __init__(
        self,
        store: Store | None,
        keep_days: int = 30,
        idempotency_store: IdempotencyStore | None = None,
        limits: LimitFilter | None = None,
        models: ModelRouter | None = None,
        max_file_bytes: int = 0,
    ) -> None:
        self.max_file_bytes = max_file_bytes
        self._store = store
        self._models = models
        self._limits = limits
        self.slots = TenantSlots(MAX_CONCURRENT_PER_TENANT)
        self._full_owners: set[ItemOwner] = set()
        """Tenants whose last response could not be stored, because they store too much."""
        self._stored_bytes: dict[str, int] = {}
        """Stored bytes by tenant, as of the last reading."""
        self.idempotency_store = idempotency_store
        self.retention_s = keep_days * DAY_S
        self._store_problem, self._space_problem = RepeatedWarning(log), RepeatedWarning(log)
        self._cipher_key: bytes | None = (
            None if store is not None else secrets.token_bytes(_KEY_BYTES)
        )

    @property
    def has_store(self) -> bool:
        """Whether responses can be stored."""
        return self._store is not None

    @property
    def store(self) -> Store:
        """The store.

        Raises:
            ApiError: 404 if there is none.
        """
        if self._store is None:
            message = (
                "This gateway has no store, so it keeps no responses. Send the whole conversation in 'input', "
                "or configure a store."
            )
            raise ApiError(404, "no_store", message)
        return self._store

    async def build_cipher(self, principal: Principal) -> ReasoningCipher:
        """Return the cipher for the reasoning of a principal's responses."""
        if self._cipher_key is None:
            self._cipher_key = await self.call(
                self.store.secrets.get_or_create, _SECRET_NAME, _KEY_BYTES
            )
        owner = item_owner(principal)
        return _build_reasoning_cipher(self._cipher_key, f"{owner.organisation}\0{owner.owner}")

    async def call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:  # noqa: ANN401 - those of the function
        """Call a method of the store in a thread.

        Raises:
            ApiError: As `translate_errors` does, also if the store does not respond.
        """
        with self.translate_errors():
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await run_in_daemon_thread(lambda: function(*arguments, **options))

    @contextlib.contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Answer errors of the store.

        Raises:
            ApiError: 404 if a record does not exist. 409 if a file is in use. 400 if an upload has ended. 413 if a
                conversation is too long, or the tenant stores too much. 507 without space. 503 if the store fails.
        """
        try:
            yield
        except NotFoundError as error:
            raise ApiError(404, "not_found", str(error)) from error
        except FileInUseError as error:
            raise ApiError(409, "file_in_use", str(error)) from error
        except UploadError as error:
            raise ApiError(400, "invalid_upload", str(error)) from error
        except HistoryTooLongError as error:
            raise ApiError(413, "request_too_large", str(error)) from error
        except StorageQuotaError as error:
            raise ApiError(413, STORAGE_QUOTA_EXCEEDED, str(error)) from error
        except BlobStoreFullError as error:
            self._space_problem.report("blob_store_full", str(error))
            message = (
                "The server has no space for the file. Try again when its operator has freed some."
            )
            raise ApiError(507, "storage_full", message) from error
        except (BlobStoreError, StoreError, TimeoutError) as error:
            reason = str(error) or "the store does not respond"
            self._store_problem.report("response_store_failed", reason)
            message = "What is stored cannot be reached at the moment. Try again shortly."
            raise ApiError(
                503, "store_unavailable", message, retry_after_s=RETRY_AFTER_S
            ) from error

    async def load_history(
        self, principal: Principal, previous_response_id: str
    ) -> list[dict[str, Any]]:
        """Return the items of a response and of those that it continues.

        Raises:
            ApiError: 400 if one of them is not stored.
        """
        try:
            check_response_id(previous_response_id)
            return await self.call(
                self.store.responses.load_history,
                item_owner(principal),
                previous_response_id,
                self.retention_s,
            )
        except ApiError as error:
            if error.status != 404:
                raise
            raise ApiError(
                400, "previous_response_not_found", error.message, param="previous_response_id"
            ) from error

    async def find_items(
        self, principal: Principal, item_ids: Sequence[str]
    ) -> Mapping[str, dict[str, Any]]:
        """Return stored items by their ids, without those that are not stored."""
        if not item_ids or self._store is None:
            return {}
        owner = item_owner(principal)
        return await self.call(self._store.responses.find_items, owner, item_ids)

    @contextlib.asynccontextmanager
    async def reserve_request(
        self, exchange: HttpExchange, principal: Principal, *, requests: int = 1
    ) -> AsyncIterator[None]:
        """Reserve a request for work with stored responses, and count `requests`. Holds one of the tenant's `slots`.

        Raises:
            ApiError: 429 if the request does not fit. 503 if the usage is unknown and the project fails closed.
        """
        async with (
            self.slots.hold(exchange, principal.tenant),
            self.count_request(exchange, principal, requests=requests),
        ):
            yield

    def count_request(
        self, exchange: HttpExchange, principal: Principal, *, requests: int = 1
    ) -> AbstractAsyncContextManager[None]:
        """Reserve a request like `reserve_request`, without a slot."""
        if self._limits is None:
            return contextlib.nullcontext()
        headers = exchange.extra_headers if requests else []
        return self._limits.reserve_request(
            principal, "", headers, concurrency=0, requests=requests
        )

    async def check_room(self, principal: Principal, needed: int) -> None:
        """Check that a response can be stored, if the last one could not.

        Raises:
            ApiError: 413 if the tenant has no room for `needed` bytes.
        """
        owner = item_owner(principal)
        if owner in self._full_owners:
            await self.call(self.store.stored_bytes.check_room, owner, needed)
            self._full_owners.discard(owner)

    def choose_filter(
        self, exchange: HttpExchange, principal: Principal, body: JsonObject | None = None
    ) -> None:
        """Choose how items of a request are stored before its chat runs, or if there is none.

        Args:
            exchange: The request.
            principal: Its sender.
            body: Its chat; None if it has none. Conditions of models and fields then hold.
        """
        if self._models is None or not self._models.rules[ContentRule]:
            return
        fields = pool = None
        if body is not None:
            with contextlib.suppress(ApiError):  # of a chat that will fail
                encoded = msgspec.json.encode(body)
                fields = parse_request_fields(encoded, CHAT.prompt_fields[0])
                pool = self._models.find_target(
                    *(fields.model, principal, exchange.headers, fields, exchange.request_id)
                ).pool
        rule = self._models.find_rule(
            *(ContentRule, principal, exchange.headers, fields, exchange.request_id, pool)
        )
        exchange.filter_stored = None if rule is None else ContentSession(rule).filter_stored

    @staticmethod
    async def redact(exchange: HttpExchange, value: T) -> T:
        """Return a JSON value as the content rule of its request lets it be stored."""
        if exchange.filter_stored is None:
            return value
        redacted: T = await exchange.filter_stored(value)
        return redacted

    async def redact_response(
        self, exchange: HttpExchange, response: StoredResponse
    ) -> StoredResponse:
        """Return a response as the content rule of its request lets it be stored."""
        parts = await self.redact(exchange, [response.body, response.input, response.output])
        return msgspec.structs.replace(response, body=parts[0], input=parts[1], output=parts[2])

    async def save(
        self, exchange: HttpExchange, principal: Principal, response: StoredResponse
    ) -> None:
        """Store a response that has ended. The client receives it even if this fails, so errors are only logged."""
        owner = item_owner(principal)
        response = await self.redact_response(exchange, response)
        try:
            await self.call(self.store.responses.create, owner, response, self.retention_s)
        except ApiError as error:
            self._note_failure(owner, error)
            log.warning("response_not_stored", response=response.id, reason=error.message)

    async def append_items(
        self,
        exchange: HttpExchange,
        principal: Principal,
        conversation_id: str,
        items: Sequence[dict[str, Any]],
    ) -> None:
        """Append items to a conversation. Errors are only logged, since the client has its response."""
        owner, conversations = item_owner(principal), self.store.conversations
        items = await self.redact(exchange, items)
        try:
            await self.call(
                conversations.append_items, owner, conversation_id, items, self.retention_s
            )
        except ApiError as error:
            self._note_failure(owner, error)
            log.warning(
                "conversation_not_extended", conversation=conversation_id, reason=error.message
            )

    def _note_failure(self, owner: ItemOwner, error: ApiError) -> None:
        if error.code == STORAGE_QUOTA_EXCEEDED:
            self._full_owners.add(owner)

    def read_gauges(self) -> dict[str, Any]:
        """Return the fields of `GatewayGauges` about what is stored."""
        return {"stored_bytes": self._stored_bytes}

    async def maintain_forever(self) -> None:
        """Delete expired responses, conversations and files, give their space back, and read what tenants store.

        Runs until it is cancelled.
        """
        store = self.store
        await asyncio.sleep(START_DELAY_S)
        while True:
            await self._repeat(self._read_stored_bytes)
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            await self._repeat(store.responses.delete_expired)
            await self._repeat(store.conversations.delete_expired)
            await self._repeat(store.files.delete_expired)
            if store.files.has_blobs:
                await self._repeat(store.files.remove_blobs)
            await self._repeat(store.give_back_space)

    @staticmethod
    async def _repeat(step: Callable[[], object]) -> None:
        """Call a method of the store in threads until it has nothing more to do. Errors are only logged."""
        try:
            while await run_in_daemon_thread(step):
                pass
        except (StoreError, BlobStoreError) as error:
            log.warning("response_expiry_failed", reason=str(error))

    def _read_stored_bytes(self) -> None:
        stored: defaultdict[str, int] = defaultdict(int)
        for (organisation, owner), size in self.store.stored_bytes.read_totals().items():
            stored[owner or organisation] += size
        self._stored_bytes = stored


def _build_reasoning_cipher(key: bytes, tenant: str) -> ReasoningCipher:
    """Build the cipher of reasoning that one tenant's clients keep for the gateway (`reasoning.encrypted_content`).

    AES-SIV (RFC 5297) is deterministic, so a repeated response has the same bytes. The tenant is authenticated with the
    text, so no tenant can have another one's reasoning decrypted.

    Args:
        key: Random key of `_KEY_BYTES` bytes.
        tenant: Organisation and owner of the responses.
    """
    cipher, associated = AESSIV(key), [tenant.encode()]

    def encrypt(text: str) -> str:
        sealed = cipher.encrypt(text.encode("utf-8", "surrogatepass"), associated) if text else b""
        return _ENCRYPTED_PREFIX + urlsafe_b64encode(sealed).decode()

    def decrypt(text: str) -> str | None:
        if not text.startswith(_ENCRYPTED_PREFIX):
            return None
        try:
            sealed = urlsafe_b64decode(text.removeprefix(_ENCRYPTED_PREFIX))
            if not sealed:
                return ""
            return cipher.decrypt(sealed, associated).decode("utf-8", "surrogatepass")
        except (InvalidTag, ValueError, binascii.Error):
            return None

    return ReasoningCipher(encrypt, decrypt)
