"""When one stream goes by the fast path: once it flows, as far as everybody whom it passes lets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from argosy.gateway.proxy.fast_path import FastPath, SplicedStream, SpliceProgress
from argosy.gateway.proxy.response_writers import StreamingWriter
from argosy.gateway.request_context import UNLIMITED_TOKENS, FilterState
from argosy.gateway.upstream import UpstreamResponse

MIN_PROFITABLE_CHUNKS = 16
"""Pieces after which it was worth the way there and back."""


class FastPathSwitch:
    """One stream's."""

    def __init__(
        self, fast_path: FastPath, writer: StreamingWriter, filter_states: Sequence[FilterState]
    ) -> None:
        self._fast_path = fast_path
        self._writer = writer
        self._filter_states = filter_states
        self._spliced_stream: SplicedStream | None = None
        self._skipped_chunks = 0
        """Pieces that have passed by since the last try,"""
        self._retry_after_chunks = 1
        """and how many do before the next: ever more where it was in vain."""
        self.notified_states: Sequence[FilterState] = filter_states
        """Those that are told of pieces while it goes by it; a word that counts by itself is ahead of that."""
        self._spliced_chunks = 0
        """Pieces that have passed there this time."""

    def observe_chunk(self) -> bool:
        """A piece was passed on without it; whether it is time to `take` it."""
        self._skipped_chunks += 1
        if self._skipped_chunks < self._retry_after_chunks:
            return False
        self._skipped_chunks = 0
        return True

    def enter(
        self, response: UpstreamResponse, output_tokens: int, on_returned: Callable[[], None]
    ) -> None:
        """Go by it, if both sockets can be lent; so many tokens were told so far.

        ended: called when the fast path has given the stream back: then `leave`.
        """
        if self._spliced_stream is not None:
            return
        lets = [visit.fast_path_budget() for visit in self._filter_states]
        counters = [
            let.token_counter_address for let in lets if let.token_counter_address is not None
        ]
        self.notified_states = [
            visit
            for visit, let in zip(self._filter_states, lets, strict=True)
            if let.token_counter_address is None
        ]
        most = min((let.max_output_tokens for let in lets), default=UNLIMITED_TOKENS)
        theirs = self._writer.lend_socket() if most > output_tokens else None
        ours = None if theirs is None else response.lend_socket()
        if theirs is not None and ours is not None:
            self._spliced_stream = self._fast_path.attach(
                ours,
                theirs,
                output_tokens=output_tokens,
                max_output_tokens=most,
                token_counter_address=counters[0] if counters else None,
                on_returned=on_returned,
            )
        if self._spliced_stream is None:
            self._retry_after_chunks *= 2
            if ours is not None:
                response.reclaim_socket(b"")

    def poll_progress(self) -> SpliceProgress | None:
        """What has passed there since it was asked last; None: it does not go by it."""
        if self._spliced_stream is None:
            return None
        news = self._spliced_stream.poll_progress()
        self._spliced_chunks += len(news.chunk_times)
        return news

    def exit(self) -> SpliceProgress | None:
        """Go by it no longer; what was still to be sent to the client is sent. None: it did not."""
        ride, self._spliced_stream = self._spliced_stream, None
        if ride is None:
            return None
        news = ride.detach()
        if news.unsent:
            self._writer.send_chunks(news.unsent)
        passed, self._spliced_chunks = self._spliced_chunks + len(news.chunk_times), 0
        self._retry_after_chunks = (
            1 if passed >= MIN_PROFITABLE_CHUNKS else self._retry_after_chunks * 2
        )
        return news
