"""The engine core process: loads the model and runs steps until it is stopped.

`core_start.start_core_process` starts it as `python -m argosy.engine.serving.engine_core.core_process FACTORY`. The
process imports FACTORY, then reads a `CoreLaunchSpec` as JSON from stdin. Two ZeroMQ sockets connect it to its parent.
The first carries `ToCore` in and `FromCore` out (msgpack). The second carries the heartbeat, which shows whether a
silent core hangs or computes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

import msgspec
import structlog
import zmq

from argosy.engine.engine_config import EngineConfig
from argosy.engine.engine_request import AdapterSource, EngineRequest
from argosy.engine.serving.core_messages import (
    AbortRequests,
    CoreFailed,
    CoreReady,
    Delta,
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
)
from argosy.engine.serving.engine_core.out_of_memory import is_out_of_memory
from argosy.extras import install_command
from argosy.machine_resources import CpuTimes, free_bytes, read_cpu_times, total_bytes
from argosy.process import kill_with_parent, private_memory_bytes, protect_standard_streams
from argosy.protocol import ResourceUsage
from argosy.telemetry import CoreStats, LogFormat, configure_logging

EXIT_FAILED = 1
"""Exit status after a failure that a restart may fix."""
EXIT_UNRECOVERABLE = 3
"""Exit status if settings, model or installation cannot work, so that a restart does not help."""
EMPTY_STEP_WAIT_MS = 1
"""Wait after a step that computed nothing (all requests are delayed or wait for a batch)."""
LOAD_BACKOFF_S = 1.0
"""Wait before the second attempt at loading. Doubled for each later attempt."""
FINAL_MESSAGE_LINGER_MS = 2000
"""Time for the last message to be transmitted before the process exits."""
PERMANENT_ERRORS = (ValueError, ImportError, FileNotFoundError, NotADirectoryError)
"""Errors of loading that a retry cannot fix."""


log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.core")
_encode = msgspec.msgpack.Encoder().encode


class CoreLaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a core process reads at its start."""

    engine_config: EngineConfig
    core_factory: str
    """Factory of the core as `module:name`, called as `CoreFactory`."""
    message_address: str = ""
    """ZeroMQ address of the parent's DEALER socket for `ToCore` and `FromCore` messages."""
    heartbeat_address: str = ""
    """ZeroMQ address of the parent's PULL socket for the heartbeat."""
    heartbeat_interval_s: float
    log_format: LogFormat
    log_level: str
    log_name: str
    parent_pid: int
    """Process id of the parent. The core exits with its parent."""


class Core(Protocol):
    """Interface of an engine core that the loop requires."""

    @property
    def info(self) -> CoreReady:
        """Properties of the loaded model."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests. Running ones end as `cancelled` in the next step's outputs."""
        ...

    def shed_memory(self, *, end_requests: bool) -> None:
        """Release memory, see `ShedMemory`. Requests end as errors in the next step's outputs."""
        ...

    def set_sleep_level(self, level: int) -> SleepChanged:
        """Free memory or allocate it again, see `SetSleepLevel`. An exception means that the core cannot continue."""
        ...

    def load_adapter(self, source: AdapterSource, *, is_pinned: bool) -> None:
        """Load an adapter, see `LoadAdapter`. The outputs of a later step have the result."""
        ...

    def unload_adapter(self, digest: str) -> None:
        """Free the memory of an adapter, see `UnloadAdapter`."""
        ...

    def step(self) -> StepOutputs:
        """Compute one step. An exception means that the core cannot continue."""
        ...


CoreFactory = Callable[[EngineConfig, Callable[[], float], Callable[[str, float], None]], Core]
"""`(config, clock, progress) -> core`, which loads the model."""


@dataclass(slots=True)
class HeartbeatState:
    """Content of the next heartbeat: steps made so far, and whether a step is due or in progress."""

    step: int = 0
    busy: bool = True


def load_core(
    spec: CoreLaunchSpec, on_progress: Callable[[str, float], None], sleep: Callable[[float], None]
) -> Core:
    """Create the core in at most `max_load_attempts` attempts with growing waits.

    Permanent errors (an invalid setting, a missing file or package) are raised at once. Other errors are raised after
    the last attempt.
    """
    factory: CoreFactory = pkgutil.resolve_name(spec.core_factory)
    attempts = max(spec.engine_config.max_load_attempts, 1)
    for attempt in range(1, attempts):
        try:
            return factory(spec.engine_config, time.monotonic, on_progress)
        except PERMANENT_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - any other error may be temporary
            wait_s = LOAD_BACKOFF_S * 2 ** (attempt - 1)
            log.warning(
                "core_load_retry_scheduled",
                attempt=attempt,
                of=attempts,
                wait_s=wait_s,
                error=str(error),
            )
            sleep(wait_s)
    return factory(spec.engine_config, time.monotonic, on_progress)


def describe_error(error: BaseException) -> str:
    """Return one sentence for the operator, with the remedy if it is known."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "safetensors"):
        return f"{error.name} is not installed; the engine needs it: {install_command('engine')}"
    if isinstance(error, PERMANENT_ERRORS):
        return str(error)
    if is_out_of_memory(error):
        return f"there is not enough memory ({error}); lower --kv-memory, --max-step-tokens or --max-seqs"
    return f"{type(error).__name__}: {error}"


class CoreLoop:
    """Main loop of the process: receives messages, runs steps and sends their outputs."""

    def __init__(
        self, core: Core, message_socket: zmq.Socket[bytes], heartbeat: HeartbeatState
    ) -> None:
        self._core = core
        self._message_socket = message_socket
        self._heartbeat = heartbeat
        self._decode = msgspec.msgpack.Decoder(ToCore).decode
        self._stats = CoreStats()
        self._sleep_level: int | None = None
        """Level of sleep to change to when no request is unfinished, or None."""

    def run(self) -> None:
        """Serve until `Shutdown`. Exceptions of `Core.step` are passed on."""
        core, heartbeat = self._core, self._heartbeat
        wait_ms = 0
        while True:
            heartbeat.busy = core.has_work
            for message in self._receive_messages(wait_ms if heartbeat.busy else None):
                if isinstance(message, Shutdown):
                    return
                self._handle_message(message)
            if core.has_work:
                heartbeat.busy = True
                outputs = core.step()
                heartbeat.step += 1
                self._stats = outputs.stats
                send_message(self._message_socket, outputs)
                wait_ms = 0 if outputs.deltas or outputs.stats.step_tokens else EMPTY_STEP_WAIT_MS
            elif self._sleep_level is not None:
                level, self._sleep_level = self._sleep_level, None
                heartbeat.busy = True
                send_message(self._message_socket, core.set_sleep_level(level))

    def _receive_messages(self, wait_ms: int | None) -> Iterator[ToCore]:
        """Yield the messages that have arrived. If `wait_ms` is None, wait for the first one."""
        while self._message_socket.poll(wait_ms, zmq.POLLIN):
            yield self._decode(self._message_socket.recv())
            wait_ms = 0

    def _handle_message(self, message: ToCore) -> None:
        match message:
            case EngineRequest():
                self._add_request(message)
            case AbortRequests():
                self._core.abort(message.request_ids)
            case ShedMemory():
                self._core.shed_memory(end_requests=message.end_requests)
            case SetSleepLevel():
                self._sleep_level = message.level
            case LoadAdapter():
                self._core.load_adapter(message.source, is_pinned=message.is_pinned)
            case UnloadAdapter():
                self._core.unload_adapter(message.digest)

    def _add_request(self, request: EngineRequest) -> None:
        try:
            self._core.add(request)
        except Exception as error:  # a failure must affect only its own request
            log.exception("core_request_failed", request=request.id)
            delta = Delta(id=request.id, finish_reason="error", error=describe_error(error))
            send_message(self._message_socket, StepOutputs([delta], self._stats))


def send_message(socket: zmq.Socket[bytes], message: FromCore) -> None:
    """Queue a message for the parent. Does not block, because the parent always reads."""
    socket.send(_encode(message))


def run_heartbeat(spec: CoreLaunchSpec, heartbeat: HeartbeatState) -> None:
    """Send heartbeats until the process ends. Exits the process if the parent has exited. Runs in its own thread."""
    socket = _connect(zmq.Context(), zmq.PUSH, spec.heartbeat_address)
    earlier = None
    while os.getppid() == spec.parent_pid:
        now = read_cpu_times()
        usage = _measure_usage(earlier, now)
        send_message(socket, Heartbeat(heartbeat.step, heartbeat.busy, usage))
        earlier = now
        time.sleep(spec.heartbeat_interval_s)
    os._exit(EXIT_FAILED)


def _measure_usage(earlier: CpuTimes | None, now: CpuTimes | None) -> ResourceUsage:
    """Return the present memory, and the CPUs used between two readings. Takes less than a millisecond."""
    usage = ResourceUsage(
        memory_bytes=private_memory_bytes(),
        host_memory_bytes=total_bytes(),
        host_free_bytes=free_bytes(),
    )
    available = None if earlier is None or now is None else now.available_cpus_since(earlier)
    if earlier is None or now is None or available is None:
        return usage
    cpus = (now.own_s - earlier.own_s) / (now.at_s - earlier.at_s)
    return msgspec.structs.replace(
        usage, cpus=cpus, host_cpus=now.num_cpus, host_free_cpus=max(0.0, available - cpus)
    )


def run_core(
    spec: CoreLaunchSpec, message_socket: zmq.Socket[bytes], heartbeat: HeartbeatState
) -> int:
    """Load the model and run the loop. Reports failures to the parent and to the log. Returns the exit status."""
    try:
        core = load_core(
            spec,
            lambda what, done: send_message(message_socket, LoadProgress(what, done)),
            time.sleep,
        )
    except Exception as error:
        send_message(message_socket, CoreFailed(describe_error(error)))
        if isinstance(error, PERMANENT_ERRORS):
            return EXIT_UNRECOVERABLE
        log.exception("core_load_failed")
        return EXIT_FAILED
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on `Shutdown` stops the process
    gc.collect()
    gc.enable()
    gc.freeze()  # model and tables are permanent, so later collections can skip them
    heartbeat.busy = False
    send_message(message_socket, core.info)
    try:
        CoreLoop(core, message_socket, heartbeat).run()
    except Exception as error:
        log.exception("core_failed", step=heartbeat.step)
        send_message(message_socket, CoreFailed(describe_error(error)))
        return EXIT_FAILED
    return 0


def main() -> NoReturn:
    """Run the process that the `CoreLaunchSpec` on stdin describes. Never returns."""
    kill_with_parent()  # even if it hangs; elsewhere the heartbeat thread exits it
    # The whole process group receives these signals. The parent decides what to do.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    _ensure_working_directory()
    gc.disable()  # importing torch creates a million permanent objects
    with contextlib.suppress(Exception):  # `load_core` raises it again and reports it to the parent
        pkgutil.resolve_name(sys.argv[1])
    spec_json = sys.stdin.buffer.read()
    if not spec_json:  # the parent no longer needs the process
        os._exit(0)
    spec = msgspec.json.decode(spec_json, type=CoreLaunchSpec)
    protect_standard_streams()
    configure_logging(spec.log_format, spec.log_level, spec.log_name)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    message_socket = _connect(context, zmq.DEALER, spec.message_address)
    heartbeat = HeartbeatState()
    threading.Thread(
        target=run_heartbeat, args=(spec, heartbeat), name="heartbeat", daemon=True
    ).start()
    status = run_core(spec, message_socket, heartbeat)
    message_socket.close(linger=FINAL_MESSAGE_LINGER_MS)
    context.term()
    sys.stderr.flush()
    os._exit(status)  # native threads may hang in their clean-up, and no state is left to save


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)  # bounded by the parent's running requests
    socket.connect(address)
    return socket


def _ensure_working_directory() -> None:
    """Change to `/` if the working directory was deleted, since libraries that torch loads late need one."""
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def _exit_on_sigterm(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(0)


if __name__ == "__main__":
    main()
