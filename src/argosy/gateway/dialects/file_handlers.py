"""Handlers of files and of uploads in parts, in the shapes of OpenAI and, by their header, of Anthropic."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from argosy.gateway.dialects.anthropic_handlers import VERSION_HEADER
from argosy.gateway.dialects.response_state import ResponseState, item_owner
from argosy.gateway.dialects.stored_response_handlers import ItemPageQuery, parse_query_string
from argosy.gateway.event_loop import TenantSlots
from argosy.gateway.principal import Principal
from argosy.http_server import HttpExchange, MultipartForm
from argosy.process import iterate_in_thread, run_in_daemon_thread
from argosy.protocol import ApiError, invalid_request, parse_body, parse_query
from argosy.protocol.dialects import format_timestamp
from argosy.store import NEVER, FileStore, ItemOwner, StoredFile, StoredUpload, WrittenBlob

MAX_CONCURRENT_TRANSFERS = 8
"""Uploads and downloads of one tenant at a time. Further ones wait, with their bodies unread."""
MAX_PART_BYTES = 64 * 1024 * 1024
"""Size of a part of an upload."""
BATCH_LIFETIME_S = 30 * 86_400
"""Lifetime of files for batches without one of their own."""
MAX_LISTED_FILES = 10_000
MAX_NAME_CHARS = 255
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,100}/[\w.+-]{1,100}", re.ASCII)
_DOWNLOAD_TYPE = b"application/octet-stream"
_encode = msgspec.json.encode

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
_Lifetime = Annotated[int, Meta(ge=3600, le=30 * 86_400)]


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: _Lifetime


class FileFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the form of `POST /v1/files` beside the file."""

    purpose: Purpose
    anchor: Literal["created_at"] | None = msgspec.field(default=None, name="expires_after[anchor]")
    seconds: _Lifetime | None = msgspec.field(default=None, name="expires_after[seconds]")


class AnthropicFileFields(msgspec.Struct, frozen=True, kw_only=True):
    """The same of Anthropic's clients."""

    expires_in_seconds: Annotated[int, Meta(ge=3600, le=90 * 86_400)] | None = None


class CreateUploadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/uploads`."""

    bytes: Annotated[int, Meta(ge=1)]
    filename: Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    mime_type: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class CompleteUploadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /v1/uploads/{id}/complete`."""

    part_ids: Annotated[list[str], Meta(min_length=1, max_length=10_000)]
    md5: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{32}$(?!\n)")] | None = None


class FilePageQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query parameters of `GET /v1/files`. `page` and smaller pages are Anthropic's."""

    after: str | None = None
    page: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_FILES)] | None = None
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


_FILE_FIELD = {"type": "string", "format": "binary"}
FILE_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": _FILE_FIELD,
        "purpose": {"enum": sorted(get_args(Purpose))},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 30 * 86_400},
    },
}
"""Schema of the form of `POST /v1/files`."""
PART_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": _FILE_FIELD},
}


class FileHandlers:
    """Handlers of `/v1/files`, `/v1/uploads` and the paths below.

    Args:
        state: The store.
    """

    def __init__(self, state: ResponseState) -> None:
        self._state = state
        self._max_file_bytes = state.max_file_bytes
        self._transfers = TenantSlots(MAX_CONCURRENT_TRANSFERS)
        self._arriving_bytes: defaultdict[ItemOwner, int] = defaultdict(int)
        """Bytes by tenant that its uploads may still add to what it stores."""

    # --- files -----------------------------------------------------------------------------------

    async def create(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/files`."""
        owner, files = item_owner(principal), self._files()
        is_anthropic = VERSION_HEADER in exchange.headers
        async with self._transfers.hold(exchange, principal.tenant):
            form = self._open_form(exchange, "file")
            async with self._receive(exchange, owner, form, "file-") as written:
                file = await self._state.call(
                    files.create,
                    *(owner, written),
                    filename=_clean_name(form.filename or ""),
                    media_type=_clean_media_type(form.media_type),
                    **_read_fields(form, is_anthropic=is_anthropic),
                )
        await _send(exchange, _describe_anthropic(file) if is_anthropic else describe_file(file))

    async def list_files(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/files`."""
        query = parse_query(FilePageQuery, parse_query_string(exchange))
        is_anthropic = VERSION_HEADER in exchange.headers
        found, has_more = await self._state.call(
            self._files().list_files,
            item_owner(principal),
            after=query.page if is_anthropic else query.after,
            limit=query.limit or (20 if is_anthropic else MAX_LISTED_FILES),
            is_descending=query.order == "desc",
            purpose=query.purpose,
        )
        if is_anthropic:
            next_page = found[-1].id if has_more else None
            await _send(
                exchange, {"data": list(map(_describe_anthropic, found)), "next_page": next_page}
            )
        else:
            page = ItemPageQuery.build_page(list(map(describe_file, found)), has_more=has_more)
            await exchange.send_response(200, page)

    async def get(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/files/{id}`."""
        file = await self._get(exchange, principal)
        is_anthropic = VERSION_HEADER in exchange.headers
        await _send(exchange, _describe_anthropic(file) if is_anthropic else describe_file(file))

    async def delete(self, exchange: HttpExchange, principal: Principal) -> None:
        """`DELETE /v1/files/{id}`."""
        file_id = exchange.path_parameters["id"]
        await self._state.call(self._files().delete, item_owner(principal), file_id)
        if VERSION_HEADER in exchange.headers:
            await _send(exchange, {"id": file_id, "type": "file_deleted"})
        else:
            await _send(exchange, {"id": file_id, "object": "file", "deleted": True})

    async def download(self, exchange: HttpExchange, principal: Principal) -> None:
        """`GET /v1/files/{id}/content`, as a whole or the range of the header `Range`."""
        owner, files = item_owner(principal), self._files()
        file = await self._get(exchange, principal)
        exchange.extra_headers += [
            (b"accept-ranges", b"bytes"),
            (b"etag", f'"{file.sha256}"'.encode()),
            # A page of the console's origin could otherwise be a file that a client has uploaded.
            (b"content-disposition", b"attachment"),
            (b"x-content-type-options", b"nosniff"),
        ]
        chosen = _parse_range(exchange.get_header(b"range"), file.size)
        start, end = chosen or (0, file.size)
        if chosen is not None:
            content_range = f"bytes {start}-{end - 1}/{file.size}"
            exchange.extra_headers.append((b"content-range", content_range.encode()))
        end = start if exchange.method == "HEAD" else end
        async with self._transfers.hold(exchange, principal.tenant):
            with self._state.translate_errors():
                blocks = await run_in_daemon_thread(files.open, owner, file.id, start, end)
            await exchange.send_parts(
                206 if chosen else 200, _iterate(blocks), end - start, _DOWNLOAD_TYPE
            )

    # --- uploads ---------------------------------------------------------------------------------

    async def create_upload(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/uploads`."""
        body = parse_body(CreateUploadRequest, await exchange.read_body())
        if body.bytes > self._max_file_bytes:
            message = (
                f"The file may have at most {self._max_file_bytes:,} bytes. Upload a smaller one."
            )
            raise invalid_request(message, "bytes")
        expiry = body.expires_after
        upload = await self._state.call(
            self._files().create_upload,
            item_owner(principal),
            filename=_clean_name(body.filename),
            purpose=body.purpose,
            media_type=_clean_media_type(body.mime_type),
            size=body.bytes,
            lifetime_s=_choose_lifetime(body.purpose, None if expiry is None else expiry.seconds),
        )
        await _send(exchange, _describe_upload(upload))

    async def add_part(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/uploads/{id}/parts`."""
        owner, files = item_owner(principal), self._files()
        upload_id = exchange.path_parameters["id"]
        await self._state.call(files.check_pending, owner, upload_id)
        async with self._transfers.hold(exchange, principal.tenant):
            form = self._open_form(exchange, "data", MAX_PART_BYTES)
            async with self._receive(exchange, owner, form, "part_") as written:
                part = await self._state.call(files.add_part, owner, upload_id, written)
        described = {"id": part.id, "object": "upload.part", "created_at": int(part.created_at)}
        await _send(exchange, described | {"upload_id": upload_id})

    async def complete_upload(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/uploads/{id}/complete`."""
        body = parse_body(CompleteUploadRequest, await exchange.read_body())
        complete = partial(
            self._files().complete_upload,
            *(item_owner(principal), exchange.path_parameters["id"], body.part_ids, body.md5),
        )
        async with self._transfers.hold(exchange, principal.tenant):
            with self._state.translate_errors():
                upload, file = await run_in_daemon_thread(complete)
        await _send(exchange, _describe_upload(upload) | {"file": describe_file(file)})

    async def cancel_upload(self, exchange: HttpExchange, principal: Principal) -> None:
        """`POST /v1/uploads/{id}/cancel`."""
        upload_id = exchange.path_parameters["id"]
        cancel = self._files().cancel_upload
        upload = await self._state.call(cancel, item_owner(principal), upload_id)
        await _send(exchange, _describe_upload(upload))

    # --- contents --------------------------------------------------------------------------------

    def _files(self) -> FileStore:
        """Return the store of files.

        Raises:
            ApiError: 404 without a store, 501 without a place for contents.
        """
        files = self._state.store.files
        if not files.has_blobs:
            message = (
                "This gateway keeps no files. Set store.blobs to a folder or a URL that all gateways of its store"
                " share."
            )
            raise ApiError(501, "no_blob_store", message)
        return files

    async def _get(self, exchange: HttpExchange, principal: Principal) -> StoredFile:
        get = self._files().get
        return await self._state.call(get, item_owner(principal), exchange.path_parameters["id"])

    def _open_form(
        self, exchange: HttpExchange, field: str, max_bytes: int | None = None
    ) -> MultipartForm:
        max_bytes = min(max_bytes or self._max_file_bytes, self._max_file_bytes)
        return MultipartForm(exchange.get_header(b"content-type"), field, max_bytes)

    @contextlib.asynccontextmanager
    async def _receive(
        self, exchange: HttpExchange, owner: ItemOwner, form: MultipartForm, id_prefix: str
    ) -> AsyncIterator[WrittenBlob]:
        """Write the file of a form. Unless the block succeeds, which creates its row, nothing of it is left.

        Raises:
            ApiError: 413 if the tenant would store too much, 507 without space, or as `iter_file` does.
        """
        files = self._files()
        expected = exchange.body_length
        if expected is None:  # an upload of unknown length, which may become as large as any
            expected = self._max_file_bytes
        arriving = self._arriving_bytes[owner] + expected
        await self._state.call(self._state.store.stored_bytes.check_room, owner, arriving)
        self._arriving_bytes[owner] += expected
        try:
            with self._state.translate_errors():
                parts = exchange.iter_body(form.max_body_bytes)
                body = iterate_in_thread(parts, asyncio.get_running_loop())
                write = partial(files.write, owner, form.iter_file(body), id_prefix=id_prefix)
                written = await run_in_daemon_thread(write)
            try:
                yield written
            except BaseException:
                await run_in_daemon_thread(files.discard, owner, written)
                raise
        finally:
            self._arriving_bytes[owner] -= expected
            if not self._arriving_bytes[owner]:
                del self._arriving_bytes[owner]


def describe_file(file: StoredFile) -> dict[str, Any]:
    """Return a file in OpenAI's shape."""
    described = {
        "id": file.id,
        "object": "file",
        "bytes": file.size,
        "created_at": int(file.created_at),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
    return (
        described if file.expires_at == NEVER else described | {"expires_at": int(file.expires_at)}
    )


def _describe_anthropic(file: StoredFile) -> dict[str, Any]:
    expires = file.expires_at
    return {
        "id": file.id,
        "type": "file",
        "filename": file.filename,
        "mime_type": file.media_type,
        "size_bytes": file.size,
        "created_at": format_timestamp(int(file.created_at)),
        "expires_at": None if expires == NEVER else format_timestamp(int(expires)),
        "downloadable": True,
    }


def _describe_upload(upload: StoredUpload) -> dict[str, Any]:
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.size,
        "created_at": int(upload.created_at),
        "expires_at": int(upload.expires_at),
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": upload.status,
        "file": None,
    }


def _read_fields(form: MultipartForm, *, is_anthropic: bool) -> dict[str, Any]:
    """Return purpose and lifetime of a new file.

    Raises:
        ApiError: 400 if one is missing or invalid.
    """
    if is_anthropic:
        lifetime_s = parse_query(AnthropicFileFields, form.fields).expires_in_seconds
        return {"purpose": "user_data", "lifetime_s": lifetime_s}
    fields = parse_query(FileFields, form.fields)
    return {
        "purpose": fields.purpose,
        "lifetime_s": _choose_lifetime(fields.purpose, fields.seconds),
    }


def _choose_lifetime(purpose: str, lifetime_s: float | None) -> float | None:
    return BATCH_LIFETIME_S if lifetime_s is None and purpose == "batch" else lifetime_s


def _clean_name(name: str) -> str:
    """Return the last part of a file's name without control characters, or a name for a file without one."""
    last = _CONTROL_CHARACTERS.sub("", name).replace("\\", "/").rpartition("/")[2]
    return last[:MAX_NAME_CHARS] or "unnamed"


def _clean_media_type(media_type: str) -> str:
    found = _MEDIA_TYPE.match(media_type)
    return "application/octet-stream" if found is None else found[0].lower()


def _parse_range(header: str, size: int) -> tuple[int, int] | None:
    """Return the start and the end of the range that a header names, or None for the whole file.

    Headers of another form, such as several ranges, stand for the whole file (RFC 9110, section 14.2).

    Raises:
        ApiError: 416 if the file ends before the range.
    """
    parsed = _RANGE.fullmatch(header.strip())
    if parsed is None or parsed[0] == "bytes=-":
        return None
    first, last = parsed.groups()
    start, end = (
        (int(first), int(last) + 1 if last else size) if first else (size - int(last), size)
    )
    start, end = max(0, start), min(end, size)
    if first and last and int(last) < int(first):
        return None
    if start >= end:
        message = f"The file has {size:,} bytes, and ends before the range. Send another 'Range'."
        raise ApiError(416, "range_not_satisfiable", message)
    return start, end


async def _iterate(blocks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while block := await run_in_daemon_thread(next, blocks, b""):
        yield block


async def _send(exchange: HttpExchange, content: dict[str, Any]) -> None:
    await exchange.send_response(200, _encode(content))
