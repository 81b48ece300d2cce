"""Client of one model for a run: sends requests, repeats those that find it busy, and keeps answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec

from argosy.quality.assertions import Answer
from argosy.quality.golden_set import MAX_TEXT

SendRequest = Callable[[dict[str, Any]], Awaitable[tuple[int, bytes]]]
"""Sends the body of a chat completion, and returns status and body of the response."""
MAX_CACHED_ANSWERS = 50_000
_BUSY_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
_REFUSED_STATUSES = frozenset({400, 413, 422})
"""Statuses that are about one request, so that they count as a wrong answer of the model."""
_MAX_ATTEMPTS = 6
_FIRST_PAUSE_S = 0.5
_DEFAULTS = {"temperature": 0, "seed": 0, "max_tokens": 512}
_RESUMED = "resumed"
"""Fingerprint of an answer that another replica continued."""


class QualityRunError(Exception):
    """A run cannot go on. The message says what to change."""


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Response(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    system_fingerprint: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: dict[str, Any]


class AnswerCache:
    """Answers on disk by request and fingerprint. Not thread-safe. The oldest are removed beyond a number of them.

    Raises:
        OSError: The folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._database = sqlite3.connect(folder / "answers.sqlite3", timeout=10.0)
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, answer BLOB) STRICT"
        )
        self._database.execute(
            "DELETE FROM answers WHERE rowid <= (SELECT max(rowid) FROM answers) - ?",
            (MAX_CACHED_ANSWERS,),
        )
        self._database.commit()

    def find(self, key: bytes) -> Answer | None:
        """Return the answer with a key."""
        row = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Answer)

    def add(self, key: bytes, answer: Answer) -> None:
        """Keep an answer."""
        self._database.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, msgspec.json.encode(answer))
        )
        self._database.commit()

    def close(self) -> None:
        """Close the file."""
        self._database.close()


class ModelClient:
    """Answers of one model, each request at most once for the same weights and arithmetic.

    The first request is always sent, and shows the fingerprint of the weights and the arithmetic. Later ones may be
    answered by the cache.

    Args:
        model: Name of the model at its server.
        send: Sends a request.
        cache: Earlier answers. None for none.
    """

    def __init__(self, model: str, send: SendRequest, cache: AnswerCache | None = None) -> None:
        self.model = model
        self.fingerprints: set[str] = set()
        """Fingerprints of the answers so far, without empty ones."""
        self._send = send
        self._cache = cache
        self._first = asyncio.Lock()
        self._has_begun = False

    async def answer(self, body: Mapping[str, Any]) -> Answer:
        """Return the answer to a request without a model.

        Raises:
            QualityRunError: The server does not answer.
        """
        sent = {**_DEFAULTS, **body, "model": self.model, "stream": False}
        if "max_completion_tokens" in sent:
            del sent["max_tokens"]
        cache = self._cache
        if cache is None or not (sent["temperature"] == 0 or sent["seed"] is not None):
            return await self._request(sent)
        encoded = msgspec.json.encode(sent, order="sorted")
        async with self._first:  # others wait for the fingerprint of the first answer
            if not self._has_begun:
                answer = await self._request_and_keep(cache, sent, encoded)
                self._has_begun = True
                return answer
        for fingerprint in sorted(self.fingerprints):
            found = cache.find(_key(encoded, fingerprint))
            if found is not None:
                return msgspec.structs.replace(found, is_cached=True)
        return await self._request_and_keep(cache, sent, encoded)

    async def _request_and_keep(
        self, cache: AnswerCache, body: dict[str, Any], encoded: bytes
    ) -> Answer:
        answer = await self._request(body)
        if answer.fingerprint not in {"", _RESUMED} and not answer.error:
            cache.add(_key(encoded, answer.fingerprint), answer)
        return answer

    async def _request(self, body: dict[str, Any]) -> Answer:
        pause_s, status, content, latency_ms = _FIRST_PAUSE_S, 0, b"", 0.0
        for attempt in range(_MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(pause_s)
                pause_s *= 2.0
            started_at = time.monotonic()
            status, content = await self._send(body)
            latency_ms = 1000.0 * (time.monotonic() - started_at)
            if status not in _BUSY_STATUSES:
                break
        if status in _REFUSED_STATUSES:
            return Answer(error=f"status {status}: {_error_message(content)}")
        if status != HTTPStatus.OK:
            raise QualityRunError(
                f"the model {self.model!r} answers with status {status}: {_error_message(content)}"
            )
        try:
            response = msgspec.json.decode(content, type=_Response)
            message = response.choices[0].message
        except (msgspec.MsgspecError, IndexError):
            raise QualityRunError(
                f"the server's answer for {self.model!r} is no chat completion; check the URL"
            ) from None
        if response.system_fingerprint:
            self.fingerprints.add(response.system_fingerprint)
        return Answer(
            text=(message.content or "")[:MAX_TEXT],
            tool_calls=message.tool_calls or [],
            refusal=message.refusal or "",
            fingerprint=response.system_fingerprint or "",
            latency_ms=round(latency_ms, 1),
        )


def _key(encoded: bytes, fingerprint: str) -> bytes:
    return hashlib.sha256(encoded + b"\0" + fingerprint.encode()).digest()


def _error_message(content: bytes) -> str:
    with contextlib.suppress(msgspec.MsgspecError):
        return str(msgspec.json.decode(content, type=_ErrorBody).error.get("message"))[:500]
    return content[:200].decode(errors="replace")
