"""What may befall a replica's process, and the sockets that it is reached on."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket

import psutil

_PIDFD_GETFD = 438
"""System call number, on every architecture (Linux 5.6)."""


def kill(replica: psutil.Process) -> None:
    """The process is gone from one moment to the next."""
    replica.send_signal(signal.SIGKILL)


def stop(replica: psutil.Process) -> None:
    """It stands still, its connections open."""
    replica.send_signal(signal.SIGSTOP)


def term(replica: psutil.Process) -> None:
    """It is told to leave."""
    replica.send_signal(signal.SIGTERM)


def cut(replica: psutil.Process) -> None:
    """Every connection to it is cut, and it lives on. Raises PermissionError where processes may not be traced."""
    for fd, _ in served_sockets(replica):
        held = _borrowed(replica.pid, fd)
        if held is None:
            continue
        with held:
            if not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                held.shutdown(socket.SHUT_RDWR)


FAULTS = {"kill": kill, "stop": stop, "term": term, "cut": cut}


def served_sockets(replica: psutil.Process) -> list[tuple[int, str]]:
    """File descriptor and path of the sockets that it serves requests on, the listening one included."""
    sockets = replica.net_connections(kind="unix")
    return [(s.fd, str(s.laddr)) for s in sockets if str(s.laddr).endswith(".sock")]


def _borrowed(pid: int, fd: int) -> socket.socket | None:
    """A socket of another process, held by this one too; None: it is closed by now."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        held = libc.syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if held >= 0:
        return socket.socket(fileno=held)
    number = ctypes.get_errno()
    if number == errno.EBADF:
        return None
    raise OSError(number, os.strerror(number))
