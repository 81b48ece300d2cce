"""Records and outcomes for tests of the usage log, and a hook that runs before a chosen line of its code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from argosy.policy import Rates
from argosy.protocol import TokenUsage
from argosy.store import UsageLog, UsageRecord

RATES = Rates(3, 1, 5)
NOW = 1000.0

TokenCounts = tuple[int, int, int]
"""Input, cached and output tokens."""
Outcome = tuple[str, TokenCounts]
"""Status of a record and its counts."""


def new_record(request: str, **fields: Any) -> UsageRecord:  # noqa: ANN401 - any field of the record
    """Return the record of a request that begins."""
    return UsageRecord(
        request=request,
        model="m",
        started_at=NOW,
        ended_at=NOW,
        status="interrupted",
        **fields,
    )


def outcome(record: UsageRecord) -> Outcome:
    """Return status and counts of a record, whose price must match them."""
    counts = record.input_tokens, record.cached_tokens, record.output_tokens
    assert record.nano_dollars == RATES.cost_nano_dollars(TokenUsage(*counts))
    return record.status, counts


def drain(log: UsageLog) -> list[UsageRecord]:
    """Drain a usage log. Returns the records."""
    records: list[UsageRecord] = []
    log.drain(records.extend)
    return records


def open_file_count() -> int:
    return len(list(Path("/dev/fd").iterdir()))


class LineHook:
    """Calls `action` before the `line`-th line of the store's code that a call runs."""

    def __init__(self, line: int, action: Callable[[], None]) -> None:
        self._remaining_lines = line
        self._action = action
        self.has_run = False

    def trace(self, call: Callable[[], None]) -> None:
        """Run `call` with the hook."""
        previous = sys.gettrace()
        sys.settrace(self._trace_frame)  # type: ignore[arg-type]
        try:
            call()
        finally:
            sys.settrace(previous)

    def _trace_frame(
        self, frame: FrameType, event: str, argument: object
    ) -> LineHook._TraceFunction | None:
        return self._trace_line if "/argosy/store/" in frame.f_code.co_filename else None

    def _trace_line(
        self, frame: FrameType, event: str, argument: object
    ) -> LineHook._TraceFunction:
        if event == "line":
            self._remaining_lines -= 1
            if self._remaining_lines == 0:
                self.has_run = True
                self._action()
        return self._trace_line

    _TraceFunction = Callable[[FrameType, str, object], object]
