"""Runs one process to its end: starts it, follows it, kills it when due, and records its status."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from argosy.folders import replace_file
from argosy.process_monitor.memory_limit import (
    MemoryLimit,
    count_oom_kills,
    delegated_cgroups,
    own_cgroup,
    read_children,
)
from argosy.process_monitor.messages import (
    DRAIN_SIGNAL,
    REPORT_VARIABLE,
    STOP_SIGNAL,
    MonitorSettings,
    ProcessReport,
    ProcessStatus,
)
from argosy.process_monitor.process_output import ForwardedOutput, RotatingLog

CHECK_INTERVAL_S = 1.0
MAX_REPORT_BYTES = 1 << 16
READ_BYTES = 1 << 16
_HANDLED_SIGNALS = (
    DRAIN_SIGNAL,
    STOP_SIGNAL,
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGPIPE,
)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class ProcessMonitor:
    """Monitor of one process with its descendants. This process must have one thread and no other children."""

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._log = RotatingLog(Path(settings.log_path), settings.max_log_bytes)
        self._forwarded = ForwardedOutput(sys.stderr.fileno()) if settings.forwards_output else None
        self._limit: MemoryLimit | None = None
        self._oom_kills = count_oom_kills(own_cgroup())
        self._status = ProcessStatus(attempt=settings.attempt, monitor_pid=os.getpid(), pid=0)
        self._is_status_saved = True
        self._main_exited = False
        self._has_children = True
        self._kill_at = float("inf")
        self._report_buffer = b""

    def start(self) -> None:
        """Start the process.

        Raises:
            OSError: It cannot be started, or its files cannot be written. Nothing is left running.
        """
        settings = self._settings
        self._handle_signals()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._output_fd, output_fd = self._open_pipe(self._on_output)
        self._report_fd, report_fd = self._open_pipe(self._on_reports)
        if settings.memory_bytes is not None:
            name = f"argosy-{os.getpid()}"
            self._limit = MemoryLimit(name, settings.memory_bytes, delegated_cgroups())
        process = subprocess.Popen(  # noqa: S603 - the launcher's command
            settings.command,
            env={**os.environ, **settings.environment, REPORT_VARIABLE: str(report_fd)},
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=(report_fd, *settings.inherited_fds),
            start_new_session=True,
            preexec_fn=_prepare_child(os.getpid(), settings.cpus),  # noqa: PLW1509 - there is one thread
        )
        process.returncode = 0  # reaped below, with its descendants
        self._status.pid = process.pid
        os.close(report_fd)
        os.close(output_fd)
        if self._limit is not None:
            self._limit.add(process.pid)
        try:
            self._write_status()
        except OSError:
            self._kill("its status cannot be written")
            self.run()
            raise

    def run(self) -> None:
        """Follow the process until it and all its descendants have exited."""
        if self._settings.die_with_launcher:
            self._selector.register(0, selectors.EVENT_READ, self._on_launcher_exit)
        while self._has_children:
            needs_checks = (
                (self._limit is not None and self._limit.is_watched)
                or self._status.is_draining
                or self._main_exited
                or not self._is_status_saved
            )
            for key, _ in self._selector.select(CHECK_INTERVAL_S if needs_checks else None):
                key.data()
            self._check()
        self._finish()

    def _check(self) -> None:
        self._reap()
        limit = self._limit
        if (
            limit is not None
            and limit.is_watched
            and not self._main_exited
            and limit.is_exceeded(self._status.pid)
        ):
            self._status.ran_out_of_memory = True
            self._kill(limit.reason)
        if time.monotonic() >= self._kill_at:
            self._kill_at = float("inf")
            timeout_s = self._settings.drain_timeout_s
            self._kill(f"it did not exit within {timeout_s:g} s of the drain and was killed")
        if not self._is_status_saved:
            self._save_status()

    def _finish(self) -> None:
        """Record the exit."""
        self._read_rest_of_output()
        status = self._status
        limit = self._limit
        if limit is not None:
            if not limit.is_watched and limit.is_exceeded(status.pid):
                status.ran_out_of_memory = True
                status.kill_reason = status.kill_reason or limit.reason
            limit.close()
        was_killed = status.exit_status == -signal.SIGKILL and not status.kill_reason
        if was_killed and count_oom_kills(own_cgroup()) > self._oom_kills:
            status.ran_out_of_memory = True
        status.last_output = self._log.last_line
        status.exited_at = time.time()
        self._save_status()

    # --- events ----------------------------------------------------------------------------------

    def _on_signals(self) -> None:
        for number in os.read(self._signal_fd, READ_BYTES):
            if number == DRAIN_SIGNAL:
                self._drain()
            elif number == STOP_SIGNAL:
                self._kill("it was stopped")

    def _on_launcher_exit(self) -> None:
        if not os.read(0, READ_BYTES):
            self._selector.unregister(0)
            self._kill("its launcher ended")

    def _on_output(self) -> None:
        data = os.read(self._output_fd, READ_BYTES)
        if not data:
            self._selector.unregister(self._output_fd)
            return
        self._log.write(data)
        if self._forwarded is not None:
            self._forwarded.write(data)

    def _on_reports(self) -> None:
        data = os.read(self._report_fd, READ_BYTES)
        if not data:
            self._selector.unregister(self._report_fd)
        *lines, rest = (self._report_buffer + data).split(b"\n")
        self._report_buffer = rest[-MAX_REPORT_BYTES:]
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):  # another program's; only reports count
                self._on_report(msgspec.json.decode(line, type=ProcessReport))
        if lines:
            self._save_status()

    def _on_report(self, report: ProcessReport) -> None:
        for field, value in msgspec.structs.asdict(report).items():
            if value is not None:
                setattr(self._status, field, value)

    # --- actions ---------------------------------------------------------------------------------

    def _drain(self) -> None:
        if self._status.is_draining or self._main_exited:
            return
        self._status.is_draining = True
        self._kill_at = time.monotonic() + self._settings.drain_timeout_s
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._status.pid, self._settings.drain_signal)
        self._save_status()

    def _kill(self, reason: str) -> None:
        """Kill the process and, once their parents have exited, its descendants."""
        if not self._main_exited and not self._status.is_stopping:
            self._status.kill_reason = reason
            self._status.is_stopping = True
            self._save_status()
        self._kill_children()

    def _kill_children(self) -> None:
        main = [] if self._main_exited else [self._status.pid]
        for pid in read_children(os.getpid()) or main:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Collect exited children. After the process itself has exited, kill what it left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._has_children = False
                return
            if pid == 0:
                break
            if pid == self._status.pid:
                self._main_exited = True
                self._status.exit_status = os.waitstatus_to_exitcode(status)
        if self._main_exited:
            self._kill_children()

    # --- files -----------------------------------------------------------------------------------

    def _handle_signals(self) -> None:
        """Turn signals into events. A handler, unlike `SIG_IGN`, is not inherited by the process."""
        self._signal_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd)
        for number in _HANDLED_SIGNALS:
            signal.signal(number, lambda *_: None)
        self._selector.register(self._signal_fd, selectors.EVENT_READ, self._on_signals)

    def _open_pipe(self, on_readable: Callable[[], None]) -> tuple[int, int]:
        read_fd, write_fd = os.pipe()
        self._selector.register(read_fd, selectors.EVENT_READ, on_readable)
        return read_fd, write_fd

    def _read_rest_of_output(self) -> None:
        """Read what exited processes have written."""
        while events := self._selector.select(0):
            for key, _ in events:
                key.data()

    def _save_status(self) -> None:
        """Write the status, or try again later if the disk is full."""
        try:
            self._write_status()
        except OSError:
            self._is_status_saved = False

    def _write_status(self) -> None:
        replace_file(Path(self._settings.status_path), msgspec.json.encode(self._status))
        self._is_status_saved = True


def _prepare_child(monitor_pid: int, cpus: tuple[int, ...]) -> Callable[[], None]:
    """Return what the new process does before it executes its program."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing would record how it goes on
            if os.getppid() != monitor_pid:
                os._exit(1)
            if cpus:
                os.sched_setaffinity(0, cpus)

    return prepare
