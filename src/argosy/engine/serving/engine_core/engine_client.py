"""The replica's side of the engine core: requests in, deltas out, also through a core's death.

When a core dies or hangs, another one is started, and what is in flight (`in_flight.py`) goes on from
exactly where it was; the reader notices a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import structlog

from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.core_messages import (
    Beat,
    EngineRequest,
    Failed,
    FromCore,
    Loading,
    Outputs,
    Ready,
    Shutdown,
    Stats,
    ToCore,
)
from argosy.engine.serving.engine_core.core_handle import CoreHandle
from argosy.engine.serving.engine_core.core_process import EXIT_REFUSED
from argosy.engine.serving.engine_core.core_start import CORE, EarlyCore
from argosy.engine.serving.engine_core.delta_stream import DeltaStream
from argosy.engine.serving.engine_core.heartbeat_monitor import RestartPolicy, Vigil
from argosy.engine.serving.engine_core.in_flight_requests import InFlight
from argosy.engine.serving.engine_core.kv_cache_view import KvLedger
from argosy.protocol import ApiError
from argosy.telemetry import LogFormat

State = Literal["starting", "ready", "restarting", "failed", "stopped"]
Progress = Callable[[str, float], None]
"""Called with what is being loaded and how much of it is done (0 to 1)."""

BEAT_S = 1.0
GOODBYE_S = 5.0
"""How long a core may take to leave when asked to."""

RESTARTS = RestartPolicy()

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.engine")


class EngineFailedError(RuntimeError):
    """The core cannot be started; the message says why and what to change."""


class EngineClient:
    """One engine core in a process of its own, started again when it fails.

    Belongs to the event loop that calls `start`. `core` names what the process runs, as
    `module:name` (see `process.CoreFactory`).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core: str = CORE,
        progress: Progress | None = None,
        restarts: RestartPolicy = RESTARTS,
        log_format: LogFormat = "console",
        log_level: str = "info",
        log_name: str = "",
        early: EarlyCore | None = None,
    ) -> None:
        """`early` is the process of the first core, when it has been started already."""
        self._config = config
        self._early = early
        self._progress = progress
        self._on_step: Callable[[Stats], None] | None = None
        self._policy = restarts
        self._beat_s = min(BEAT_S, config.stall_timeout_s / 4)
        self.kv = KvLedger()
        """What its requests would find in the prefix cache."""
        self._start_core = partial(
            CoreHandle,
            config,
            core,
            beat_s=self._beat_s,
            log_format=log_format,
            log_level=log_level,
            log_name=log_name,
        )
        self._state: State = "starting"
        self._info: Ready | None = None
        self._stats = Stats()
        self._core: CoreHandle | None = None
        self._failure = ""
        self._last_words = ""
        self._hopeless = False
        self._in_flight = InFlight(self._send)
        self._ready_at = 0.0
        self._restarts_in_a_row = 0
        self._restarts_total = 0
        self._settled: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def state(self) -> State:
        """Where the core stands; requests are taken only when it is "ready"."""
        return self._state

    @property
    def info(self) -> Ready:
        """What the core said when it became ready. Raises RuntimeError before that."""
        if self._info is None:
            msg = "the engine is not ready yet; await start() first"
            raise RuntimeError(msg)
        return self._info

    @property
    def stats(self) -> Stats:
        """The core's state after its last step."""
        return self._stats

    @property
    def restarts_total(self) -> int:
        """How often a core was started again since this client was made."""
        return self._restarts_total

    @property
    def in_flight(self) -> int:
        """Requests whose last delta has not come yet."""
        return len(self._in_flight)

    @property
    def core_pid(self) -> int | None:
        """Process id of the core, when there is one."""
        return self._core.pid if self._core else None

    async def start(self, on_step: Callable[[Stats], None] | None = None) -> Ready:
        """Start the core and wait until it serves; `on_step` is told of each step from then on.

        Raises EngineFailedError when it cannot serve.
        """
        self._on_step = on_step
        self._settled = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        await self._settled
        if self._state != "ready":
            await self._supervisor
            raise EngineFailedError(self._failure or "the engine was stopped while it started")
        return self.info

    def generate(self, request: EngineRequest) -> DeltaStream:
        """Send a request to the core; its deltas, ending after the one with `finish`.

        Close the stream to abort. Raises ApiError 503 when there is no core to serve it.
        """
        if self._state != "ready":
            raise self._unavailable()
        return self._in_flight.add(request)

    async def close(self) -> None:
        """Stop the core; requests in flight end with an error. Safe to call more than once."""
        if self._state != "failed":
            self._state = "stopped"
        self._closing.set()
        if self._supervisor is not None:
            await self._supervisor
        self._in_flight.end_all("the server stopped before this request was done")

    # --- the core's lives ---

    async def _supervise(self) -> None:
        try:
            while (reason := await self._live()) is not None:
                wait_s = self._bury(reason)
                if wait_s is None:
                    self._give_up(reason)
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), wait_s)
                self._restarts_total += 1
        except Exception:
            log.exception("engine_supervisor_failed")
            self._give_up("an error in the engine's supervisor; the log has it")
        finally:
            if self._settled is not None and not self._settled.done():
                self._settled.set_result(None)

    async def _live(self) -> str | None:
        """One life of a core, from start to end. Why it ended; None when we asked for it."""
        if self._closing.is_set():
            return None
        vigil = Vigil(self._config.stall_timeout_s, self._beat_s, time.monotonic())
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._last_words = ""
        try:
            self._core = self._start_core(
                hear=partial(self._hear, vigil),
                gone=exited.set_result,
                process=self._early.take() if self._early else None,
            )
        except OSError as error:
            return f"the core's process cannot be started: {error}"
        verdict = await self._watch(self._core, vigil, exited)
        self._core = None
        if self._closing.is_set():
            return None
        status = exited.result()
        self._hopeless = status == EXIT_REFUSED
        if verdict is not None:
            return verdict
        return self._last_words or _describe_exit(status)

    async def _watch(
        self, core: CoreHandle, vigil: Vigil, exited: asyncio.Future[int]
    ) -> str | None:
        """Wait for the core's end, killing it when it hangs; the verdict if it was that."""
        closing = asyncio.ensure_future(self._closing.wait())
        either: set[asyncio.Future[Any]] = {exited, closing}
        verdict = None
        while not exited.done():
            await asyncio.wait(either, timeout=self._beat_s, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await self._dismiss(core, vigil, exited)
                break
            core.listen()  # what came while we were away counts
            verdict = vigil.verdict(time.monotonic())
            if verdict is not None:
                core.signal(signal.SIGKILL)
                await exited
        closing.cancel()
        return verdict

    async def _dismiss(self, core: CoreHandle, vigil: Vigil, exited: asyncio.Future[int]) -> None:
        core.send(Shutdown())
        if not vigil.serving:  # it does not listen yet, as far as we know
            core.signal(signal.SIGTERM)
        await asyncio.wait({exited}, timeout=GOODBYE_S)
        if not exited.done():
            core.signal(signal.SIGKILL)
            await exited

    def _bury(self, reason: str) -> float | None:
        """A core died. How long to wait before the next one; None when there shall be none."""
        self._stats = Stats()
        self.kv.reset()
        if self._info is None:  # `start` raises it
            return None
        log.error("core_died", reason=reason, in_flight=self.in_flight)
        if self._hopeless:
            return None
        if time.monotonic() - self._ready_at >= self._policy.healthy_s:
            self._restarts_in_a_row = 0
        wait_s = self._policy.wait_s(self._restarts_in_a_row)
        self._restarts_in_a_row += 1
        if wait_s is None:
            return None
        self._state = "restarting"
        log.warning("core_restarts", wait_s=wait_s, resumed=self._in_flight.survive(reason))
        return wait_s

    def _give_up(self, reason: str) -> None:
        self._state = "failed"
        self._failure = reason
        if self._info is not None:
            log.error("engine_failed", reason=reason)
        self._in_flight.end_all(f"the engine failed: {reason}")

    # --- what the core says ---

    def _hear(self, vigil: Vigil, message: FromCore) -> None:
        now = time.monotonic()
        match message:
            case Outputs():
                self._stats = message.stats
                if message.kv is not None:
                    self.kv.change(message.kv)
                if self._on_step is not None:
                    self._on_step(message.stats)
                for delta in message.deltas:
                    if self._in_flight.deliver(delta):
                        self._restarts_in_a_row = 0  # this core does its work
            case Beat():
                vigil.beat(message, now)
            case Loading():
                vigil.progress(now)
                if self._progress is not None and self._info is None:
                    self._progress(message.what, message.done)
            case Ready():
                vigil.ready(now)
                self._welcome(message, now)
            case Failed():
                self._last_words = message.message

    def _welcome(self, ready: Ready, now: float) -> None:
        if self._info is not None and self._info.fingerprint != ready.fingerprint:
            log.error("model_changed", in_flight=self.in_flight)
            self._in_flight.end_all(
                "the model's files were replaced while it ran; send the request again"
            )
        self._info = ready
        self._ready_at = now
        if self._closing.is_set():
            return
        self._state = "ready"
        log.info("core_ready", load_s=round(ready.load_s, 3), backend=ready.backend)
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
        self._in_flight.resume()

    # --- what it is told ---

    def _send(self, message: ToCore) -> None:
        """Tell the core; what is said while there is none is for nobody."""
        if self._core is not None:
            self._core.send(message)

    def _unavailable(self) -> ApiError:
        retry_s: float | None = 1.0
        match self._state:
            case "starting" | "restarting":
                message = f"the engine is {self._state}; try again shortly"
            case "stopped":
                message = "the server is stopping; ask another replica"
            case _:
                message = f"the engine has failed ({self._failure}); start the server again"
                retry_s = None
        return ApiError(503, "engine_unavailable", message, retry_after_s=retry_s)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"the core exited with status {status}"
    name = signal.Signals(-status).name
    hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
    return f"the core was ended by {name}{hint}"
