"""Choice of CPUs for replicas on one machine."""

from __future__ import annotations

import os

import pytest

from argosy.fleet.launchers.local_start import choose_cpus


@pytest.mark.parametrize(
    ("cpus", "used", "chosen"),
    [
        (None, [], ()),
        (0.5, [], (2,)),
        (1.5, [2], (4, 6)),
        (2, [2, 4, 4, 6], (2, 6)),
        (64, [2], (2, 4, 6)),
    ],
)
def test_replica_is_pinned_to_least_used_cpus(
    monkeypatch: pytest.MonkeyPatch, cpus: float | None, used: list[int], chosen: tuple[int, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {2, 4, 6})
    assert choose_cpus(cpus, used) == chosen
