"""What a process that serves has to do with the system: descriptors, signals, sockets, threads, standard error."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

T = TypeVar("T")

RESOURCE_EXHAUSTED_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of who may have no more descriptors, or memory for sockets: no fault of the other end's."""

MAX_SOCKET_PATH_BYTES = 107
"""Bytes that the path of a Unix socket may have: see unix(7)."""
RESERVED_DESCRIPTORS = 48
"""Descriptors that a server needs whoever is there: its files, its event loop, connections that are no client's."""
STDERR_FD = 2
"""Descriptor of standard error."""
ATOMIC_WRITE_BYTES = select.PIPE_BUF
"""Bytes that a pipe takes at once when it takes any."""
MAX_KEEPALIVE_S = 86_400
"""Systems take no number of seconds."""
STDERR_WRITE_TIMEOUT_MS = 500
"""How long standard error waits for who reads it, until it has once waited in vain."""


def raise_file_limit() -> None:
    """Let this process have as many descriptors as the system allows: the usual limit, 1024, is for old programs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_clients(descriptors_per_client: int) -> int:
    """Clients that there is room for when each of them takes so many descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (limit - RESERVED_DESCRIPTORS) // descriptors_per_client)


def format_os_error(error: OSError) -> str:
    """What went wrong, for people: with the file, where it was one."""
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def create_socket_folder(prefix: str, max_name_bytes: int) -> Path:
    """A new folder, for this user alone (mode 0700), for Unix sockets whose names have at most so many bytes.

    It is among temporary files, or, where these are so deep that a socket's path would be too long, in /tmp.
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
    """Inside, SIGTERM and SIGINT stop. SIGHUP has what is in files renewed, or stops when the terminal was closed.

    What was started with nohup goes on then. Where nothing can be renewed it says that the terminal was closed.
    Outside the main thread there are no signals to heed.
    """
    heeded = {signal.SIGTERM: stop, signal.SIGINT: stop}
    ends = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if reload is not None:
        closable = ends and _has_controlling_terminal()
        heeded[signal.SIGHUP] = lambda: (
            reload() if _has_controlling_terminal() or not closable else stop()
        )
    elif ends:
        heeded[signal.SIGHUP] = stop
    loop = asyncio.get_running_loop()
    for number, meaning in heeded.items():
        with contextlib.suppress(ValueError, RuntimeError):
            loop.add_signal_handler(number, meaning)
    try:
        yield
    finally:
        for number in heeded:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)


def _has_controlling_terminal() -> bool:
    """Whether there is a terminal that this process belongs to."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def run_in_daemon_thread(call: Callable[..., T], *args: object) -> T:
    """What a call returns, or raises, that may wait for a database or resolver, in a thread that keeps no process here.

    If this is cancelled the call goes on by itself.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: Callable[[], None]) -> None:
        if not done.done():
            result()

    def run() -> None:
        try:
            came = context.run(call, *args)
        except BaseException as error:  # noqa: BLE001 - whoever awaits it is told
            told = functools.partial(done.set_exception, error)
        else:
            told = functools.partial(done.set_result, came)
        with contextlib.suppress(RuntimeError):  # the loop was closed before
            loop.call_soon_threadsafe(tell, told)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await done


def enable_tcp_keepalive(connection: socket.socket, timeout_s: float) -> None:
    """Have the system end a TCP connection whose other end answers no packet, or takes nothing, for so long.

    Else only timeouts of our own would.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        seconds = math.ceil(min(max(timeout_s, 1), MAX_KEEPALIVE_S))
        each_s = max(1, seconds // 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, each_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, each_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)


def protect_standard_streams() -> None:
    """What cannot be written to standard error, or not soon, is lost from now on, and nothing else is.

    Those streams that are closed are opened on nothing, for this process and its children: else whatever is opened
    next would be taken for them.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= STDERR_FD:
        os.set_inheritable(opened, True)  # noqa: FBT003 - as the library has it
    os.close(opened)
    lossy = io.BufferedWriter(_LossyStderr(STDERR_FD, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(lossy, errors="backslashreplace", line_buffering=True)


class _LossyStderr(io.FileIO):
    """A file to which writing never fails, and never waits for long: a pipe may be full, and its reader asleep."""

    _was_writable = True
    """It took something when it was last asked to."""

    def write(self, data: ReadableBuffer, /) -> int:
        """All of `data`, as far as anybody can tell; of what is lost, mostly whole lines."""
        told = bytes(data)
        rest = told
        with contextlib.suppress(OSError):
            while rest and self._wait_writable():
                end = rest.rfind(b"\n", 0, ATOMIC_WRITE_BYTES) + 1
                written = super().write(rest[: end or ATOMIC_WRITE_BYTES])
                rest = rest[written:] if written else b""
        return len(told)

    def _wait_writable(self) -> bool:
        asked = select.poll()
        asked.register(self, select.POLLOUT)
        self._was_writable = bool(asked.poll(STDERR_WRITE_TIMEOUT_MS if self._was_writable else 0))
        return self._was_writable
