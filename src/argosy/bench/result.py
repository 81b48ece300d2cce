"""Result of a benchmark and its file, with everything needed to read, repeat and compare it."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from argosy.bench.errors import BenchError
from argosy.bench.metrics import Objectives, RequestRow, RunSummary
from argosy.bench.target import BenchTarget
from argosy.bench.workload import LoadSpec, Workload

SCHEMA = "argosy-bench/1"


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a benchmark. The loads run one after the other on the same workload."""

    target: BenchTarget = msgspec.field(name="target_options")
    workload: Workload
    loads: tuple[LoadSpec, ...]
    """Loads to run. With `find_rate` the search starts at the first one's rate."""
    seed: int = 0
    objectives: Objectives | None = None
    find_rate: bool = False
    """Whether to search for the highest rate that meets the objectives."""
    min_attainment: float = 0.99
    """Share of requests that must meet the objectives."""
    precision: float = 0.05
    """Relative precision of the found rate."""
    timeout_s: float = 600.0


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one run."""

    label: str
    load: LoadSpec
    plan_digest: str
    """Digest of the run's plan."""
    started_at: str
    summary: RunSummary
    rows: list[RequestRow]
    tokens_per_step: float | None = None
    """Mean tokens that a step of the server generated of a sequence, by its metrics. Warm-up counts too.
    None if the server verified no drafts or does not report them."""
    draft_acceptance: float | None = None
    """Share of the server's drafts that it accepted, in the same time."""
    draft_saved_s: float | None = None
    """Seconds that drafts saved all requests together, by the server's estimate in the same time."""
    interrupted: bool = False
    met_objectives: bool | None = None
    """Whether the run met the objectives, or None without objectives."""

    @property
    def succeeded(self) -> list[RequestRow]:
        """Measured requests that succeeded."""
        return [row for row in self.rows if row.phase == "measured" and row.outcome == "ok"]


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a benchmark with all its runs."""

    schema: str = SCHEMA
    version: str
    created_at: str
    machine: dict[str, Any]
    settings: BenchSettings
    target: BenchTarget
    runs: list[RunResult]
    best_rate: float | None = None
    """Rate found by the search, or None if even the lowest rate failed or no search ran."""


def utc_timestamp() -> str:
    """Return the current time in UTC, in ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def describe_machine() -> dict[str, Any]:
    """Return properties of the machine that generates the load, without its host name."""
    import psutil

    return {
        "system": platform.platform(),
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        "uvloop": version("uvloop"),
        "httptools": version("httptools"),
        "msgspec": version("msgspec"),
        "numpy": version("numpy"),
    }


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def save_result(result: BenchResult, path: Path) -> None:
    """Write the result as JSON. Raises BenchError if the file cannot be written."""
    write_file(path, msgspec.json.encode(result))


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old or the new content.

    Raises:
        BenchError: The file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        target = path.resolve()
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            temporary.write_bytes(content)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise BenchError(f"Cannot write {path}: {error}.") from error


def load_result(path: Path) -> BenchResult:
    """Read a result that `save_result` wrote.

    Raises:
        BenchError: The file cannot be read, or is not a result of this version.
    """
    try:
        result = msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except OSError as error:
        raise BenchError(f"Cannot read {path}: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} is not a result of `argosy bench --save`: {error}.") from error
    if result.schema != SCHEMA:
        raise BenchError(f"{path} has the schema {result.schema!r}; this version reads {SCHEMA}.")
    return result
