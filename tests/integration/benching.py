"""Small benchmarks for tests, and what they saw go by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from argosy.bench import Arrivals, Lengths, Load, Result, Row, Settings, Wishes, Workload, run

WORKLOAD = Workload(input=Lengths("uniform", 20, 40), output=Lengths("uniform", 2, 9))
AT_ONCE = Arrivals(rate=None)


@dataclass
class Watch:
    """Keeps what it saw."""

    labels: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    on_row: Callable[[], None] = lambda: None

    def begins(self, label: str, requests: int) -> None:
        self.labels.append(label)

    def ended(self, row: Row, in_flight: int) -> None:
        self.rows.append(row)
        self.on_row()


def settings(url: str, *loads: Load, **changes: object) -> Settings:
    base = Settings(
        wishes=Wishes(url=url),
        workload=WORKLOAD,
        loads=loads or (Load(concurrency=4, requests=12),),
    )
    return msgspec.structs.replace(base, **changes)


async def measure(url: str, *loads: Load, **changes: object) -> Result:
    return await run(settings(url, *loads, **changes), {}, Watch())
