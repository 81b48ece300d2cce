"""Client of the engine core: sends requests, delivers deltas and restarts the core process.

If a core crashes, hangs or keeps more memory than its bound, the client starts another one. Requests in flight
(`in_flight_requests.py`) continue exactly after their last token, so a reader only notices a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import structlog

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import AdapterSource, EngineRequest
from argosy.engine.serving.core_messages import (
    AdapterReport,
    CoreFailed,
    CoreReady,
    FromCore,
    Heartbeat,
    LoadAdapter,
    LoadProgress,
    SetSleepLevel,
    ShedMemory,
    Shutdown,
    SleepChanged,
    StepOutputs,
    ToCore,
    UnloadAdapter,
    failure_status,
)
from argosy.engine.serving.engine_core.core_handle import CoreHandle
from argosy.engine.serving.engine_core.core_process import EXIT_UNRECOVERABLE, CoreLaunchSpec
from argosy.engine.serving.engine_core.core_start import DEFAULT_CORE_FACTORY, PrestartedCore
from argosy.engine.serving.engine_core.heartbeat_monitor import (
    CoreRestartPolicy,
    HeartbeatMonitor,
    MemoryAction,
)
from argosy.engine.serving.engine_core.in_flight_requests import DeltaStream, InFlightRequests
from argosy.engine.serving.engine_core.kv_cache_view import KvCacheView
from argosy.protocol import ApiError, ResourceUsage
from argosy.telemetry import CoreStats, LogFormat, SleepStats

EngineState = Literal["starting", "ready", "sleeping", "waking", "restarting", "failed", "stopped"]
LoadProgressCallback = Callable[[str, float], None]
"""Called with the current loading activity and its completed fraction (0 to 1)."""

HEARTBEAT_INTERVAL_S = 1.0
CORE_SHUTDOWN_TIMEOUT_S = 5.0
"""Time that a core may take to exit after `Shutdown` before it is killed."""

DEFAULT_RESTART_POLICY = CoreRestartPolicy()

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.engine")


class EngineFailedError(RuntimeError):
    """The core cannot be started. The message gives the reason and the remedy."""


class EngineClient:
    """Client of one engine core process, which is restarted when it fails.

    Not thread-safe: use it from the event loop that calls `start`. The process runs `core_factory`, given as
    `module:name` (see `core_process.CoreFactory`).
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core_factory: str = DEFAULT_CORE_FACTORY,
        on_load_progress: LoadProgressCallback | None = None,
        restart_policy: CoreRestartPolicy = DEFAULT_RESTART_POLICY,
        log_format: LogFormat = "console",
        log_level: str = "info",
        log_name: str = "",
        prestarted_core: PrestartedCore | None = None,
    ) -> None:
        """Create the client. If `prestarted_core` is given, its process becomes the first core."""
        self._config = config
        self._prestarted_core = prestarted_core
        self._on_load_progress = on_load_progress
        self._on_step: Callable[[CoreStats], None] | None = None
        self._restart_policy = restart_policy
        self._heartbeat_interval_s = min(HEARTBEAT_INTERVAL_S, config.stall_timeout_s / 4)
        self.load_progress: LoadProgress | None = None
        """Latest start-up progress of the core; None before the first report and while the core serves.

        After a restart its activity has the reason.
        """
        self.kv_cache_view = KvCacheView()
        """KV blocks in the core's prefix cache."""
        self.resident_adapters: dict[str, int] = {}
        """Bytes of the adapters in the core's memory, by digest."""
        self._pinned_adapters: dict[str, AdapterSource] = {}
        self._adapter_loads: dict[str, list[asyncio.Future[None]]] = {}
        """Callers of `load_adapter` that wait for the core's report, by digest."""
        self._launch_spec = CoreLaunchSpec(
            engine_config=config,
            core_factory=core_factory,
            heartbeat_interval_s=self._heartbeat_interval_s,
            log_format=log_format,
            log_level=log_level,
            log_name=log_name,
            parent_pid=os.getpid(),
        )
        self.state: EngineState = "starting"
        """State of the core. Requests are accepted only if it is `ready`."""
        self._info: CoreReady | None = None
        self.stats = CoreStats()
        """State of the core after its last step."""
        self.usage = ResourceUsage()
        """CPU and memory of the core and its machine at its last heartbeat."""
        self.memory_bound_bytes = 0
        """Bound of the core's private memory. 0 sets none."""
        self._core: CoreHandle | None = None
        self._failure = ""
        self._exit_message = ""
        self._no_restart = False
        self._recycle_reason = ""
        """Why the core is replaced on purpose, or an empty text."""
        self._restart_reason = ""
        """Why the core was replaced, until the next one serves."""
        self._in_flight = InFlightRequests(self._send, self._follow_sleep_level)
        self._ready_at = 0.0
        self._consecutive_restarts = 0
        self.restarts_total = 0
        self.core_exits = 0
        """Times that a core with a loaded model failed."""
        self.last_core_exit = ""
        """Why a core failed last."""
        self.sleep_level = 0
        """Level of sleep that the core has reached, see `SetSleepLevel`."""
        self._sleeps_total = {1: 0, 2: 0}
        """Number of times that the core has fallen asleep, by level."""
        self.wake_s = 0.0
        """How long the core took to wake up last. 0 if it has not slept."""
        self._wanted_sleep_level = 0
        self._sent_sleep_level = 0
        """Level that was last requested from the core. Later it reports it, after others at most."""
        self._sleep_changed = asyncio.Event()
        """Set once, when the level or the state changes next."""
        self._start_settled: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def info(self) -> CoreReady:
        """Properties that the core reported when it became ready.

        Raises:
            RuntimeError: The core has not been ready yet.
        """
        if self._info is None:
            msg = "the engine is not ready yet; await start() first"
            raise RuntimeError(msg)
        return self._info

    @property
    def in_flight(self) -> int:
        """Number of requests without a final delta."""
        return len(self._in_flight)

    @property
    def core_pid(self) -> int | None:
        """Process id of the core, or None if no core runs."""
        return self._core.pid if self._core else None

    async def start(self, on_step: Callable[[CoreStats], None] | None = None) -> CoreReady:
        """Start the core and wait until it serves. `on_step` is called with the statistics of each step.

        Raises:
            EngineFailedError: The core cannot serve.
        """
        self._on_step = on_step
        self._start_settled = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        await self._start_settled
        if self.state != "ready":
            await self._supervisor
            raise EngineFailedError(self._failure or "the engine was stopped while it started")
        return self.info

    def generate(self, request: EngineRequest) -> DeltaStream:
        """Send a request to the core and return the stream of its deltas.

        The stream ends after the delta with `finish_reason`. Close the stream to abort the request.

        Raises:
            ApiError: 503 if no core can serve the request.
        """
        if self.state != "ready":
            raise self._unavailable_error()
        return self._in_flight.add(request)

    async def set_sleep_level(self, level: int) -> bool:
        """Let the core free memory, or allocate it again, see `SetSleepLevel`. Returns when that is done.

        Sleep begins when the running requests have ended. No others are accepted meanwhile.

        Returns:
            Whether the core has reached the level. It has not if another call replaces this one, or if it fails.

        Raises:
            ApiError: 503 if no core runs.
        """
        if self.state not in ("ready", "sleeping", "waking"):
            raise self._unavailable_error()
        self._wanted_sleep_level = level
        self._follow_sleep_level()
        while level == self._wanted_sleep_level != self.sleep_level and not self._is_over:
            await self._sleep_changed.wait()
        return level == self.sleep_level

    @property
    def sleep_stats(self) -> SleepStats:
        """Sleep of the model, for metrics."""
        is_awake = self._info is not None and not self.sleep_level
        return SleepStats(
            state=self.state,
            level=self.sleep_level,
            totals=self._sleeps_total.copy(),
            wake_s=self.wake_s,
            mapped_bytes=self.info.mapped_bytes if is_awake else 0,
        )

    @property
    def _is_over(self) -> bool:
        return self.state in ("failed", "stopped")

    def _follow_sleep_level(self) -> None:
        """Request the wanted level of sleep from the core once no request runs, and update the state."""
        if self.state not in ("ready", "sleeping", "waking"):
            return
        if self._wanted_sleep_level == self._sent_sleep_level == self.sleep_level == 0:
            if self.state != "ready":
                self.state = "ready"
                self._notify_sleep_changed()
            return
        wanted = self._wanted_sleep_level
        if wanted != self._sent_sleep_level and not self.in_flight:
            self._sent_sleep_level = wanted
            self._send(SetSleepLevel(wanted))
        self.state = "sleeping" if wanted else "waking"
        self._notify_sleep_changed()

    def _notify_sleep_changed(self) -> None:
        self._sleep_changed.set()
        self._sleep_changed = asyncio.Event()

    async def load_adapter(self, source: AdapterSource, *, is_pinned: bool = False) -> None:
        """Load an adapter before its first request. A pinned one stays loaded until `unload_adapter`.

        Raises:
            ApiError: 400 if the model cannot use it, 503 if it cannot be loaded now.
        """
        if self.state != "ready":
            raise self._unavailable_error()
        loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._adapter_loads.setdefault(source.digest, []).append(loaded)
        self._send(LoadAdapter(source, is_pinned))
        await loaded
        if is_pinned:
            self._pinned_adapters[source.digest] = source

    def unload_adapter(self, digest: str) -> None:
        """Free the memory of an adapter as soon as no request uses it."""
        self._pinned_adapters.pop(digest, None)
        self._send(UnloadAdapter(digest))

    def find_adapters_in_flight(self) -> tuple[set[str], set[str]]:
        """Return the digests of the adapters that generate tokens, and of others whose requests wait."""
        return self._in_flight.find_adapters()

    async def close(self) -> None:
        """Stop the core. Requests in flight end with an error. May be called more than once."""
        if self.state != "failed":
            self.state = "stopped"
        self._closing.set()
        self._notify_sleep_changed()
        if self._supervisor is not None:
            await self._supervisor
        self._fail_adapter_loads(self._unavailable_error())
        self._in_flight.fail_all(
            "the server stopped before this request finished; send it to another replica"
        )

    # --- supervision ---

    async def _supervise(self) -> None:
        try:
            while (reason := await self._run_core_once()) is not None:
                wait_s = self._on_core_exit(reason)
                if wait_s is None:
                    self._fail_permanently(reason)
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), wait_s)
                self.restarts_total += 1
        except Exception:
            log.exception("engine_supervisor_failed")
            self._fail_permanently("an internal error in the engine's supervisor; see the log")
        finally:
            if self._start_settled is not None and not self._start_settled.done():
                self._start_settled.set_result(None)

    async def _run_core_once(self) -> str | None:
        """Run one core process from start to exit. Return why it exited, or None if it was stopped on purpose."""
        if self._closing.is_set():
            return None
        monitor = HeartbeatMonitor(
            self._config.stall_timeout_s, self._heartbeat_interval_s, time.monotonic()
        )
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._exit_message = ""
        try:
            self._core = CoreHandle(
                self._launch_spec,
                on_message=partial(self._on_message, monitor),
                on_exit=exited.set_result,
                process=self._prestarted_core.take_process() if self._prestarted_core else None,
            )
        except OSError as error:
            return f"the core's process cannot be started: {error}"
        kill_reason = await self._watch_core(self._core, monitor, exited)
        self._core = None
        if self._closing.is_set():
            return None
        status = exited.result()
        self._no_restart = status == EXIT_UNRECOVERABLE
        if kill_reason is not None:
            return kill_reason
        return self._exit_message or _describe_exit(status)

    async def _watch_core(
        self, core: CoreHandle, monitor: HeartbeatMonitor, exited: asyncio.Future[int]
    ) -> str | None:
        """Wait for the core's exit, recycle it if due, and kill it if it hangs. Return why it was ended, else None."""
        closing = asyncio.ensure_future(self._closing.wait())
        awaited: set[asyncio.Future[Any]] = {exited, closing}
        kill_reason = None
        while not exited.done():
            await asyncio.wait(
                awaited, timeout=self._heartbeat_interval_s, return_when=asyncio.FIRST_COMPLETED
            )
            is_due = self._recycle_reason and (self.info.is_exact or not self.in_flight)
            if closing.done() or (is_due and not exited.done()):
                kill_reason = self._recycle_reason or None
                await self._shutdown_core(core, monitor, exited)
                break
            core.receive_pending()  # messages that arrived while this task did not run count
            kill_reason = monitor.check(time.monotonic())
            if kill_reason is not None:
                core.send_signal(signal.SIGKILL)
                await exited
        closing.cancel()
        return kill_reason

    async def _shutdown_core(
        self, core: CoreHandle, monitor: HeartbeatMonitor, exited: asyncio.Future[int]
    ) -> None:
        core.send(Shutdown())
        if not monitor.is_serving:  # a loading core does not read messages yet
            core.send_signal(signal.SIGTERM)
        await asyncio.wait({exited}, timeout=CORE_SHUTDOWN_TIMEOUT_S)
        if not exited.done():
            core.send_signal(signal.SIGKILL)
            await exited

    def _on_core_exit(self, reason: str) -> float | None:
        """Handle a core's failure. Return the seconds until the next start, or None for no restart."""
        self.stats = CoreStats()
        self.sleep_level = self._sent_sleep_level = 0
        self.kv_cache_view.reset()
        self.resident_adapters = {}
        self._fail_adapter_loads(self._unavailable_error())
        if self._info is None:  # `start` raises the reason
            return None
        recycle_reason, self._recycle_reason = self._recycle_reason, ""
        if reason == recycle_reason:
            self.state = "restarting"
            resumed = self._in_flight.queue_replay(
                reason, is_exact=self._info.is_exact, is_crash=False
            )
            log.warning("core_recycled", reason=reason, resumed=resumed)
            return 0.0
        self.core_exits += 1
        self.last_core_exit = reason
        log.error("core_exited", reason=reason, in_flight=self.in_flight)
        if self._no_restart:
            return None
        if time.monotonic() - self._ready_at >= self._restart_policy.healthy_s:
            self._consecutive_restarts = 0
        wait_s = self._restart_policy.next_backoff_s(self._consecutive_restarts)
        self._consecutive_restarts += 1
        if wait_s is None:
            return None
        self._restart_reason = reason
        self.load_progress = self._explain_progress(LoadProgress("restarting", 0.0))
        self.state = "restarting"
        resumed = self._in_flight.queue_replay(reason, is_exact=self._info.is_exact)
        log.warning("core_restart_scheduled", wait_s=wait_s, resumed=resumed)
        return wait_s

    def _fail_permanently(self, reason: str) -> None:
        self.state = "failed"
        self._failure = reason
        self._notify_sleep_changed()
        if self._info is not None:
            log.error("engine_failed", reason=reason)
        self._in_flight.fail_all(f"the engine failed: {reason}")

    # --- messages from the core ---

    def _on_message(self, monitor: HeartbeatMonitor, message: FromCore) -> None:
        now = time.monotonic()
        match message:
            case StepOutputs():
                self.stats = message.stats
                if message.kv_change is not None:
                    self.kv_cache_view.apply_change(message.kv_change)
                if message.adapters is not None:
                    self._on_adapter_report(message.adapters)
                if self._on_step is not None:
                    self._on_step(message.stats)
                for delta in message.deltas:
                    if self._in_flight.deliver(delta):
                        self._consecutive_restarts = 0  # the core completes requests
            case SleepChanged():
                self._on_sleep_changed(message)
            case Heartbeat():
                self.usage = message.usage
                self._limit_memory(monitor.record_heartbeat(message, now))
            case LoadProgress():
                monitor.record_load_progress(now)
                self.load_progress = self._explain_progress(message)
                if self._on_load_progress is not None and self._info is None:
                    self._on_load_progress(message.activity, message.fraction)
            case CoreReady():
                monitor.record_ready(now, message.load_s, message.memory_bound_bytes)
                self.load_progress, self._restart_reason = None, ""
                self.memory_bound_bytes = message.memory_bound_bytes
                self._on_core_ready(message, now)
            case CoreFailed():
                self._exit_message = message.message

    def _on_sleep_changed(self, message: SleepChanged) -> None:
        if message.kv_change is not None:
            self.kv_cache_view.apply_change(message.kv_change)
        if message.level:
            self.resident_adapters = {
                digest: size_bytes
                for digest, size_bytes in self.resident_adapters.items()
                if digest in self._pinned_adapters
            }
        if message.level > self.sleep_level:
            self._sleeps_total[message.level] += 1
        elif message.level < self.sleep_level:
            self.wake_s = message.seconds
        log.info(
            "core_sleep_changed",
            level=message.level,
            previous=self.sleep_level,
            seconds=round(message.seconds, 3),
        )
        self.sleep_level, self.load_progress = message.level, None
        self._follow_sleep_level()

    def _on_adapter_report(self, report: AdapterReport) -> None:
        self.resident_adapters = report.resident
        for digest, waiting in list(self._adapter_loads.items()):
            failure = report.failures.get(digest)
            if failure is None and digest not in report.resident:
                continue
            del self._adapter_loads[digest]
            for loaded in waiting:
                if loaded.done():  # its caller was cancelled
                    continue
                if failure is None:
                    loaded.set_result(None)
                else:
                    message, code = failure
                    message = f"The adapter is not loaded: {message}."
                    loaded.set_exception(ApiError(failure_status(code), code, message))

    def _fail_adapter_loads(self, error: ApiError) -> None:
        loads, self._adapter_loads = self._adapter_loads, {}
        for loaded in itertools.chain.from_iterable(loads.values()):
            if not loaded.done():
                loaded.set_exception(error)

    def _limit_memory(self, action: MemoryAction | None) -> None:
        """Let the core shed memory, or replace it if that did not help.

        A model whose results are not exact finishes its running requests before, and accepts no others meanwhile.
        """
        if action is None or self._recycle_reason or self.state != "ready":
            return
        if action != "recycle":
            self._send(ShedMemory(end_requests=action == "end_requests"))
            return
        self._recycle_reason = (
            f"the engine is replaced, because its memory of {self.usage.memory_bytes >> 20} MiB stayed above its bound"
            f" of {self.memory_bound_bytes >> 20} MiB"
        )
        self._restart_reason = self._recycle_reason
        self.load_progress = self._explain_progress(LoadProgress("restarting", 0.0))
        if not self.info.is_exact:
            self.state = "restarting"
        log.warning("core_recycle_scheduled", reason=self._recycle_reason, in_flight=self.in_flight)

    def _explain_progress(self, progress: LoadProgress) -> LoadProgress:
        """Return the progress with the reason of the restart, if it is one."""
        if not self._restart_reason:
            return progress
        activity = f"{progress.activity} ({self._restart_reason})"
        return LoadProgress(activity, progress.fraction)

    def _on_core_ready(self, ready: CoreReady, now: float) -> None:
        if self._info is not None and self._info.fingerprint != ready.fingerprint:
            log.error("model_files_changed", in_flight=self.in_flight)
            self._in_flight.fail_all(
                "the model's files or its kernels were replaced during the request; send it again"
            )
        self._info = ready
        self._ready_at = now
        if self._closing.is_set():
            return
        self.state = "ready"
        log.info("core_ready", load_s=round(ready.load_s, 3), backend=ready.backend)
        if self._start_settled is not None and not self._start_settled.done():
            self._start_settled.set_result(None)
        for source in self._pinned_adapters.values():  # those of the previous core
            self._send(LoadAdapter(source, is_pinned=True))
        self._in_flight.replay_next()
        self._follow_sleep_level()  # a core that failed in its sleep sleeps again

    # --- messages to the core ---

    def _send(self, message: ToCore) -> None:
        """Send a message to the core. Dropped if no core runs."""
        if self._core is not None:
            self._core.send(message)

    def _unavailable_error(self) -> ApiError:
        retry_s: float | None = 1.0
        match self.state:
            case "starting" | "restarting" | "waking":
                message = f"the engine is {self.state}; try again shortly"
            case "sleeping":
                message = "the engine sleeps; wake it up, or send the request to another replica"
            case "stopped":
                message = "the server is stopping; send the request to another replica"
            case _:
                message = f"the engine has failed ({self._failure}); start the server again"
                retry_s = None
        return ApiError(503, "engine_unavailable", message, retry_after_s=retry_s)


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"the core exited with status {status}"
    name = signal.Signals(-status).name
    hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
    return f"the core was terminated by {name}{hint}"
