"""Log of an engine's steps: what each of them computed, and how long it took. It has no texts and no names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from argosy.engine.scheduling import StepRecord

if TYPE_CHECKING:
    from argosy.engine.scheduling import StepPlan

log = structlog.get_logger(__name__)

MAX_LOG_BYTES = 64 << 20
"""Size of the file of one process, after which no more steps are logged."""
BUFFER_BYTES = 8 << 10


class StepLog:
    """Writes a JSON line for each step to a file of this process. If that fails, it logs no more.

    A step that follows another one begins with that one's end, so that its duration has all the work between them.
    """

    def __init__(self, folder: str) -> None:
        """Open the file.

        Raises:
            ValueError: The file cannot be written.
        """
        path = Path(folder, f"steps-{os.getpid()}.jsonl")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise ValueError(
                f"cannot write the step log {path}: {error.strerror}; choose another folder"
            ) from error
        self._free_bytes = MAX_LOG_BYTES - path.stat().st_size
        self._buffer = bytearray()
        self._encode = msgspec.json.Encoder().encode
        self._is_busy = False
        self._began_at = 0.0

    def begin_step(self, now: float) -> None:
        """Record that a step is planned."""
        if not self._is_busy:
            self._is_busy, self._began_at = True, now

    def end_step(self, plan: StepPlan, now: float, *, has_work: bool) -> None:
        """Record that a step has ended, and whether another one follows at once."""
        if plan.total_tokens and self._free_bytes > 0:
            decode_rows, context_tokens, prefill_chunks = plan.count_work()
            record = StepRecord(
                seconds=round(now - self._began_at, 7),
                ended_at=round(now, 6),
                decode_rows=decode_rows,
                context_tokens=context_tokens,
                prefill_chunks=prefill_chunks,
            )
            line = self._encode(record) + b"\n"
            self._buffer += line
            self._free_bytes -= len(line)
        self._is_busy, self._began_at = has_work, now
        if not has_work or len(self._buffer) >= BUFFER_BYTES:
            self.flush()

    def close(self) -> None:
        """Write all lines, and close the file."""
        self.flush()
        self._file.close()

    def flush(self) -> None:
        """Write all lines to the file."""
        if not self._buffer:
            return
        try:
            self._file.write(self._buffer)
        except OSError as error:
            self._free_bytes = 0
            log.warning("step_log_failed", path=self._file.name, error=error.strerror)
        self._buffer.clear()
