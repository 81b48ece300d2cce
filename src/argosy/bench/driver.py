"""Carries out a plan against a server: sends on time, survives every failure, gives a row for each request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator

import msgspec

from argosy.bench.client import Client, Clock
from argosy.bench.metrics import Row
from argosy.bench.plan import Plan, PlannedRequest, Spans
from argosy.bench.request_body_builder import Exchange, Writer
from argosy.bench.response import Reply

_LOOK_S = 0.25
"""So often it is seen whether the run has been stopped."""
_COARSE_S = 0.002
"""The event loop's own timers are right to about a millisecond; the rest is spent yielding."""


class Driver:
    """One run of one plan."""

    def __init__(
        self,
        plan: Plan,
        client: Client,
        writer: Writer,
        *,
        clock: Clock,
        on_row: Callable[[Row], None],
        run_id: str,
    ) -> None:
        self._plan = plan
        self._client = client
        self._writer = writer
        self._clock = clock
        self._on_row = on_row
        self._run_id = run_id
        self._start = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._room: contextlib.AbstractAsyncContextManager[object] = contextlib.nullcontext()
        self.stopped = False
        """`stop` was called."""
        self.rows: list[Row] = []
        """What has ended, in that order."""
        self.in_flight = 0
        self.interrupted = False
        """Stopped from outside before the plan was through."""

    def stop(self) -> None:
        """Send no more and cancel what runs."""
        self.stopped = True
        for task in self._tasks:
            task.cancel()

    async def run(self) -> list[Row]:
        """All rows, by index. A cancellation ends the run early; what has been measured is kept."""
        try:
            await self._warm_up()
            self._start = self._clock()
            if self._plan.sessions[0][0].at_s is None:
                await self._closed_loop()
            else:
                await self._open_loop()
            await self._all_done()
        except asyncio.CancelledError:
            self.interrupted = True
            self.stop()
            await self._all_done()
        return sorted(self.rows, key=lambda row: row.index)

    async def _warm_up(self) -> None:
        self._start = self._clock()
        for request in self._plan.warmup:
            self._begin(self._converse((request,), 0.0, self._writer.body(request, [])))
        await self._all_done()

    async def _open_loop(self) -> None:
        if self._plan.concurrency is not None:
            self._room = asyncio.Semaphore(self._plan.concurrency)
        for session in self._plan.sessions:
            at_s = session[0].at_s or 0.0
            body = self._writer.body(session[0], [])
            await self._until(at_s)
            if self.stopped:
                return
            self._begin(self._converse(session, at_s, body))

    async def _closed_loop(self) -> None:
        sessions = iter(self._plan.sessions)
        workers = self._plan.concurrency or 1
        for worker in range(min(workers, len(self._plan.sessions))):  # those after them find none
            begin_s = self._plan.ramp_s * worker / workers
            self._begin(self._work(sessions, begin_s))

    async def _work(self, sessions: Iterator[tuple[PlannedRequest, ...]], begin_s: float) -> None:
        await self._until(begin_s)
        limit_s = self._plan.duration_s
        for session in sessions:
            body = self._writer.body(session[0], [])
            now = self._now()
            if limit_s is not None and now >= limit_s:
                return
            await self._converse(session, now, body)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _all_done(self) -> None:
        while self._tasks:
            # `gather` lets nobody run where all have ended, from Python 3.12 on: they would stay here for ever.
            ended, _ = await asyncio.wait(self._tasks)
            for task in ended:
                if not task.cancelled():
                    task.result()

    async def _converse(
        self, session: tuple[PlannedRequest, ...], scheduled_s: float, body: bytes
    ) -> None:
        history: list[Exchange] = []
        for request, following in itertools.zip_longest(session, session[1:]):
            reply = await self._ask(request, scheduled_s, body, keep_text=len(session) > 1)
            if following is None:
                return
            if reply.error:
                for lost in session[request.turn + 1 :]:
                    self._record(lost, Reply(), self._now(), "an earlier turn failed")
                return
            history.append(Exchange(self._writer.text(request.prompt), reply.text))
            body = self._writer.body(following, history)
            scheduled_s = self._now() + following.think_s
            await self._until(scheduled_s)

    async def _ask(
        self, request: PlannedRequest, scheduled_s: float, body: bytes, *, keep_text: bool
    ) -> Reply:
        reply = Reply(keep_text=keep_text)
        try:
            async with self._room:
                await self._post(request, body, reply)
        except asyncio.CancelledError:
            self._record(request, reply, scheduled_s, "cancelled")
            raise
        if not reply.error and not reply.chunks:
            reply.fail("empty", "The answer has no text in it.")
        elif not reply.error and reply.finish is None and not reply.done:
            reply.fail("cut", "The stream ended without a reason.")
        self._record(request, reply, scheduled_s, "")
        return reply

    async def _post(self, request: PlannedRequest, body: bytes, reply: Reply) -> None:
        request_id = f"{self._run_id}-{request.index}"
        self.in_flight += 1
        try:
            await self._client.post(self._writer.target.path, body, reply, request_id)
        finally:
            self.in_flight -= 1

    def _record(
        self, request: PlannedRequest, reply: Reply, scheduled_s: float, cancelled: str
    ) -> None:
        row = make_row(
            request,
            reply,
            scheduled_s=scheduled_s,
            start=self._start,
            now=self._clock(),
            cancelled=cancelled,
        )
        if self._plan.ramp_s and row.phase == "measured" and scheduled_s < self._plan.ramp_s:
            row = msgspec.structs.replace(row, phase="ramp")
        self.rows.append(row)
        self._on_row(row)

    def _now(self) -> float:
        return self._clock() - self._start

    async def _until(self, at_s: float) -> None:
        while True:
            left = at_s - self._now()
            if left <= 0 or self.stopped:
                return
            coarse = min(left - _COARSE_S / 2, _LOOK_S)
            await asyncio.sleep(coarse if left > _COARSE_S else 0)


def make_row(
    request: PlannedRequest,
    reply: Reply,
    *,
    scheduled_s: float,
    start: float,
    now: float,
    cancelled: str,
) -> Row:
    """The row of a reply that has ended; `cancelled` says why nobody waited for the end, or is empty."""
    ok = not reply.error and not cancelled
    end = reply.last_at if ok and reply.last_at is not None else now
    counted = len(reply.counted) == len(reply.chunks) > 0
    output = reply.output_tokens
    return Row(
        index=request.index,
        session=request.session,
        turn=request.turn,
        phase=request.phase,
        outcome="cancelled" if cancelled else "ok" if ok else "error",
        error=cancelled or reply.error,
        detail=reply.detail,
        status=reply.status,
        finish=reply.finish,
        scheduled_s=scheduled_s,
        sent_s=(now if reply.sent_at is None else reply.sent_at) - start,
        end_s=end - start,
        chunks_s=[at - start for at in reply.chunks],
        chunk_tokens=_steps(reply.counted) if counted else None,
        planned_input=request.prompt.tokens
        if isinstance(request.prompt, Spans) and request.turn == 0
        else None,
        planned_output=request.output_tokens,
        input_tokens=reply.input_tokens,
        cached_tokens=reply.cached_tokens,
        output_tokens=len(reply.chunks) if output is None else output,
        counted_by_server=output is not None,
        resent=reply.resent,
    )


def _steps(counts: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise([0, *counts])]
