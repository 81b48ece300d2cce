"""Messages between a launcher, a monitor and its process, as JSON, and how the process sends its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping

import msgspec

DRAIN_SIGNAL = signal.SIGTERM
"""Signal that makes a monitor drain its process."""
STOP_SIGNAL = signal.SIGUSR1
"""Signal that makes a monitor kill its process with all descendants."""
REPORT_VARIABLE = "ARGOSY_REPORT_FD"
"""Variable with the descriptor to which a process may write `ProcessReport`s, one per line."""


class MonitorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Process to monitor and its limits. The launcher writes it as one line to the monitor's standard input."""

    command: tuple[str, ...]
    environment: dict[str, str]
    """Variables of the process in addition to those of the monitor."""
    attempt: int
    status_path: str
    """File in which the monitor keeps the `ProcessStatus`."""
    log_path: str
    """Log file of the process's output."""
    max_log_bytes: int
    """Size at which the log is rotated. One older file is kept."""
    drain_signal: int
    drain_timeout_s: float
    """Time from the drain signal to the kill."""
    memory_bytes: int | None = None
    cpus: tuple[int, ...] = ()
    """CPUs on which the process may run; empty for all."""
    inherited_fds: tuple[int, ...] = ()
    """Descriptors that the process shares with the monitor, such as the locks of its GPUs."""
    forwards_output: bool = False
    """Whether the output also goes to the monitor's standard error."""
    die_with_launcher: bool = False
    """Whether to kill the process when the monitor's standard input is closed."""


class ProcessReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """Report of a process about its start. A field that is not set leaves the earlier value."""

    activity: str | None = None
    """Current activity, such as `loading weights`."""
    progress: float | None = None
    """Progress of the start, from 0 to 1."""
    is_serving: bool | None = None
    """Whether it accepts requests."""
    error: str | None = None
    """Why it exits."""


class ProcessStatus(msgspec.Struct, kw_only=True):
    """State of one attempt to run a process. Times are seconds since the epoch."""

    attempt: int
    monitor_pid: int
    pid: int
    activity: str = ""
    progress: float = 0.0
    is_serving: bool = False
    error: str = ""
    """Error that the process reported."""
    is_draining: bool = False
    is_stopping: bool = False
    """Whether it is being killed."""
    kill_reason: str = ""
    """Why the monitor killed it."""
    exited_at: float | None = None
    """When the process and all its descendants had exited."""
    exit_status: int | None = None
    """Exit status, or the negative number of the signal that ended it."""
    ran_out_of_memory: bool = False
    last_output: str = ""
    """Last line of the output, set at exit."""


class StartupReporter:
    """Reports to the monitor that started this process. Without a monitor it reports nothing."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        descriptor = environment.get(REPORT_VARIABLE)
        self._fd = None if descriptor is None else int(descriptor)

    @property
    def is_connected(self) -> bool:
        """Whether a monitor started this process."""
        return self._fd is not None

    def report_progress(self, activity: str, progress: float) -> None:
        """Report the current activity, and the progress of the start from 0 to 1."""
        self._write(ProcessReport(activity=activity, progress=progress))

    def report_serving(self) -> None:
        """Report that this process accepts requests."""
        self._write(ProcessReport(is_serving=True))

    def report_error(self, message: str) -> None:
        """Report why this process exits."""
        self._write(ProcessReport(error=message))

    def _write(self, report: ProcessReport) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the monitor is gone, and kills this process
                os.write(self._fd, msgspec.json.encode(report) + b"\n")
