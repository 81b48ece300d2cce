"""One request's choices while they are generated: deltas in, text and tokens out, and one end for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Protocol, Self

import structlog

from argosy.engine.serving.core_messages import Delta, EngineRequest
from argosy.engine.serving.text.choice import Choice
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.server")


class Deltas(Protocol):
    """The deltas of one request."""

    def notify(self, heard: Callable[[], None]) -> None:
        """Call `heard` when there is something to take."""
        ...

    def take(self) -> Delta | None:
        """All that came since the last one was taken; None when nothing has."""
        ...

    def close(self) -> None:
        """Abort the request, unless it has ended."""
        ...


class Generator(Protocol):
    """What generates: the engine's client."""

    def generate(self, request: EngineRequest) -> Deltas:
        """Submit at once; raises ApiError when there is no engine to take it."""
        ...


class Generation:
    """The choices of one HTTP request.

    Leaving the `with` block aborts in the core whatever has not ended. What a slow consumer has not taken is
    merged, so what is held is bounded by the tokens asked for.
    """

    def __init__(
        self, engine: Generator, choices: list[Choice], progress: Callable[[Choice, Delta], None]
    ) -> None:
        self.choices = choices
        self.tier = choices[0].request.tier
        self._engine = engine
        self._progress = progress
        self._streams: dict[int, Deltas] = {}
        """Of the choices that are not complete."""
        self._heard: dict[int, Choice] = {}
        """Choices with something to take."""
        self._error: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        """One for all waits: it is moved when it rings, not with each token."""
        self._due = 0.0

    def __enter__(self) -> Self:
        try:
            for choice in self.choices:  # in order: a lead before its siblings
                if choice.finish is None:
                    stream = self._streams[choice.index] = self._engine.generate(choice.request)
                    stream.notify(partial(self._hear, choice))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def done(self) -> bool:
        """Whether every choice has ended and been taken."""
        return not self._streams

    def fail(self, error: ApiError) -> None:
        """End the request with `error`; the first one counts."""
        if self._error is None:
            self._error = error
        self._wake()

    async def news(self, idle_s: float | None = None) -> list[Choice]:
        """The choices with something new, or none after `idle_s`. Raises what ended the request."""
        if self._streams and not self._heard and self._error is None:
            await self._wait(idle_s)
        heard = list(self._heard.values())
        self._heard.clear()
        news = [choice for choice in heard if self._take(choice)]
        if self._error is not None and not news:
            raise self._error
        return news

    async def complete(self) -> None:
        """Wait until every choice has ended. Raises what ended the request before that."""
        while self._streams:
            await self.news()
        if self._error is not None:
            raise self._error

    def _take(self, choice: Choice) -> bool:
        """Give a choice what came for it; whether that was anything."""
        stream = self._streams.get(choice.index)
        try:
            delta = None if stream is None else stream.take()
            if delta is None:
                return False
            choice.push(delta)
            self._progress(choice, delta)
        except ApiError as error:
            self.fail(error)
            return False
        except Exception:
            log.exception("generation_failed", request=choice.request.id)
            self.fail(ApiError(500, "internal_error", "An internal error ended the request."))
            return False
        if choice.finish is not None:
            self._streams.pop(choice.index).close()
        return True

    def _hear(self, choice: Choice) -> None:
        if choice.index in self._streams:
            self._heard[choice.index] = choice
            self._wake()

    async def _wait(self, idle_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        if idle_s is not None:
            self._due = loop.time() + idle_s
            if self._alarm is None:
                self._alarm = loop.call_at(self._due, self._ring)
        self._waiter = loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _ring(self) -> None:
        self._alarm = None
        loop = asyncio.get_running_loop()
        if self._waiter is None:
            return
        if loop.time() < self._due:
            self._alarm = loop.call_at(self._due, self._ring)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._error = None  # raised, it holds on to whoever waited here
        while self._streams:
            self._streams.popitem()[1].close()
