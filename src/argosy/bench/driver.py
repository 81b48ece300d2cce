"""Carries out a plan against a server: sends on time, survives every failure, gives a row for each request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator

import msgspec

from argosy.bench.client import BenchClient, Clock
from argosy.bench.metrics import RequestRow
from argosy.bench.plan import LoadPlan, PlannedRequest, SyntheticPrompt
from argosy.bench.request_body_builder import ConversationTurn, RequestBodyBuilder
from argosy.bench.response import BenchResponse

_STOP_CHECK_INTERVAL_S = 0.25
"""So often it is seen whether the run has been stopped."""
_TIMER_RESOLUTION_S = 0.002
"""The event loop's own timers are right to about a millisecond; the rest is spent yielding."""


class Driver:
    """One run of one plan."""

    def __init__(
        self,
        plan: LoadPlan,
        client: BenchClient,
        body_builder: RequestBodyBuilder,
        *,
        clock: Clock,
        on_row: Callable[[RequestRow], None],
        run_id: str,
    ) -> None:
        self._plan = plan
        self._client = client
        self._body_builder = body_builder
        self._clock = clock
        self._on_row = on_row
        self._run_id = run_id
        self._started_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._concurrency_limit: contextlib.AbstractAsyncContextManager[object] = (
            contextlib.nullcontext()
        )
        self.stopped = False
        """`stop` was called."""
        self.rows: list[RequestRow] = []
        """What has ended, in that order."""
        self.in_flight = 0
        self.interrupted = False
        """Stopped from outside before the plan was through."""

    def stop(self) -> None:
        """Send no more and cancel what runs."""
        self.stopped = True
        for task in self._tasks:
            task.cancel()

    async def run(self) -> list[RequestRow]:
        """All rows, by index. A cancellation ends the run early; what has been measured is kept."""
        try:
            await self._warm_up()
            self._started_at = self._clock()
            if self._plan.sessions[0][0].at_s is None:
                await self._run_closed_loop()
            else:
                await self._run_open_loop()
            await self._wait_for_tasks()
        except asyncio.CancelledError:
            self.interrupted = True
            self.stop()
            await self._wait_for_tasks()
        return sorted(self.rows, key=lambda row: row.index)

    async def _warm_up(self) -> None:
        self._started_at = self._clock()
        for request in self._plan.warmup:
            self._start_task(
                self._run_session((request,), 0.0, self._body_builder.build_body(request, []))
            )
        await self._wait_for_tasks()

    async def _run_open_loop(self) -> None:
        if self._plan.concurrency is not None:
            self._concurrency_limit = asyncio.Semaphore(self._plan.concurrency)
        for session in self._plan.sessions:
            at_s = session[0].at_s or 0.0
            body = self._body_builder.build_body(session[0], [])
            await self._sleep_until(at_s)
            if self.stopped:
                return
            self._start_task(self._run_session(session, at_s, body))

    async def _run_closed_loop(self) -> None:
        sessions = iter(self._plan.sessions)
        workers = self._plan.concurrency or 1
        for worker in range(min(workers, len(self._plan.sessions))):  # those after them find none
            begin_s = self._plan.ramp_s * worker / workers
            self._start_task(self._run_worker(sessions, begin_s))

    async def _run_worker(
        self, sessions: Iterator[tuple[PlannedRequest, ...]], begin_s: float
    ) -> None:
        await self._sleep_until(begin_s)
        limit_s = self._plan.duration_s
        for session in sessions:
            body = self._body_builder.build_body(session[0], [])
            now = self._elapsed_s()
            if limit_s is not None and now >= limit_s:
                return
            await self._run_session(session, now, body)

    def _start_task(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for_tasks(self) -> None:
        while self._tasks:
            # `gather` lets nobody run where all have ended, from Python 3.12 on: they would stay here for ever.
            ended, _ = await asyncio.wait(self._tasks)
            for task in ended:
                if not task.cancelled():
                    task.result()

    async def _run_session(
        self, session: tuple[PlannedRequest, ...], scheduled_s: float, body: bytes
    ) -> None:
        history: list[ConversationTurn] = []
        for request, following in itertools.zip_longest(session, session[1:]):
            reply = await self._send_turn(request, scheduled_s, body, keep_text=len(session) > 1)
            if following is None:
                return
            if reply.error:
                for lost in session[request.turn + 1 :]:
                    self._record_row(
                        lost, BenchResponse(), self._elapsed_s(), "an earlier turn failed"
                    )
                return
            history.append(
                ConversationTurn(self._body_builder.prompt_text(request.prompt), reply.text)
            )
            body = self._body_builder.build_body(following, history)
            scheduled_s = self._elapsed_s() + following.think_s
            await self._sleep_until(scheduled_s)

    async def _send_turn(
        self, request: PlannedRequest, scheduled_s: float, body: bytes, *, keep_text: bool
    ) -> BenchResponse:
        reply = BenchResponse(keep_text=keep_text)
        try:
            async with self._concurrency_limit:
                await self._post_request(request, body, reply)
        except asyncio.CancelledError:
            self._record_row(request, reply, scheduled_s, "cancelled")
            raise
        if not reply.error and not reply.chunk_times:
            reply.record_error("empty", "The answer has no text in it.")
        elif not reply.error and reply.finish_reason is None and not reply.saw_done:
            reply.record_error("cut", "The stream ended without a reason.")
        self._record_row(request, reply, scheduled_s, "")
        return reply

    async def _post_request(
        self, request: PlannedRequest, body: bytes, reply: BenchResponse
    ) -> None:
        request_id = f"{self._run_id}-{request.index}"
        self.in_flight += 1
        try:
            await self._client.post(self._body_builder.target.api_path, body, reply, request_id)
        finally:
            self.in_flight -= 1

    def _record_row(
        self, request: PlannedRequest, reply: BenchResponse, scheduled_s: float, cancelled: str
    ) -> None:
        row = build_row(
            request,
            reply,
            scheduled_s=scheduled_s,
            started_at=self._started_at,
            now=self._clock(),
            cancel_reason=cancelled,
        )
        if self._plan.ramp_s and row.phase == "measured" and scheduled_s < self._plan.ramp_s:
            row = msgspec.structs.replace(row, phase="ramp")
        self.rows.append(row)
        self._on_row(row)

    def _elapsed_s(self) -> float:
        return self._clock() - self._started_at

    async def _sleep_until(self, at_s: float) -> None:
        while True:
            left = at_s - self._elapsed_s()
            if left <= 0 or self.stopped:
                return
            coarse = min(left - _TIMER_RESOLUTION_S / 2, _STOP_CHECK_INTERVAL_S)
            await asyncio.sleep(coarse if left > _TIMER_RESOLUTION_S else 0)


def build_row(
    request: PlannedRequest,
    response: BenchResponse,
    *,
    scheduled_s: float,
    started_at: float,
    now: float,
    cancel_reason: str,
) -> RequestRow:
    """The row of a reply that has ended; `cancelled` says why nobody waited for the end, or is empty."""
    ok = not response.error and not cancel_reason
    end = response.last_chunk_at if ok and response.last_chunk_at is not None else now
    counted = len(response.running_token_counts) == len(response.chunk_times) > 0
    output = response.output_tokens
    return RequestRow(
        index=request.index,
        session=request.session,
        turn=request.turn,
        phase=request.phase,
        outcome="cancelled" if cancel_reason else "ok" if ok else "error",
        error=cancel_reason or response.error,
        detail=response.error_detail,
        status=response.status,
        finish=response.finish_reason,
        scheduled_s=scheduled_s,
        sent_s=(now if response.sent_at is None else response.sent_at) - started_at,
        end_s=end - started_at,
        chunks_s=[at - started_at for at in response.chunk_times],
        chunk_tokens=_differences(response.running_token_counts) if counted else None,
        planned_input=request.prompt.tokens
        if isinstance(request.prompt, SyntheticPrompt) and request.turn == 0
        else None,
        planned_output=request.output_tokens,
        input_tokens=response.input_tokens,
        cached_tokens=response.cached_tokens,
        output_tokens=len(response.chunk_times) if output is None else output,
        counted_by_server=output is not None,
        resent=response.resent,
    )


def _differences(counts: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise([0, *counts])]
