"""Operating system settings of a server process, such as descriptors, signals, sockets, threads and standard error."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import errno
import functools
import io
import math
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

T = TypeVar("T")

RESOURCE_EXHAUSTED_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of a process without free descriptors or socket memory, which the peer did not cause."""

MAX_SOCKET_PATH_BYTES = 107
"""Longest path of a Unix socket in bytes (unix(7))."""
RESERVED_DESCRIPTORS = 48
"""Descriptors that a server needs besides client connections, for files, its event loop and other connections."""
_PR_SET_PDEATHSIG = 1
STDERR_FD = 2
"""Descriptor of standard error."""
ATOMIC_WRITE_BYTES = select.PIPE_BUF
"""Largest write to a pipe that is atomic."""
MAX_KEEPALIVE_S = 86_400
"""Longest keepalive time in seconds, because systems limit the value."""
STDERR_WRITE_TIMEOUT_MS = 500
"""Longest wait for a writable standard error; once a wait has timed out, the next write does not wait."""


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, because the usual soft limit is only 1024."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


def max_clients(descriptors_per_client: int) -> int:
    """Return how many clients fit into the open file limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (limit - RESERVED_DESCRIPTORS) // descriptors_per_client)


def private_memory_bytes() -> int:
    """Return the resident memory of this process that no file backs, or 0 if the system does not report it.

    Mapped weights are not part of it, since the system can drop their pages. Takes some microseconds.
    """
    try:
        fields = Path("/proc/self/statm").read_bytes().split()
    except OSError:
        return 0
    resident_pages, shared_pages = int(fields[1]), int(fields[2])
    return (resident_pages - shared_pages) * resource.getpagesize()


def return_free_memory() -> None:
    """Return the memory that the allocator keeps for later use to the system, if the allocator is glibc's."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def format_os_error(error: OSError) -> str:
    """Return the error's reason for a message, with the file name if there is one."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def kill_with_parent(parent_pid: int | None = None) -> None:
    """Let Linux kill this process when its parent exits; elsewhere do nothing.

    Args:
        parent_pid: The parent; this process exits if it has another one by now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent_pid not in {None, os.getppid()}:
            os._exit(1)


def create_socket_folder(prefix: str, max_name_bytes: int) -> Path:
    """Create a private folder (mode 0700) for Unix sockets and return its path.

    The folder is in the folder for temporary files, or in /tmp if that would make the path of a socket too long.

    Args:
        prefix: Prefix of the folder's name.
        max_name_bytes: Longest name of a socket in the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(folder)) + 1 + max_name_bytes <= MAX_SOCKET_PATH_BYTES:
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))


@contextlib.contextmanager
def handle_signals(
    stop: Callable[[], object], reload: Callable[[], object] | None
) -> Iterator[None]:
    """Handle signals of the running event loop within a context.

    SIGTERM and SIGINT call `stop`. SIGHUP calls `reload`, or `stop` if the terminal of the process was closed. Without
    `reload`, SIGHUP always means that the terminal was closed. A process started with nohup ignores that. Outside the
    main thread no signals are handled.
    """
    handlers = {signal.SIGTERM: stop, signal.SIGINT: stop}
    hangup_terminates = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if reload is not None:
        stop_on_close = hangup_terminates and _has_controlling_terminal()
        handlers[signal.SIGHUP] = lambda: (
            reload() if _has_controlling_terminal() or not stop_on_close else stop()
        )
    elif hangup_terminates:
        handlers[signal.SIGHUP] = stop
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)


def _has_controlling_terminal() -> bool:
    """Return whether the process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def run_in_daemon_thread(call: Callable[..., T], *args: object) -> T:
    """Run a blocking call, such as a database query or name resolution, in a thread of its own.

    The thread does not keep the process alive. If the caller is cancelled, the call continues in the background.

    Returns:
        The result of `call`. Exceptions of `call` propagate.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    run = functools.partial(contextvars.copy_context().run, call, *args)
    threading.Thread(
        target=_run_blocking, args=(loop, future, run), name="blocking-call", daemon=True
    ).start()
    try:
        return await future
    finally:
        del future  # its exception refers to this frame, and with it to megabytes of arguments


def iterate_in_thread(source: AsyncIterator[T], loop: asyncio.AbstractEventLoop) -> Iterator[T]:
    """Yield the items of an asynchronous iterator of `loop` in another thread, which waits for each of them."""

    async def take() -> tuple[T, ...]:
        async for item in source:
            return (item,)
        return ()

    while item := asyncio.run_coroutine_threadsafe(take(), loop).result():
        yield item[0]


def _run_blocking(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], run: Callable[[], T]
) -> None:
    try:
        set_outcome = functools.partial(future.set_result, run())
    except BaseException as error:  # noqa: BLE001 - propagates to the caller
        set_outcome = functools.partial(future.set_exception, error)
    with contextlib.suppress(RuntimeError):  # the loop may be closed
        loop.call_soon_threadsafe(_set_if_pending, future, set_outcome)
    del future, set_outcome  # the exception refers to this frame


def _set_if_pending(future: asyncio.Future[T], set_outcome: Callable[[], None]) -> None:
    if not future.done():
        set_outcome()


def enable_tcp_keepalive(connection: socket.socket, timeout_s: float) -> None:
    """Let the system close a TCP connection whose peer acknowledges no packets for `timeout_s`.

    Otherwise only timeouts of the program would detect a dead peer.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        seconds = math.ceil(min(max(timeout_s, 1), MAX_KEEPALIVE_S))
        interval_s = max(1, seconds // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def protect_standard_streams() -> None:
    """Make `sys.stderr` drop lines that cannot be written soon, instead of failing or blocking.

    Closed standard streams are opened on /dev/null, for this process and its children. Otherwise the next opened files
    would take their descriptors.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR_FD:
        os.set_inheritable(descriptor, True)  # noqa: FBT003 - positional-only in the library
    os.close(descriptor)
    lossy = io.BufferedWriter(_LossyStderr(STDERR_FD, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(lossy, errors="backslashreplace", line_buffering=True)


class _LossyStderr(io.FileIO):
    """File whose writes never fail or block for long, even if it is a full pipe without an active reader."""

    _was_writable = True
    """Whether the last wait found the file writable."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write `data` and always report success; lost data consists mostly of whole lines."""
        content = bytes(data)
        rest = content
        with contextlib.suppress(OSError):
            while rest and self._wait_writable():
                end = rest.rfind(b"\n", 0, ATOMIC_WRITE_BYTES) + 1
                written = super().write(rest[: end or ATOMIC_WRITE_BYTES])
                rest = rest[written:] if written else b""
        return len(content)

    def _wait_writable(self) -> bool:
        poller = select.poll()
        poller.register(self, select.POLLOUT)
        self._was_writable = bool(poller.poll(STDERR_WRITE_TIMEOUT_MS if self._was_writable else 0))
        return self._was_writable
