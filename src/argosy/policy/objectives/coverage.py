"""When gateways have reported their counts. Without it, a silent gateway would look like one without traffic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

from argosy.policy.objectives.count_history import SLOT_S

MAX_LAG_S = 2 * SLOT_S
"""Age of a gateway's last report that is not late."""
GONE_AFTER_S = 300
"""Time without a report after which a gateway is not waited for any more."""
MAX_AHEAD_S = 60
"""Difference of clocks by which a report may be later than the time of an evaluation."""


class ReportCoverage:
    """Slots in which gateways have reported.

    Args:
        reports: For each gateway the starts of its slots, in seconds since the epoch, and whether it stopped then.
    """

    def __init__(self, reports: Mapping[str, Mapping[int, bool]]) -> None:
        self._reports = reports
        self._slots = sorted({start for slots in reports.values() for start in slots})
        self._covered: dict[tuple[int, int], bool] = {}

    def find_problem(self, end: int) -> str:
        """Return why the counts up to `end` are not complete; empty if they are."""
        has_current = False
        for gateway, slots in sorted(self._reports.items()):
            last = max(slots, default=0)
            if last > end + MAX_AHEAD_S:
                return f"the clock of gateway {gateway} is {last - end} s ahead, or was"
            if slots.get(last, True) or last < end - GONE_AFTER_S:
                continue
            if last < end - MAX_LAG_S:
                return f"gateway {gateway} has reported no counts for {end - last} s"
            has_current = True
        return "" if has_current else "no gateway reports counts"

    def covers(self, start: int, end: int) -> bool:
        """Return whether there are reports for at least half of a time."""
        if (start, end) not in self._covered:
            count = bisect_left(self._slots, end) - bisect_left(self._slots, start)
            self._covered[start, end] = 2 * count >= (end - start) // SLOT_S
        return self._covered[start, end]
