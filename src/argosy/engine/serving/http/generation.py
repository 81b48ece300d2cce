"""One request's choices while they are generated: deltas in, text and tokens out, and one end for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Protocol, Self

import structlog

from argosy.engine.serving.text.choice import Choice
from argosy.engine.serving.wire import Delta, EngineRequest
from argosy.protocol import ApiError

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.server")


class Deltas(Protocol):
    """The deltas of one request, an asynchronous iterator; closing it early aborts the request."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...
    def __anext__(self) -> Awaitable[Delta]: ...
    def aclose(self) -> Awaitable[None]:
        """Abort the request, unless it has ended."""
        ...


class Generator(Protocol):
    """What generates: the engine's client."""

    def generate(self, request: EngineRequest) -> Deltas:
        """Submit at once; raises ApiError when there is no engine to take it."""
        ...


class Generation:
    """The choices of one HTTP request.

    Leaving the `async with` block aborts in the core whatever has not ended, and waits for that. What
    a slow consumer has not taken is merged, so what is held is bounded by the tokens asked for.
    """

    def __init__(
        self, engine: Generator, choices: list[Choice], progress: Callable[[Choice, Delta], None]
    ) -> None:
        self._engine = engine
        self._progress = progress
        self._news: dict[int, Choice] = {}
        self._wake = asyncio.Event()
        self._error: ApiError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self.choices = choices
        self._running = [choice for choice in choices if choice.finish is None]
        self._open = len(self._running)

    async def __aenter__(self) -> Self:
        streams: list[Deltas] = []
        try:
            for choice in self._running:  # in order: a lead before its siblings
                streams.append(self._engine.generate(choice.request))  # noqa: PERF401 - kept if one fails
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        self._tasks = [
            asyncio.create_task(self._read(choice, stream))
            for choice, stream in zip(self._running, streams, strict=True)
        ]
        if not self._open:
            self._ended.set()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fail(self, error: ApiError) -> None:
        """End the request with `error`; the first one counts."""
        if self._error is None:
            self._error = error
        self._wake.set()
        self._ended.set()

    async def news(self, idle_s: float) -> list[Choice]:
        """The choices with something new to take, or none after `idle_s`. Raises what ended it."""
        if self._open and not self._news and self._error is None:
            self._wake.clear()
            alarm = asyncio.get_running_loop().call_later(idle_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                alarm.cancel()
        if self._news:
            news = list(self._news.values())
            self._news.clear()
            return news
        if self._error is not None:
            raise self._error
        return []

    async def complete(self) -> None:
        """Wait until every choice has ended. Raises what ended the request before that."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def _read(self, choice: Choice, stream: Deltas) -> None:
        try:
            async for delta in stream:
                choice.push(delta)
                self._progress(choice, delta)
                self._news[choice.index] = choice
                self._wake.set()
                if choice.finish is not None:
                    break
            else:
                message = "The engine ended the request without a reason."
                self.fail(ApiError(500, "engine_error", message))
        except ApiError as error:
            self.fail(error)
        except Exception:
            log.exception("generation_failed", request=choice.request.id)
            self.fail(ApiError(500, "internal_error", "An internal error ended the request."))
        finally:
            await stream.aclose()
        self._open -= 1
        if not self._open:
            self._ended.set()
