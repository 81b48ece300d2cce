"""Runs simulations for the admin API in processes of their own, one at a time, within bounds of time and memory."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from functools import partial

from argosy.child_environment import system_variables
from argosy.process import kill_with_parent
from argosy.protocol import ApiError

CPU_LIMIT_S = 60
TIME_LIMIT_S = 180.0
"""Longest time of a run on a busy machine."""
MEMORY_LIMIT_BYTES = 2 << 30
MAX_WAITING = 8
"""Callers that wait for the run of another one."""
MAX_OUTPUT_BYTES = 4 << 20
NICENESS = 5
_RETRY_AFTER_S = 10.0
_TOO_LARGE = (
    f"The simulation needs more than {CPU_LIMIT_S} s of CPU time or {MEMORY_LIMIT_BYTES >> 30} GiB of memory. "
    "Choose a shorter time, or fewer requests or seeds."
)


class SimulationRunner:
    """Runs one simulation at a time. Not thread-safe: use it from one event loop.

    A caller has one run: a new one ends the one before.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._runs: dict[str, asyncio.Task[bytes]] = {}

    async def run(
        self, arguments: Sequence[str], content: bytes, caller: str, store_url: str | None = None
    ) -> bytes:
        """Run `python -m ARGUMENTS`, and return what it prints. Cancelling the call ends the process.

        Args:
            arguments: Module and its arguments, which no caller has written.
            content: Standard input.
            caller: Name of the caller.
            store_url: Store that the process reads, if it needs one.

        Raises:
            ApiError: 400 if it refuses its input or exceeds a bound, with its reason. 409 if the caller has begun
                another run. 503 if too many wait.
        """
        if caller not in self._runs and len(self._runs) > MAX_WAITING:
            message = "Too many simulations wait. Try again later."
            raise ApiError(503, "overloaded", message, retry_after_s=_RETRY_AFTER_S)
        earlier = self._runs.get(caller)
        if earlier is not None:
            earlier.cancel()
        run = asyncio.ensure_future(self._run_alone(arguments, content, store_url))
        self._runs[caller] = run
        try:
            return await run
        except asyncio.CancelledError:
            if self._runs.get(caller) is run:
                raise
            message = "Another simulation of the same caller has begun, which ends this one."
            raise ApiError(409, "conflict", message) from None
        finally:
            run.cancel()
            if self._runs.get(caller) is run:
                del self._runs[caller]

    async def _run_alone(
        self, arguments: Sequence[str], content: bytes, store_url: str | None
    ) -> bytes:
        async with self._lock:
            with (
                tempfile.TemporaryFile() as stdin
            ):  # asyncio's pipe is a socket, which /dev/stdin cannot open
                stdin.write(content)
                stdin.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", *arguments),
                    stdin=stdin,
                    stdout=PIPE,
                    stderr=PIPE,
                    env=_build_environment(store_url),
                    preexec_fn=partial(_limit_process, os.getpid()),
                )
            try:
                async with asyncio.timeout(TIME_LIMIT_S):
                    output, errors = await process.communicate()
            except TimeoutError:
                raise ApiError(400, "invalid_value", _TOO_LARGE) from None
            finally:
                if process.returncode is None:
                    process.kill()
        if process.returncode == 0 and len(output) <= MAX_OUTPUT_BYTES:
            return output
        reason = (
            errors.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("argosy: ")
        )
        is_refused = process.returncode in {1, 2} and "MemoryError" not in reason
        message = reason if is_refused and reason else _TOO_LARGE
        raise ApiError(400, "invalid_value", message)


def _build_environment(store_url: str | None) -> dict[str, str]:
    return system_variables(os.environ) | ({"ARGOSY_STORE": store_url} if store_url else {})


def _limit_process(parent_pid: int) -> None:
    """Bound the process that is about to start."""
    kill_with_parent(parent_pid)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
