"""Comparison of the twin with a live fleet: its parts work together. It judges no times."""

from __future__ import annotations

import json

import pytest
from benchmarks import twin_live


def test_live_comparison_fits_predicts_and_measures_through_a_kill(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = twin_live.Load(seed=1, rate=6.0, prompt=40, output=60, kill_at=None)
    setup = twin_live.Setup("fleet", 2, load, load._replace(seed=2, rate=8.0, kill_at=0.3))
    monkeypatch.setattr(twin_live, "SETUPS", (setup,))
    assert twin_live.main(["--seconds", "2"]) == 0
    output = capsys.readouterr().out
    (fit, *rows) = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert fit["fit"]["cost"]["step_s"] >= 0
    assert fit["fit"]["steps"] > 100
    figures = {row["figure"]: row for row in rows}
    assert figures["completed"]["predicted"] == figures["completed"]["measured"] > 5
    assert figures["tpot mean"]["measured"] > 0
    assert "| fleet | ttft p99 |" in output
