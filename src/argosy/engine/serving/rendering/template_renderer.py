"""Pool of render processes, which keeps hostile chat templates away from the server and from each other."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal

import structlog

from argosy.child_environment import system_variables
from argosy.engine.serving.rendering.render_protocol import (
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    MAX_OUTPUT_CHARS,
    MAX_REPLY_BYTES,
    MAX_SOURCE_CHARS,
    SIZE_BYTES,
    SLOW_CPU_S,
    SLOW_NICENESS,
    frame,
)

PROCESS_MODULE = "argosy.engine.serving.rendering.render_process"
MAX_PROCESSES = 4
"""Maximum number of processes, beside those with a slow render."""
MAX_SLOW_RENDERS = 2
"""Maximum number of slow renders at a time. Further ones are stopped."""
SLOW_WAIT_S = 0.25
"""Wait for a reply, after which a render counts as slow even if its process cannot report that."""
COMPILE_WAIT_S = 5.0
"""The same for a request that also compiles the template."""
MAX_WAIT_S = 30
"""Wait for a reply, after which the process is killed. A busy machine may take that long for `MAX_CPU_S`."""
EXIT_WAIT_S = 1
"""Wait for the exit of a process that ends its replies, after which it counts as stalled."""
MAX_TEMPLATES_PER_PROCESS = 256
MAX_TRIES = 3
"""Number of processes that try a request if they are killed meanwhile."""

_CRASH_SIGNALS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
"""Signals by which a process ends through its own fault."""

Limit = Literal["time", "memory", "output", "slow_renders"]
_LIMIT_TEXTS: dict[Limit, str] = {
    "time": f"takes more than {MAX_CPU_S:g} s of CPU time",
    "memory": f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory",
    "output": f"produces more than {MAX_OUTPUT_CHARS:,} characters",
    "slow_renders": f"takes more than {SLOW_CPU_S * 1000:.0f} ms, as {MAX_SLOW_RENDERS} others do now,",
}

log: structlog.typing.FilteringBoundLogger = structlog.get_logger(__name__)


class TemplateFailedError(Exception):
    """The template raised an error. The message is its own."""


class TemplateLimitError(Exception):
    """The template exceeded a bound and was stopped. The message names the bound."""

    def __init__(self, limit: Limit) -> None:
        super().__init__(_LIMIT_TEXTS[limit])
        self.limit = limit


class RenderersBusyError(Exception):
    """No process became free in time, or all that tried were killed."""


class _ProcessKilledError(Exception):
    """Something else than the template ended the process, such as a lack of memory on the machine."""


class TemplateRenderer:
    """Renders templates in other processes. Thread-safe. Calls block, so do not make them on an event loop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._idle: deque[_ProcessHandle] = deque()
        self._num_processes = 0
        """Number of idle and busy processes, without those of slow renders."""
        self._slow_slots = threading.BoundedSemaphore(MAX_SLOW_RENDERS)

    def find_free_variables(self, source: str) -> frozenset[str]:
        """Compile a template, and return the names of the variables that it reads and does not set itself.

        Raises:
            TemplateLimitError: Compilation exceeds a bound.
            TemplateFailedError: `source` is not a valid template, or cannot be compiled.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateFailedError(f"it is longer than {MAX_SOURCE_CHARS:,} characters")
        return frozenset(self._request(source, None, None).split("\n"))

    def render(self, source: str, variables: Mapping[str, Any], now: datetime) -> str:
        """Render a template with variables, and `strftime_now` for the local time `now`.

        Raises:
            TemplateLimitError: The template exceeds a bound.
            TemplateFailedError: The template raised an error, or a variable cannot be sent.
            RenderersBusyError: No process became free in time, or all that tried were killed.
        """
        return self._request(source, dict(variables), now)

    def close(self) -> None:
        """End the idle processes."""
        with self._changed:
            while self._idle:
                self._idle.popleft().kill()
                self._num_processes -= 1

    def _request(self, source: str, variables: dict[str, Any] | None, now: datetime | None) -> str:
        for _ in range(MAX_TRIES):
            with contextlib.suppress(_ProcessKilledError):
                return self._try_request(source, variables, now)
        raise RenderersBusyError

    def _try_request(
        self, source: str, variables: dict[str, Any] | None, now: datetime | None
    ) -> str:
        started_at = time.monotonic()
        process = self._acquire()
        try:
            return self._exchange(process, source, variables, now)
        except TemplateLimitError as error:
            elapsed_s = round(time.monotonic() - started_at, 3)
            log.warning("chat_template_stopped", limit=error.limit, elapsed_s=elapsed_s)
            raise
        finally:
            self._release(process)

    def _exchange(
        self,
        process: _ProcessHandle,
        source: str,
        variables: dict[str, Any] | None,
        now: datetime | None,
    ) -> str:
        """Send a request and return its reply. A process that does not reply is killed."""
        is_replied = False
        try:
            compiles = process.send(source, variables, now)
            wait_s = COMPILE_WAIT_S if compiles else SLOW_WAIT_S
            if process.reply_poll.poll(wait_s * 1000):
                kind, text = process.receive()
            else:
                process.lower_priority()
                kind, text = "slow", ""
            if kind == "slow":
                with self._slow_slot(process):
                    while kind == "slow":
                        kind, text = process.receive()
            is_replied = True
        finally:
            if not is_replied:
                process.kill()
        if kind == "failed":
            raise TemplateFailedError(text)
        return text

    def _acquire(self) -> _ProcessHandle:
        """Take an idle process, or start one. Keep another idle one for the next request."""
        deadline = time.monotonic() + MAX_WAIT_S
        with self._changed:
            while True:
                process = self._take_idle()
                if process is None and self._num_processes < MAX_PROCESSES:
                    self._num_processes += 1
                    process = _ProcessHandle()
                if process is not None:
                    if not self._idle and self._num_processes < MAX_PROCESSES:
                        self._add_idle()
                    return process
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RenderersBusyError

    def _take_idle(self) -> _ProcessHandle | None:
        while self._idle:
            process = self._idle.popleft()
            if process.is_alive:
                return process
            process.kill()
            self._num_processes -= 1
        return None

    def _add_idle(self) -> None:
        """Start a process that is ready for a later request."""
        self._num_processes += 1
        self._idle.append(_ProcessHandle())

    @contextlib.contextmanager
    def _slow_slot(self, process: _ProcessHandle) -> Iterator[None]:
        """Count a process as slow, so that it does not occupy a place of the others.

        Raises:
            TemplateLimitError: Too many renders are slow already.
        """
        if not self._slow_slots.acquire(blocking=False):
            raise TemplateLimitError("slow_renders")
        process.is_slow = True
        with self._changed:
            self._num_processes -= 1
            self._changed.notify()
        try:
            yield
        finally:
            self._slow_slots.release()

    def _release(self, process: _ProcessHandle) -> None:
        """Keep a process for later requests, or end it and start another one."""
        is_reusable = process.is_reusable
        if not is_reusable:
            process.kill()
        with self._changed:
            if is_reusable:
                self._idle.appendleft(process)
            elif not process.is_slow:
                self._num_processes -= 1
            if not self._idle and self._num_processes < MAX_PROCESSES:
                self._add_idle()
            self._changed.notify()


class _ProcessHandle:
    """Render process, as its parent sees it. One thread uses it at a time."""

    def __init__(self) -> None:
        """Start the process.

        Raises:
            OSError: The system cannot start another process.
        """
        ours, theirs = socket.socketpair()
        # A process that stalls in the middle of a reply may hold its reader only for a while.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", MAX_WAIT_S, 0))
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", PROCESS_MODULE, str(theirs.fileno())],
                env=system_variables(os.environ),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # the parent handles signals from the terminal
            )
        self._socket = ours
        self._replies = open(ours.fileno(), "rb", closefd=False)  # noqa: SIM115 - as long as the socket
        self.reply_poll = select.poll()
        """Waits for the beginning of a reply."""
        self.reply_poll.register(ours, select.POLLIN)
        self._templates: set[str] = set()
        self.is_slow = False
        """Whether the process has low priority, which it cannot raise again."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def is_reusable(self) -> bool:
        """Whether the process may serve further requests."""
        has_room = len(self._templates) < MAX_TEMPLATES_PER_PROCESS
        return self.is_alive and has_room and not self.is_slow

    def send(self, source: str, variables: dict[str, Any] | None, now: datetime | None) -> bool:
        """Send a request. Return whether the process has to compile the template first.

        Raises:
            TemplateFailedError: A variable cannot be sent to another process.
            _ProcessKilledError: The process has ended.
        """
        digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
        compiles = variables is None or digest not in self._templates
        try:
            payload = pickle.dumps((digest, source if compiles else None, variables, now))
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
            raise TemplateFailedError(f"its variables cannot be sent: {error}") from error
        self._templates.add(digest)
        try:
            self._socket.sendall(frame(payload))
        except OSError as error:
            raise _ProcessKilledError from error
        return compiles

    def receive(self) -> tuple[str, str]:
        """Receive the kind and the text of a reply.

        Raises:
            TemplateLimitError: The template exceeded a bound, or nothing arrives for `MAX_WAIT_S`.
            TemplateFailedError: The template crashed the process.
            _ProcessKilledError: The process was killed.
        """
        size, reply = 0, b""
        with contextlib.suppress(ConnectionError):  # the process has ended with a request unread
            size = int.from_bytes(self._replies.read(SIZE_BYTES) or b"", "little")
            # A template that took its process over could send any size.
            reply = self._replies.read(min(size, MAX_REPLY_BYTES)) or b""
        if not size or len(reply) < size:
            try:
                status = self._process.wait(EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                raise TemplateLimitError("time") from None
            if status == -signal.SIGPROF:
                raise TemplateLimitError("time") from None
            if status > 0 or -status in _CRASH_SIGNALS:
                raise TemplateFailedError("it crashed the process that ran it") from None
            raise _ProcessKilledError from None
        kind, _, text = reply.decode("utf-8", "surrogatepass").partition("\n")
        if kind in {"memory", "output"}:
            raise TemplateLimitError("memory" if kind == "memory" else "output")
        return kind, text

    def lower_priority(self) -> None:
        """Let all other processes of the machine run before this one."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, SLOW_NICENESS)

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._socket.close()


@functools.cache
def default_renderer() -> TemplateRenderer:
    """Return the renderer of this process, which all templates share."""
    renderer = TemplateRenderer()
    atexit.register(renderer.close)
    return renderer


os.register_at_fork(after_in_child=default_renderer.cache_clear)  # its sockets are the parent's
