"""Single flight: a request computes an answer, and equal requests receive it while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator

import msgspec

from argosy.gateway.model_routes import RequestRule
from argosy.protocol import ApiError, TokenUsage


class CacheEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A complete answer."""

    stored_at: float
    """Seconds since the epoch."""
    usage: TokenUsage
    finish_reasons: dict[int, str]
    chunks: list[bytes]
    """Chunks of the stream as JSON, without id, time and usage."""
    duration_s: float = 0.0
    """How long the computation took."""


class Flight:
    """An answer that is found or computed, and the requests that follow it. Use it from one event loop.

    Attributes:
        chunks: Chunks so far. None if they are not kept any more, or were not kept from the beginning.
        entry: The complete answer; None before it is complete, and if it never will be.
        error: Error of the request that computed it; None if it has failed otherwise or has not failed.
        content_rule: Content rule of that request.
        kept_as: How the cache had the answer: `hit` or `semantic`; empty if it is computed.
        is_purged: Whether the answer must not be kept, because the cache was purged meanwhile.
        allows_streaming: Whether others may send chunks before the answer is complete.
        has_followed_output: Whether others have sent some, so that the answer cannot start over.
    """

    __slots__ = (
        "_changed",
        "_num_followers",
        "_on_abandoned",
        "allows_streaming",
        "chunks",
        "content_rule",
        "entry",
        "error",
        "has_followed_output",
        "is_ended",
        "is_purged",
        "kept_as",
    )

    def __init__(self, content_rule: RequestRule | None, *, allows_streaming: bool) -> None:
        self.chunks: list[bytes] | None = []
        self.entry: CacheEntry | None = None
        self.error: ApiError | None = None
        self.content_rule = content_rule
        self.is_ended = self.is_purged = self.has_followed_output = False
        self.kept_as = ""
        self.allows_streaming = allows_streaming
        self._num_followers = 0
        self._changed: asyncio.Event | None = None
        self._on_abandoned: Callable[[], object] | None = None

    @property
    def has_followers(self) -> bool:
        """Whether other requests receive the answer."""
        return self._num_followers > 0

    def add_chunk(self, chunk: bytes) -> None:
        """Add a chunk of an answer that is kept."""
        assert self.chunks is not None  # noqa: S101 - checked by the caller
        self.chunks.append(chunk)
        self._wake()

    def drop_chunks(self) -> None:
        """Stop keeping the chunks."""
        self.chunks = None
        self._wake()

    def end(self, entry: CacheEntry | None, error: ApiError | None = None) -> None:
        """End the flight: with the complete answer, or with None if there will be none."""
        self.entry, self.error, self.is_ended = entry, error, True
        if entry is not None:
            self.chunks = entry.chunks
        self._wake()

    def continue_without_client(self, abort: Callable[[], object]) -> bool:
        """Let the answer be computed for its followers alone, until the last one leaves and `abort` is called.

        Returns False if there is none.
        """
        if self.has_followers:
            self._on_abandoned = abort
        return self.has_followers

    async def follow(self, *, is_streaming: bool) -> AsyncGenerator[bytes]:
        """Yield the chunks as they arrive, or all of them once the answer is complete. See `entry` after the last."""
        index = 0
        with self._followed():
            while True:
                chunks = self.chunks
                if chunks is None:
                    return
                while index < len(chunks) and (self.entry is not None or is_streaming):
                    self.has_followed_output = True
                    yield chunks[index]
                    index += 1
                if self.is_ended:
                    return
                self._changed = self._changed or asyncio.Event()
                await self._changed.wait()

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        self._num_followers += 1
        try:
            yield
        finally:
            self._num_followers -= 1
            if self._on_abandoned is not None and not self._num_followers and not self.is_ended:
                self._on_abandoned()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
