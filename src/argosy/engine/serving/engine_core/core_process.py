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
    Abort,
    Beat,
    Delta,
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
from argosy.process import keep_standard_streams
from argosy.telemetry import LogFormat, configure_logs

EXIT_FAILED = 1
"""The core broke; another start may help."""
EXIT_REFUSED = 3
"""The settings, the model or the installation cannot work; starting again will not help."""
EMPTY_STEP_MS = 1
"""Wait after a step that found nothing to compute yet (requests that are held, or batched up)."""
LOAD_BACKOFF_S = 1.0
"""Wait before the second attempt at loading; doubled for each one after it."""
FAREWELL_MS = 2000
"""How long a last message may take to leave."""
PERMANENT = (ValueError, ImportError, FileNotFoundError, NotADirectoryError)
"""What loading raises when trying again cannot help."""

_NO_MEMORY = re.compile("(can.?t|cannot) allocate memory|out of memory", re.IGNORECASE)
"""What the system, torch and CUDA say."""
_PR_SET_PDEATHSIG = 1

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.core")
_encode = msgspec.msgpack.Encoder().encode


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a core process is told at its start."""

    engine: EngineConfig
    core: str
    """`module:name` of what makes the core; called as `CoreFactory`."""
    channel: str
    """ZeroMQ address of the parent's DEALER socket for requests and answers."""
    beats: str
    """ZeroMQ address of the parent's PULL socket for the heartbeat."""
    beat_s: float
    log_format: LogFormat
    log_level: str
    log_name: str
    parent: int
    """Process id of the parent; the core does not outlive it."""


class Core(Protocol):
    """What the loop needs of an engine core."""

    @property
    def ready(self) -> Ready:
        """What was loaded."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to compute or to report."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Take on a request."""
        ...

    def abort(self, ids: list[str]) -> None:
        """Forget requests; those still running end as `cancelled` in the next step's outputs."""
        ...

    def step(self) -> Outputs:
        """Compute one step. An exception means that the core cannot go on."""
        ...


CoreFactory = Callable[[EngineConfig, Callable[[], float], Callable[[str, float], None]], Core]
"""`(config, clock, progress) -> core`, loading the model."""


@dataclass(slots=True)
class Pulse:
    """What the heartbeat tells: steps made so far, and whether one is due or under way."""

    step: int = 0
    busy: bool = True


def load(
    launch: Launch, progress: Callable[[str, float], None], sleep: Callable[[float], None]
) -> Core:
    """Make the core in `load_attempts` tries with growing waits; raises what the last one raised.

    What cannot change by waiting (a bad setting, a missing file or package) is raised at once.
    """
    factory: CoreFactory = pkgutil.resolve_name(launch.core)
    attempts = max(launch.engine.load_attempts, 1)
    for attempt in range(1, attempts):
        try:
            return factory(launch.engine, time.monotonic, progress)
        except PERMANENT:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, it may pass
            wait_s = LOAD_BACKOFF_S * 2 ** (attempt - 1)
            log.warning(
                "load_failed", attempt=attempt, of=attempts, wait_s=wait_s, error=str(error)
            )
            sleep(wait_s)
    return factory(launch.engine, time.monotonic, progress)


def describe(error: BaseException) -> str:
    """One sentence for a person, with the remedy where we know it."""
    if isinstance(error, ModuleNotFoundError) and error.name in ("torch", "safetensors"):
        return f"{error.name} is not installed; the engine needs it: pip install 'argosy[engine]'"
    if isinstance(error, PERMANENT):
        return str(error)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
        return f"there is not enough memory ({error}); give less for --kv-memory, --max-step-tokens or --max-seqs"
    return f"{type(error).__name__}: {error}"


class Loop:
    """Requests in, steps, deltas out, for as long as the parent wants."""

    def __init__(self, core: Core, channel: zmq.Socket[bytes], pulse: Pulse) -> None:
        self._core = core
        self._channel = channel
        self._pulse = pulse
        self._decode = msgspec.msgpack.Decoder(ToCore).decode
        self._stats = Stats()

    def run(self) -> None:
        """Serve until `Shutdown`. What `Core.step` raises passes through."""
        core, pulse = self._core, self._pulse
        pause_ms = 0
        while True:
            pulse.busy = core.has_work
            for message in self._received(pause_ms if pulse.busy else None):
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            if core.has_work:
                pulse.busy = True
                outputs = core.step()
                pulse.step += 1
                self._stats = outputs.stats
                send(self._channel, outputs)
                pause_ms = 0 if outputs.deltas or outputs.stats.step_tokens else EMPTY_STEP_MS

    def _received(self, wait_ms: int | None) -> Iterator[EngineRequest | Abort | Shutdown]:
        """What has arrived; waits for the first message when `wait_ms` is None."""
        while self._channel.poll(wait_ms, zmq.POLLIN):
            yield self._decode(self._channel.recv())
            wait_ms = 0

    def _take(self, message: EngineRequest | Abort) -> None:
        if isinstance(message, Abort):
            self._core.abort(message.ids)
            return
        try:
            self._core.add(message)
        except Exception as error:  # the blast radius of a request is that request
            log.exception("request_failed", request=message.id)
            delta = Delta(id=message.id, finish="error", error=describe(error))
            send(self._channel, Outputs([delta], self._stats))


def send(channel: zmq.Socket[bytes], message: FromCore) -> None:
    """Queue a message for the parent; never blocks (the parent always reads)."""
    channel.send(_encode(message))


def heart(launch: Launch, pulse: Pulse) -> None:
    """Beat until the process ends, and end it when the parent is gone; runs in its own thread."""
    beats = _connect(zmq.Context(), zmq.PUSH, launch.beats)
    while os.getppid() == launch.parent:
        send(beats, Beat(pulse.step, pulse.busy))
        time.sleep(launch.beat_s)
    os._exit(EXIT_FAILED)


def serve(launch: Launch, channel: zmq.Socket[bytes], pulse: Pulse) -> int:
    """Load and loop; the exit status. What went wrong is told to the parent and to the log."""
    try:
        core = load(launch, lambda what, done: send(channel, Loading(what, done)), time.sleep)
    except Exception as error:
        send(channel, Failed(describe(error)))
        if isinstance(error, PERMANENT):
            return EXIT_REFUSED
        log.exception("load_gave_up")
        return EXIT_FAILED
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on it is told by a message
    gc.collect()
    gc.enable()
    gc.freeze()  # the model and the tables stay: later collections need not look at them
    pulse.busy = False
    send(channel, core.ready)
    try:
        Loop(core, channel, pulse).run()
    except Exception as error:
        log.exception("core_failed", step=pulse.step)
        send(channel, Failed(describe(error)))
        return EXIT_FAILED
    return 0


def main() -> NoReturn:
    """Run the process that `Launch` on stdin describes; never returns."""
    _die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP):  # all are told at once: the parent decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    _be_somewhere()
    gc.disable()  # importing torch makes a million objects, all of which stay
    with contextlib.suppress(Exception):  # `load` meets it again, and can tell the parent
        pkgutil.resolve_name(sys.argv[1])
    told = sys.stdin.buffer.read()
    if not told:  # the parent has changed its mind
        os._exit(0)
    launch = msgspec.json.decode(told, type=Launch)
    keep_standard_streams()
    configure_logs(launch.log_format, launch.log_level, launch.log_name)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = _connect(context, zmq.DEALER, launch.channel)
    pulse = Pulse()
    threading.Thread(target=heart, args=(launch, pulse), name="heart", daemon=True).start()
    status = serve(launch, channel, pulse)
    channel.close(linger=FAREWELL_MS)
    context.term()
    sys.stderr.flush()
    os._exit(status)  # native threads may hang in their own clean-up, and nothing is left to save


def _connect(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)  # bounded by what the parent has running
    socket.connect(address)
    return socket


def _die_with_parent() -> None:
    """Ask Linux to kill this process with its parent, even if it hangs; else `heart` ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _be_somewhere() -> None:
    """The folder that this was started in may be gone: then libraries that torch loads late would not be loaded."""
    try:
        Path.cwd()
    except FileNotFoundError:
        os.chdir("/")


def _leave(_signal: int, _frame: FrameType | None) -> NoReturn:
    os._exit(0)


if __name__ == "__main__":
    main()
