"""Reports of a process about its start, to the monitor that started it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

import msgspec

from argosy.process_monitor.messages import REPORT_VARIABLE, ProcessReport


class StartupReporter:
    """Reports to the monitor that started this process. Without a monitor it reports nothing.

    Args:
        environment: Environment of this process.
    """

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
