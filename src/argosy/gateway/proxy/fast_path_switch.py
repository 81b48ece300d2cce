"""Switch between event loop and fast path for one stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from argosy.gateway.backends import DeliveredOutput
from argosy.gateway.proxy.fast_path import FastPath, SplicedStream, SpliceProgress
from argosy.gateway.proxy.response_writers import ResponseWriter, StreamingWriter
from argosy.gateway.request_context import UNLIMITED_TOKENS, FilterState
from argosy.gateway.upstream import UpstreamResponse

MIN_PROFITABLE_CHUNKS = 16
"""Number of chunks from which a stay on the fast path costs less than it saves."""


class FastPathSwitch:
    """Moves one stream to the fast path and back.

    A stream may enter once its chunks are regular and all filters grant a budget. After a short stay or a failed
    attempt, the number of chunks until the next attempt doubles.
    """

    def __init__(
        self,
        fast_path: FastPath | None,
        writer: ResponseWriter,
        filter_states: Sequence[FilterState],
        delivered: DeliveredOutput,
    ) -> None:
        """Create a switch for a stream on the event loop.

        Args:
            fast_path: None keeps the stream on the event loop, as does a writer that does not stream.
            writer: Writes to the client.
            filter_states: Notified of the chunks that the fast path forwards.
            delivered: Updated with their tokens.
        """
        self._fast_path = fast_path
        self._writer = writer if isinstance(writer, StreamingWriter) else None
        self._filter_states = filter_states
        self._delivered = delivered
        self._spliced_stream: SplicedStream | None = None
        self._skipped_chunks = 0
        """Chunks forwarded by the event loop since the last attempt to enter."""
        self._retry_after_chunks = 1
        """Chunks until the next attempt to enter."""
        self._notified_states: Sequence[FilterState] = filter_states
        """Filter states to notify of progress while the stream is on the fast path. A state with a token counter is
        excluded, because its counter is ahead of these notifications."""
        self._spliced_chunks = 0
        """Chunks that the fast path has forwarded since the stream entered."""

    def observe_chunk(self) -> bool:
        """Count a chunk that the event loop forwarded. Returns whether to call `enter` now."""
        self._skipped_chunks += 1
        if self._fast_path is None or self._skipped_chunks < self._retry_after_chunks:
            return False
        self._skipped_chunks = 0
        return True

    def enter(
        self, response: UpstreamResponse, output_tokens: int, on_returned: Callable[[], None]
    ) -> None:
        """Enter the fast path if both sockets can be lent and all filters grant a budget.

        Args:
            response: The replica's response.
            output_tokens: Output tokens received so far.
            on_returned: Called when the fast path has returned the stream. Call `exit` then.
        """
        fast_path, writer = self._fast_path, self._writer
        if self._spliced_stream is not None or fast_path is None or writer is None:
            return
        budgets = [state.fast_path_budget() for state in self._filter_states]
        counter_addresses = [
            budget.token_counter_address
            for budget in budgets
            if budget.token_counter_address is not None
        ]
        self._notified_states = [
            state
            for state, budget in zip(self._filter_states, budgets, strict=True)
            if budget.token_counter_address is None
        ]
        max_output_tokens = min(
            (budget.max_output_tokens for budget in budgets), default=UNLIMITED_TOKENS
        )
        client_fd = writer.lend_socket() if max_output_tokens > output_tokens else None
        replica_fd = None if client_fd is None else response.lend_socket()
        if client_fd is not None and replica_fd is not None:
            self._spliced_stream = fast_path.attach(
                replica_fd,
                client_fd,
                output_tokens=output_tokens,
                max_output_tokens=max_output_tokens,
                token_counter_address=counter_addresses[0] if counter_addresses else None,
                on_returned=on_returned,
            )
        if self._spliced_stream is None:
            self._retry_after_chunks *= 2
            if replica_fd is not None:
                response.reclaim_socket(b"")

    def poll(self) -> float | None:
        """Apply the progress since the last call, if the stream is on the fast path.

        Returns:
            The time of the last chunk; None if there was none.
        """
        if self._spliced_stream is None:
            return None
        progress = self._spliced_stream.poll_progress()
        self._spliced_chunks += len(progress.chunk_times)
        return self._apply(progress, self._notified_states)

    def exit(self) -> tuple[float | None, bytes]:
        """Leave the fast path, apply the progress, and write the bytes that could not be sent to the client.

        Returns:
            The time of the last chunk since the last call, None if there was none; and the bytes of the replica that
            are still to be parsed.
        """
        stream, self._spliced_stream = self._spliced_stream, None
        if stream is None or self._writer is None:
            return None, b""
        progress = stream.detach()
        if progress.unsent:
            self._writer.send_chunks(progress.unsent)
        chunk_count, self._spliced_chunks = self._spliced_chunks + len(progress.chunk_times), 0
        self._retry_after_chunks = (
            1 if chunk_count >= MIN_PROFITABLE_CHUNKS else self._retry_after_chunks * 2
        )
        return self._apply(progress, self._filter_states), progress.unread

    def _apply(
        self, progress: SpliceProgress, notified_states: Sequence[FilterState]
    ) -> float | None:
        if not progress.chunk_times:
            return None
        self._delivered.token_id_pieces.setdefault(0, []).append(progress.token_ids)
        self._delivered.output_tokens = progress.output_tokens
        for state in notified_states:
            state.on_tokens(progress.chunk_times)
        return progress.chunk_times[-1]
