"""The console's static files, held in memory with their compressed forms."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from argosy.http_server import HttpExchange

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

DOCUMENT = "index.html"
_MEDIA_TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".txt": b"text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A file: its content, and the validator with which browsers ask whether it has changed."""

    content: bytes
    compressed: bytes
    media_type: bytes
    etag: bytes


class StaticFiles:
    """Files by path below the folder `static`. Reading them all takes some milliseconds, so do it in a thread."""

    def __init__(self) -> None:
        root = resources.files("argosy.gateway.console") / "static"
        self._files = dict(_read_folder(root, ""))
        contents = b"".join(self._files[path].etag for path in sorted(self._files))
        self.build_id = hashlib.sha256(contents).hexdigest()[:12]
        """Identifies the version of all files. A page that was loaded from another one offers to reload."""

    def find(self, path: str) -> StaticFile | None:
        """Return a file, or None if there is none with this path."""
        return self._files.get(path)


async def send_file(exchange: HttpExchange, file: StaticFile) -> None:
    """Answer with a file, or with 304 if the browser has it."""
    exchange.extra_headers += [
        (b"etag", file.etag),
        (b"cache-control", b"no-cache"),
        (b"vary", b"accept-encoding"),
    ]
    if file.etag in exchange.headers.get(b"if-none-match", b""):
        await exchange.send_response(304, b"", file.media_type)
        return
    body = file.content
    if b"gzip" in exchange.headers.get(b"accept-encoding", b""):
        exchange.extra_headers.append((b"content-encoding", b"gzip"))
        body = file.compressed
    await exchange.send_response(200, body, file.media_type)


def _read_folder(folder: Traversable, prefix: str) -> list[tuple[str, StaticFile]]:
    found: list[tuple[str, StaticFile]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _read_folder(entry, f"{prefix}{entry.name}/")
            continue
        media_type = _MEDIA_TYPES.get(entry.name[entry.name.rfind(".") :])
        if media_type is not None:
            content = entry.read_bytes()
            etag = b'"%s"' % hashlib.sha256(content).hexdigest()[:20].encode()
            compressed = gzip.compress(content, mtime=0)
            found.append((prefix + entry.name, StaticFile(content, compressed, media_type, etag)))
    return found
