"""The engine core as a process of its own: loads the model, then steps until told to stop.

Started by `start.start_process` as `python -m argosy.engine.serving.engine_core.core_process CORE`; it imports CORE, then
reads a `Launch` as JSON from stdin. Two ZeroMQ sockets connect it to its parent: one carries `ToCore` in and
`FromCore` out (msgpack), the other its heartbeat, which tells a core that hangs from one that thinks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pkgutil
import re
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
from argosy.engine.serving.core_messages import (
    AbortRequests,
    CoreFailed,
    CoreReady,
    CoreStats,
    Delta,
    EngineRequest,
    FromCore,
    Heartbeat,
    LoadProgress,
    Shutdown,
    StepOutputs,
    ToCore,
)
from argosy.process import protect_standard_streams
from argosy.telemetry import LogFormat, configure_logging

EXIT_FAILED = 1
"""The core broke; another start may help."""
EXIT_UNRECOVERABLE = 3
"""The settings, the model or the installation cannot work; starting again will not help."""
EMPTY_STEP_WAIT_MS = 1
"""Wait after a step that found nothing to compute yet (requests that are held, or batched up)."""
LOAD_BACKOFF_S = 1.0
"""Wait before the second attempt at loading; doubled for each one after it."""
FINAL_MESSAGE_LINGER_MS = 2000
"""How long a last message may take to leave."""
PERMANENT_ERRORS = (ValueError, ImportError, FileNotFoundError, NotADirectoryError)
"""What loading raises when trying again cannot help."""

_OUT_OF_MEMORY_PATTERN = re.compile("(can.?t|cannot) allocate memory|out of memory", re.IGNORECASE)
"""What the system, torch and CUDA say."""
_PR_SET_PDEATHSIG = 1

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.core")
_encode = msgspec.msgpack.Encoder().encode


class CoreLaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a core process is told at its start."""

    engine_config: EngineConfig
    core_factory: str
    """`module:name` of what makes the core; called as `CoreFactory`."""
    message_address: str
    """ZeroMQ address of the parent's DEALER socket for requests and answers."""
    heartbeat_address: str
    """ZeroMQ address of the parent's PULL socket for the heartbeat."""
    heartbeat_interval_s: float
    log_format: LogFormat
    log_level: str
    log_name: str
    parent_pid: int
    """Process id of the parent; the core does not outlive it."""


class Core(Protocol):
    """What the loop needs of an engine core."""

    @property
    def info(self) -> CoreReady:
        """What was loaded."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Take on a request."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests; those still running end as `cancelled` in the next step's outputs."""
        ...

    def step(self) -> StepOutputs:
        """Compute one step. An exception means that the core cannot go on."""
        ...


CoreFactory = Callable[[EngineConfig, Callable[[], float], Callable[[str, float], None]], Core]
"""`(config, clock, progress) -> core`, loading the model."""


@dataclass(slots=True)
class HeartbeatState:
    """What the heartbeat tells: steps made so far, and whether one is due or under way."""

    step: int = 0
    busy: bool = True


def load_core(
    spec: CoreLaunchSpec, on_progress: Callable[[str, float], None], sleep: Callable[[float], None]
) -> Core:
    """Make the core in `load_attempts` tries with growing waits; raises what the last one raised.

    What cannot change by waiting (a bad setting, a missing file or package) is raised at once.
    """
    factory: CoreFactory = pkgutil.resolve_name(spec.core_factory)
    attempts = max(spec.engine_config.max_load_attempts, 1)
    for attempt in range(1, attempts):
        try:
            return factory(spec.engine_config, time.monotonic, on_progress)
        except PERMANENT_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, it may pass
            wait_s = LOAD_BACKOFF_S * 2 ** (attempt - 1)
            log.warning(
                "core_load_retrying", attempt=attempt, of=attempts, wait_s=wait_s, error=str(error)
            )
            sleep(wait_s)
    return factory(spec.engine_config, time.monotonic, on_progress)


def describe_error(error: BaseException) -> str:
    """One sentence for a person, with the remedy where we know it."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "safetensors"):
        return f"{error.name} is not installed; the engine needs it: pip install 'argosy[engine]'"
    if isinstance(error, PERMANENT_ERRORS):
        return str(error)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY_PATTERN.search(str(error)):
        return f"there is not enough memory ({error}); give less for --kv-memory, --max-step-tokens or --max-seqs"
    return f"{type(error).__name__}: {error}"


class CoreLoop:
    """Requests in, steps, deltas out, for as long as the parent wants."""

    def __init__(
        self, core: Core, message_socket: zmq.Socket[bytes], heartbeat: HeartbeatState
    ) -> None:
        self._core = core
        self._message_socket = message_socket
        self._heartbeat = heartbeat
        self._decode = msgspec.msgpack.Decoder(ToCore).decode
        self._stats = CoreStats()

    def run(self) -> None:
        """Serve until `Shutdown`. What `Core.step` raises passes through."""
        core, pulse = self._core, self._heartbeat
        pause_ms = 0
        while True:
            pulse.busy = core.has_work
            for message in self._receive_messages(pause_ms if pulse.busy else None):
                if isinstance(message, Shutdown):
                    return
                self._handle_message(message)
            if core.has_work:
                pulse.busy = True
                outputs = core.step()
                pulse.step += 1
                self._stats = outputs.stats
                send_message(self._message_socket, outputs)
                pause_ms = 0 if outputs.deltas or outputs.stats.step_tokens else EMPTY_STEP_WAIT_MS

    def _receive_messages(
        self, wait_ms: int | None
    ) -> Iterator[EngineRequest | AbortRequests | Shutdown]:
        """What has arrived; waits for the first message when `wait_ms` is None."""
        while self._message_socket.poll(wait_ms, zmq.POLLIN):
            yield self._decode(self._message_socket.recv())
            wait_ms = 0

    def _handle_message(self, message: EngineRequest | AbortRequests) -> None:
        if isinstance(message, AbortRequests):
            self._core.abort(message.request_ids)
            return
        try:
            self._core.add(message)
        except Exception as error:  # the blast radius of a request is that request
            log.exception("core_request_failed", request=message.id)
            delta = Delta(id=message.id, finish_reason="error", error=describe_error(error))
            send_message(self._message_socket, StepOutputs([delta], self._stats))


def send_message(socket: zmq.Socket[bytes], message: FromCore) -> None:
    """Queue a message for the parent; never blocks (the parent always reads)."""
    socket.send(_encode(message))


def run_heartbeat(spec: CoreLaunchSpec, heartbeat: HeartbeatState) -> None:
    """Beat until the process ends, and end it when the parent is gone; runs in its own thread."""
    beats = _connect(zmq.Context(), zmq.PUSH, spec.heartbeat_address)
    while os.getppid() == spec.parent_pid:
        send_message(beats, Heartbeat(heartbeat.step, heartbeat.busy))
        time.sleep(spec.heartbeat_interval_s)
    os._exit(EXIT_FAILED)


def run_core(
    spec: CoreLaunchSpec, message_socket: zmq.Socket[bytes], heartbeat: HeartbeatState
) -> int:
    """Load and loop; the exit status. What went wrong is told to the parent and to the log."""
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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on it is told by a message
    gc.collect()
    gc.enable()
    gc.freeze()  # the model and the tables stay: later collections need not look at them
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
    """Run the process that `Launch` on stdin describes; never returns."""
    _set_parent_death_signal()
    for number in (signal.SIGINT, signal.SIGHUP):  # all are told at once: the parent decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    _ensure_working_directory()
    gc.disable()  # importing torch makes a million objects, all of which stay
    with contextlib.suppress(Exception):  # `load` meets it again, and can tell the parent
        pkgutil.resolve_name(sys.argv[1])
    told = sys.stdin.buffer.read()
    if not told:  # the parent has changed its mind
        os._exit(0)
    launch = msgspec.json.decode(told, type=CoreLaunchSpec)
    protect_standard_streams()
    configure_logging(launch.log_format, launch.log_level, launch.log_name)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = _connect(context, zmq.DEALER, launch.message_address)
    pulse = HeartbeatState()
    threading.Thread(target=run_heartbeat, args=(launch, pulse), name="heart", daemon=True).start()
    status = run_core(launch, channel, pulse)
    channel.close(linger=FINAL_MESSAGE_LINGER_MS)
    context.term()
    sys.stderr.flush()
    os._exit(status)  # native threads may hang in their own clean-up, and nothing is left to save


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)  # bounded by what the parent has running
    socket.connect(address)
    return socket


def _set_parent_death_signal() -> None:
    """Ask Linux to kill this process with its parent, even if it hangs; else `heart` ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _ensure_working_directory() -> None:
    """The folder that this was started in may be gone: then libraries that torch loads late would not be loaded."""
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def _exit_on_sigterm(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(0)


if __name__ == "__main__":
    main()
