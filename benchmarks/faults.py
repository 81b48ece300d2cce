"""Faults of a replica's process and of the sockets that it serves."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket

import psutil

_PIDFD_GETFD = 438
"""Number of the system call pidfd_getfd, on every architecture (Linux 5.6)."""


def kill(replica: psutil.Process) -> None:
    """Kill the process."""
    replica.send_signal(signal.SIGKILL)


def stop(replica: psutil.Process) -> None:
    """Stop the process, with its connections open."""
    replica.send_signal(signal.SIGSTOP)


def term(replica: psutil.Process) -> None:
    """Terminate the process in order."""
    replica.send_signal(signal.SIGTERM)


def cut(replica: psutil.Process) -> None:
    """Shut down every connection of the replica, which continues to run.

    Raises:
        PermissionError: Tracing of processes is not permitted.
    """
    for fd, _ in served_sockets(replica):
        duplicate = _duplicate_socket(replica.pid, fd)
        if duplicate is None:
            continue
        with duplicate:
            if not duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                duplicate.shutdown(socket.SHUT_RDWR)


FAULTS = {"kill": kill, "stop": stop, "term": term, "cut": cut}


def served_sockets(replica: psutil.Process) -> list[tuple[int, str]]:
    """Return the file descriptor and path of each socket that serves requests, the listening socket included."""
    sockets = replica.net_connections(kind="unix")
    return [(s.fd, str(s.laddr)) for s in sockets if str(s.laddr).endswith(".sock")]


def _duplicate_socket(pid: int, fd: int) -> socket.socket | None:
    """Return a duplicate of another process's socket, or None if it is already closed."""
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        duplicate = libc.syscall(_PIDFD_GETFD, process, fd, 0)
    finally:
        os.close(process)
    if duplicate >= 0:
        return socket.socket(fileno=duplicate)
    number = ctypes.get_errno()
    if number == errno.EBADF:
        return None
    raise OSError(number, os.strerror(number))
