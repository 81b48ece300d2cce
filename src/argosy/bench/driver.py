"""Driver of a load plan: sends the requests on schedule and records a row for each, whether it succeeds or fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Iterator

from argosy.bench.client import BenchClient, Clock
from argosy.bench.metrics import RequestRow
from argosy.bench.plan import LoadPlan, PlannedRequest, SyntheticPrompt
from argosy.bench.response import BenchResponse
from argosy.bench.target import ConversationTurn, RequestBodyBuilder

_STOP_CHECK_INTERVAL_S = 0.25
"""Interval in which sleeping tasks check whether the run was stopped."""
_TIMER_RESOLUTION_S = 0.002
"""Resolution of the event loop's timers, which is about a millisecond. The remaining time is spent yielding."""


class Driver:
    """Run of one plan."""

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
        """Whether `stop` was called."""
        self.rows: list[RequestRow] = []
        """Rows of ended requests, in the order of their ends."""
        self.in_flight = 0
        self.interrupted = False
        """Whether the run was cancelled before the end of the plan."""

    def stop(self) -> None:
        """Send no more requests and cancel those in flight."""
        self.stopped = True
        for task in self._tasks:
            task.cancel()

    async def run(self) -> list[RequestRow]:
        """Run the plan and return all rows by index. A cancellation ends the run early and keeps the rows."""
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
        for worker in range(min(workers, len(self._plan.sessions))):  # more would have no session
            start_s = self._plan.ramp_s * worker / workers
            self._start_task(self._run_worker(sessions, start_s))

    async def _run_worker(
        self, sessions: Iterator[tuple[PlannedRequest, ...]], start_s: float
    ) -> None:
        await self._sleep_until(start_s)
        duration_s = self._plan.duration_s
        for session in sessions:
            body = self._body_builder.build_body(session[0], [])
            now = self._elapsed_s()
            if duration_s is not None and now >= duration_s:
                return
            await self._run_session(session, now, body)

    def _start_task(self, session: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(session)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for_tasks(self) -> None:
        while self._tasks:
            # From Python 3.12 on `gather` does not yield if all tasks have ended, and this would loop forever.
            ended, _ = await asyncio.wait(self._tasks)
            for task in ended:
                if not task.cancelled():
                    task.result()

    async def _run_session(
        self, session: tuple[PlannedRequest, ...], scheduled_s: float, body: bytes
    ) -> None:
        history: list[ConversationTurn] = []
        for request, next_request in itertools.zip_longest(session, session[1:]):
            response = await self._send_turn(request, scheduled_s, body, keep_text=len(session) > 1)
            if next_request is None:
                return
            if response.error:
                for skipped in session[request.turn + 1 :]:
                    self._record_row(
                        skipped, BenchResponse(), self._elapsed_s(), "an earlier turn failed"
                    )
                return
            history.append((self._body_builder.prompt_text(request.prompt), response.text))
            body = self._body_builder.build_body(next_request, history)
            scheduled_s = self._elapsed_s() + next_request.think_s
            await self._sleep_until(scheduled_s)

    async def _send_turn(
        self, request: PlannedRequest, scheduled_s: float, body: bytes, *, keep_text: bool
    ) -> BenchResponse:
        response = BenchResponse(keep_text=keep_text)
        try:
            async with self._concurrency_limit:
                await self._post_request(request, body, response)
        except asyncio.CancelledError:
            self._record_row(request, response, scheduled_s, "cancelled")
            raise
        if not response.error and not response.chunk_times:
            response.record_error("empty", "The response contains no text.")
        elif not response.error and response.finish_reason is None and not response.saw_done:
            response.record_error("cut", "The stream ended without a finish reason.")
        self._record_row(request, response, scheduled_s, "")
        return response

    async def _post_request(
        self, request: PlannedRequest, body: bytes, response: BenchResponse
    ) -> None:
        request_id = f"{self._run_id}-{request.index}"
        self.in_flight += 1
        try:
            await self._client.post(self._body_builder.target.api_path, body, response, request_id)
        finally:
            self.in_flight -= 1

    def _record_row(
        self,
        request: PlannedRequest,
        response: BenchResponse,
        scheduled_s: float,
        cancel_reason: str,
    ) -> None:
        now, started_at = self._clock(), self._started_at
        ok = not response.error and not cancel_reason
        end = response.last_chunk_at if ok and response.last_chunk_at is not None else now
        has_token_counts = len(response.running_token_counts) == len(response.chunk_times) > 0
        output_tokens = response.output_tokens
        is_in_ramp = request.phase == "measured" and scheduled_s < self._plan.ramp_s
        row = RequestRow(
            index=request.index,
            session=request.session,
            turn=request.turn,
            phase="ramp" if is_in_ramp else request.phase,
            outcome="cancelled" if cancel_reason else "ok" if ok else "error",
            error=cancel_reason or response.error,
            detail=response.error_detail,
            status=response.status,
            finish=response.finish_reason,
            scheduled_s=scheduled_s,
            sent_s=(now if response.sent_at is None else response.sent_at) - started_at,
            end_s=end - started_at,
            chunks_s=[at - started_at for at in response.chunk_times],
            chunk_tokens=_differences(response.running_token_counts) if has_token_counts else None,
            planned_input=request.prompt.tokens
            if isinstance(request.prompt, SyntheticPrompt) and request.turn == 0
            else None,
            planned_output=request.output_tokens,
            input_tokens=response.input_tokens,
            cached_tokens=response.cached_tokens,
            output_tokens=len(response.chunk_times) if output_tokens is None else output_tokens,
            counted_by_server=output_tokens is not None,
            resent=response.resent,
        )
        self.rows.append(row)
        self._on_row(row)

    def _elapsed_s(self) -> float:
        return self._clock() - self._started_at

    async def _sleep_until(self, at_s: float) -> None:
        while True:
            remaining = at_s - self._elapsed_s()
            if remaining <= 0 or self.stopped:
                return
            sleep_s = min(remaining - _TIMER_RESOLUTION_S / 2, _STOP_CHECK_INTERVAL_S)
            await asyncio.sleep(sleep_s if remaining > _TIMER_RESOLUTION_S else 0)


def _differences(counts: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise([0, *counts])]
