"""Number of threads that an engine computes with, given the CPUs that other processes leave to it.

All threads of a step wait for the slowest one. A thread that shares its CPU with another process therefore delays all
of them, and one thread less is faster.
"""

from __future__ import annotations

import math

MEASURE_INTERVAL_S = 0.5
"""Duration of one measurement."""
SHORTAGE_CPUS = 0.5
"""Missing part of a CPU at which one thread less is faster."""
GROWTH_TOLERANCE_CPUS = 0.25
"""Part of a CPU that may be missing for one more thread."""
SHORTAGE_MEASUREMENTS = 2
"""Successive measurements of a shortage that lower the number of threads."""
SURPLUS_MEASUREMENTS = 6
"""Successive measurements of a surplus that raise the number of threads."""
MAX_SURPLUS_MEASUREMENTS = 128
"""Limit of the number of surplus measurements, which doubles each time that a raise proves wrong."""


class ThreadCountPolicy:
    """Number of threads of one process, with hysteresis. Deterministic.

    A raise that is soon followed by a shortage doubles the wait for the next one. Processes that share the CPUs and
    would raise their numbers in turns therefore settle.
    """

    def __init__(self, max_threads: int, stagger: int = 0) -> None:
        """Create the policy.

        Args:
            max_threads: Number of threads while no other process uses the CPUs.
            stagger: Surplus measurements to wait in addition. If it differs between the processes of a machine, they
                do not all claim the same free CPU.
        """
        self.threads = max_threads
        self._max_threads = max_threads
        self._stagger = stagger
        self._surplus_measurements = SURPLUS_MEASUREMENTS
        self._shortages: list[float] = []
        """Available CPUs of the successive shortage measurements so far."""
        self._surpluses: list[float] = []
        """Available CPUs of the successive surplus measurements so far."""
        self._since_raise: int | None = None
        """Measurements since the last raise, or None if that raise has proved right."""

    def update(self, available_cpus: float) -> int:
        """Record a measurement of the CPUs available to this process, its own use included. Return the threads."""
        if self._since_raise is not None:
            self._since_raise += 1
            if self._since_raise > 2 * MAX_SURPLUS_MEASUREMENTS:
                self._since_raise = None
                self._surplus_measurements = SURPLUS_MEASUREMENTS
        if self.threads > 1 and available_cpus <= self.threads - SHORTAGE_CPUS:
            self._surpluses.clear()
            self._shortages.append(available_cpus)
            if len(self._shortages) >= SHORTAGE_MEASUREMENTS:
                self._lower()
        elif (
            self.threads < self._max_threads
            and available_cpus >= self.threads + 1 - GROWTH_TOLERANCE_CPUS
        ):
            self._shortages.clear()
            self._surpluses.append(available_cpus)
            if len(self._surpluses) >= self._surplus_measurements + self._stagger:
                self._raise()
        else:
            self._shortages.clear()
            self._surpluses.clear()
        return self.threads

    def _lower(self) -> None:
        usable = math.ceil(max(self._shortages) - SHORTAGE_CPUS)
        self.threads = max(1, min(usable, self.threads - 1))
        self._shortages.clear()
        if self._since_raise is not None:
            self._surplus_measurements = min(
                2 * self._surplus_measurements, MAX_SURPLUS_MEASUREMENTS
            )
            self._since_raise = None

    def _raise(self) -> None:
        usable = math.floor(min(self._surpluses) + GROWTH_TOLERANCE_CPUS)
        self.threads = min(usable, self._max_threads)
        self._surpluses.clear()
        self._since_raise = 0
