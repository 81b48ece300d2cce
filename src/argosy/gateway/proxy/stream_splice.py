"""Splice of one stream: owns both sockets while native code forwards the chunks."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from argosy.gateway.proxy.fast_path import FastPath, SpliceProgress
from argosy.gateway.proxy.response_writers import StreamingWriter
from argosy.gateway.request_context import RequestContext
from argosy.gateway.upstream import UpstreamResponse

MIN_PROFITABLE_CHUNKS = 16
"""Number of chunks from which a stay on the fast path costs less than it saves."""


class StreamSplice:
    """Lends the sockets of one stream to native code, and takes them back.

    After a short stay or a failed attempt, the number of chunks until the next attempt doubles.
    """

    __slots__ = (
        "_chunks",
        "_context",
        "_fast_path",
        "_handle",
        "_is_active",
        "_number",
        "_retry_after_chunks",
        "_skipped_chunks",
        "_writer",
    )

    def __init__(
        self,
        fast_path: FastPath,
        writer: StreamingWriter,
        context: RequestContext,
    ) -> None:
        """Create a splice for a stream on the event loop.

        Args:
            fast_path: Native code.
            writer: Writes to the client.
            context: The request.
        """
        self._fast_path = fast_path
        self._writer = writer
        self._context = context
        self._is_active = False
        """Whether the stream is on the fast path."""
        self._number = self._handle = 0
        self._skipped_chunks = 0
        """Chunks forwarded by the event loop since the last attempt to enter."""
        self._retry_after_chunks = 1
        """Chunks until the next attempt to enter."""
        self._chunks = 0
        """Chunks that native code has forwarded since the stream entered."""

    def should_begin(self) -> bool:
        """Count a chunk that the event loop forwarded. Returns whether to call `begin` now."""
        self._skipped_chunks += 1
        if self._skipped_chunks < self._retry_after_chunks:
            return False
        self._skipped_chunks = 0
        return True

    def begin(self, response: UpstreamResponse, on_returned: Callable[[], object]) -> None:
        """Let native code forward the stream up to the tokens that are covered, if both sockets can be lent.

        Args:
            response: The replica's response.
            on_returned: Called when native code has returned the stream, and has to call `end`. It is not kept longer,
                since it would keep the caller alive, which owns this splice.
        """
        if self._is_active:  # two chunks that arrive together each ask for it
            return
        context = self._context
        tokens, covered = context.delivered.output_tokens, context.covered_output_tokens
        client_fd = self._writer.lend_socket() if covered > tokens else None
        replica_fd = None if client_fd is None else response.lend_socket()
        if client_fd is not None and replica_fd is not None:
            slot = context.usage_slot
            address = None if slot is None else slot.output_counter_address
            self._number, self._handle = self._fast_path.attach(
                on_returned, replica_fd, client_fd, tokens, covered, address
            )
            self._is_active = bool(self._handle)
        if not self._is_active:
            self._retry_after_chunks *= 2
            if replica_fd is not None:
                response.reclaim_socket(b"")

    def poll(self) -> array[float]:
        """Apply the progress since the last call, and return the times of its chunks."""
        if not self._is_active:
            return array("d")
        return self._apply(self._fast_path.poll_progress(self._handle))

    def end(self) -> tuple[array[float], bytes]:
        """Take both sockets back, apply the progress, and write the bytes that could not be sent to the client.

        Returns:
            The times of the chunks since the last call, and the bytes of the replica that are still to be parsed.
        """
        if not self._is_active:
            return array("d"), b""
        self._is_active = False
        progress = self._fast_path.detach(self._number, self._handle)
        if progress.unsent:
            self._writer.send_chunks(progress.unsent)
        times = self._apply(progress)
        is_profitable = self._chunks >= MIN_PROFITABLE_CHUNKS
        self._chunks = 0
        self._retry_after_chunks = 1 if is_profitable else self._retry_after_chunks * 2
        return times, progress.unread

    def _apply(self, progress: SpliceProgress) -> array[float]:
        if progress.chunk_times:
            self._chunks += len(progress.chunk_times)
            delivered = self._context.delivered
            delivered.token_id_pieces.setdefault(0, []).append(progress.token_ids)
            delivered.output_tokens = progress.output_tokens
        return progress.chunk_times
