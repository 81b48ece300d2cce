"""Small benchmarks for tests, and a progress listener that records them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from argosy.bench import (
    ArrivalProcess,
    BenchResult,
    BenchSettings,
    BenchTarget,
    LengthDistribution,
    LoadSpec,
    RequestRow,
    Workload,
    run_benchmark,
)

WORKLOAD = Workload(
    input=LengthDistribution("uniform", 20, 40), output=LengthDistribution("uniform", 2, 9)
)
AT_ONCE = ArrivalProcess(rate=None)


@dataclass
class RecordingProgress:
    """Records the progress of a benchmark."""

    rows: list[RequestRow] = field(default_factory=list)
    on_row: Callable[[], None] = lambda: None

    def on_run_start(self, label: str, requests: int) -> None:
        pass

    def on_request_end(self, row: RequestRow, in_flight: int) -> None:
        self.rows.append(row)
        self.on_row()


def settings(url: str, *loads: LoadSpec, **changes: object) -> BenchSettings:
    base = BenchSettings(
        target=BenchTarget(url=url),
        workload=WORKLOAD,
        loads=loads or (LoadSpec(concurrency=4, requests=12),),
    )
    return msgspec.structs.replace(base, **changes)


async def measure(url: str, *loads: LoadSpec, **changes: object) -> BenchResult:
    return await run_benchmark(settings(url, *loads, **changes), {}, RecordingProgress())
