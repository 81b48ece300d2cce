"""The file that a benchmark leaves: everything needed to read it, repeat it and compare it."""

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
from argosy.bench.target import BenchTarget, TargetOptions
from argosy.bench.workload import LoadSpec, Workload

SCHEMA = "argosy-bench/1"


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """A whole benchmark as asked for. `loads` are run one after the other, on the same workload."""

    target_options: TargetOptions
    workload: Workload
    loads: tuple[LoadSpec, ...]
    """With `search`, the first of them and its rate begin the search."""
    seed: int = 0
    objectives: Objectives | None = None
    find_rate: bool = False
    """Find the highest rate that holds the objectives."""
    min_attainment: float = 0.99
    """It holds them when so large a share of the requests does."""
    precision: float = 0.05
    """Of the rate that is found, as a share of it."""
    timeout_s: float = 600.0


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run."""

    label: str
    load: LoadSpec
    plan_digest: str
    """The digest of its plan."""
    started_at: str
    summary: RunSummary
    rows: list[RequestRow]
    interrupted: bool = False
    met_objectives: bool | None = None
    """Whether it held the objectives; None without any."""

    @property
    def succeeded(self) -> list[RequestRow]:
        """Of the requests that were measured, those that were answered."""
        return [row for row in self.rows if row.phase == "measured" and row.outcome == "ok"]


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of a benchmark."""

    schema: str = SCHEMA
    version: str
    created_at: str
    machine: dict[str, Any]
    settings: BenchSettings
    target: BenchTarget
    runs: list[RunResult]
    best_rate: float | None = None
    """What the search found; None when even the least rate failed, or nothing was searched."""


def utc_timestamp() -> str:
    """This moment, in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def describe_machine() -> dict[str, Any]:
    """The machine that the load comes from, without its name."""
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
    """Write it as JSON. Raises BenchError."""
    write_file(path, msgspec.json.encode(result))


def write_file(path: Path, content: bytes) -> None:
    """Write a file; its readers see all of it or what was there before. Raises BenchError."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        whole = path.resolve()
        growing = whole.with_name(f".{whole.name}.{os.getpid()}")
        try:
            growing.write_bytes(content)
            growing.replace(whole)
        finally:
            growing.unlink(missing_ok=True)
    except OSError as error:
        raise BenchError(f"Cannot write {path}: {error}.") from error


def load_result(path: Path) -> BenchResult:
    """Read what `save` wrote. Raises BenchError."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=BenchResult)
    except OSError as error:
        raise BenchError(f"Cannot read {path}: {error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} is no result of `argosy bench --save`: {error}.") from error
    if result.schema != SCHEMA:
        raise BenchError(f"{path} has the schema {result.schema!r}; this version reads {SCHEMA}.")
    return result
