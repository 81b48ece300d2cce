"""CPU threads of an engine, adapted between steps to the CPUs that other processes leave free."""

from __future__ import annotations

import os

import structlog
import torch

from argosy import machine_resources as resources
from argosy.engine.execution.kernels.cpu.native_kernels import limit_kernel_threads
from argosy.machine_resources import CpuTimes, read_cpu_times
from argosy.policy import MEASURE_INTERVAL_S, ThreadCountPolicy

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Environment variable that sets the number of threads, as for OpenMP programs, if the settings do not."""
MAX_MEASURE_S = 4 * MEASURE_INTERVAL_S
"""Longest measurement that counts. An engine that was idle for longer measures anew."""
NUM_STAGGERS = 8
"""Number of different waits among the processes of a machine before they claim a free CPU."""

log = structlog.get_logger(__name__)


class ComputeThreads:
    """Number of threads that an engine's kernels and torch use. Call it from the thread that computes.

    Results do not depend on the number. The limit of the kernels belongs to the process, so each engine of a process
    sets its own number before its steps.
    """

    def __init__(self, max_threads: int, *, is_fixed: bool) -> None:
        """Create the threads. If `is_fixed`, their number never changes."""
        self.count = max_threads
        self.max_threads = max_threads
        self._policy = (
            None
            if is_fixed or max_threads == 1
            else ThreadCountPolicy(max_threads, os.getpid() % NUM_STAGGERS)
        )
        self._earlier: CpuTimes | None = None
        self._next_measurement_at = float("-inf")

    def begin_step(self, now: float) -> None:
        """Measure the free CPUs if it is time, and apply the number of threads to the step that follows."""
        if self._policy is not None and now >= self._next_measurement_at:
            self._next_measurement_at = now + MEASURE_INTERVAL_S
            self._measure(self._policy)
        _apply_kernel_limit(None if self._policy is None else self.count)
        if torch.get_num_threads() != self.count:
            torch.set_num_threads(self.count)

    def _measure(self, policy: ThreadCountPolicy) -> None:
        times, earlier = read_cpu_times(), self._earlier
        self._earlier = times
        if times is None or earlier is None or times.at_s - earlier.at_s > MAX_MEASURE_S:
            return
        available = times.available_cpus_since(earlier)
        if available is None or policy.update(available) == self.count:
            return
        self.count = policy.threads
        log.info(
            "compute_threads_changed",
            threads=self.count,
            max_threads=self.max_threads,
            available_cpus=round(available, 2),
        )


def create_compute_threads(threads: int | None, colocated_replicas: int) -> ComputeThreads:
    """Create the threads of an engine.

    A number in the settings or in OMP_NUM_THREADS is fixed. Otherwise the usable CPUs are divided by the number of
    replicas on this machine, and the threads adapt.

    Raises:
        ValueError: The number is less than 1, or OMP_NUM_THREADS is not a number.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads is {threads}; set it to 1 or more, or remove it")
    fixed = _threads_from_environment() if threads is None else threads
    if fixed is not None:
        return ComputeThreads(fixed, is_fixed=True)
    max_threads = max(1, resources.usable_cpus() // (1 + colocated_replicas))
    return ComputeThreads(max_threads, is_fixed=False)


def _threads_from_environment() -> int | None:
    """Return the number in OMP_NUM_THREADS, or None if it is unset. Of a list, the first number counts."""
    text = os.environ.get(THREADS_VARIABLE, "").split(",")[0].strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"{THREADS_VARIABLE} is {text!r}; set it to the number of CPU threads, or unset it"
        )
    return int(text)


_kernel_limit: int | None = None


def _apply_kernel_limit(limit: int | None) -> None:
    """Limit the threads of the native kernels in this process. None sets no limit."""
    global _kernel_limit  # noqa: PLW0603 - the kernels have one limit per process
    if limit != _kernel_limit:
        _kernel_limit = limit
        limit_kernel_threads(limit)
