"""When one stream goes by the fast path: once it flows, as far as everybody whom it passes lets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from argosy.gateway.proxy.fast_path import FastPath, News, Ride
from argosy.gateway.proxy.response_writers import Streamed
from argosy.gateway.request_context import ANY, Visit
from argosy.gateway.upstream import Attempt

WORTHWHILE = 16
"""Pieces after which it was worth the way there and back."""


class Shortcut:
    """One stream's."""

    def __init__(self, path: FastPath, out: Streamed, visits: Sequence[Visit]) -> None:
        self._path = path
        self._out = out
        self._visits = visits
        self._ride: Ride | None = None
        self._steps = 0
        """Pieces that have passed by since the last try,"""
        self._wait = 1
        """and how many do before the next: ever more where it was in vain."""
        self.beside: Sequence[Visit] = visits
        """Those that are told of pieces while it goes by it; a word that counts by itself is ahead of that."""
        self._passed = 0
        """Pieces that have passed there this time."""

    def passed_by(self) -> bool:
        """A piece was passed on without it; whether it is time to `take` it."""
        self._steps += 1
        if self._steps < self._wait:
            return False
        self._steps = 0
        return True

    def take(self, attempt: Attempt, told: int, ended: Callable[[], None]) -> None:
        """Go by it, if both sockets can be lent; so many tokens were told so far.

        ended: called when the fast path has given the stream back: then `leave`.
        """
        if self._ride is not None:
            return
        lets = [visit.alone() for visit in self._visits]
        counters = [let.counter for let in lets if let.counter is not None]
        self.beside = [
            visit for visit, let in zip(self._visits, lets, strict=True) if let.counter is None
        ]
        most = min((let.most for let in lets), default=ANY)
        theirs = self._out.lend() if most > told else None
        ours = None if theirs is None else attempt.lend()
        if theirs is not None and ours is not None:
            self._ride = self._path.take(
                ours,
                theirs,
                output=told,
                most=most,
                counter=counters[0] if counters else None,
                ended=ended,
            )
        if self._ride is None:
            self._wait *= 2
            if ours is not None:
                attempt.take_back(b"")

    def news(self) -> News | None:
        """What has passed there since it was asked last; None: it does not go by it."""
        if self._ride is None:
            return None
        news = self._ride.news()
        self._passed += len(news.times)
        return news

    def leave(self) -> News | None:
        """Go by it no longer; what was still to be sent to the client is sent. None: it did not."""
        ride, self._ride = self._ride, None
        if ride is None:
            return None
        news = ride.stop()
        if news.unsent:
            self._out.pass_on(news.unsent)
        passed, self._passed = self._passed + len(news.times), 0
        self._wait = 1 if passed >= WORTHWHILE else self._wait * 2
        return news
