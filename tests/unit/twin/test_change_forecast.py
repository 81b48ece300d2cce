"""Forecast of a declared change: the ledger's requests at the present pool and at the declared one."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from tests.support.usage_rows import usage_row
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import (
    ChangeForecast,
    FleetConfig,
    PoolVariation,
    apply_declaration,
    parse_fleet,
)
from argosy.store import UsageRecord, open_store
from argosy.twin import Scenario, forecast_change

DECLARATION = """
fleet: demo
models: [{name: chat, source: argosy-mini}]
gateways: 0
queue: {timeout_s: 600}
objectives: {ttft_p95_s: 2.0}
pools: [{name: chat, model: chat, replicas: 1, dollars_per_hour: 2, options: {max_seqs: 2}}]
"""
PRESENT = parse_fleet(DECLARATION)
NOW = time.time()


def list_rows(number: int = 60) -> list[UsageRecord]:
    """Return rows of a pool that is too small: a request a second, each of which takes 8 s."""
    return [
        usage_row(
            f"r{at}",
            model="chat",
            started_at=NOW - 600 + at,
            ended_at=NOW - 592 + at,
            input_tokens=300,
            output_tokens=80,
        )
        for at in range(number)
    ]


def vary(**changes: object) -> FleetConfig:
    return msgspec.convert({"pool": "chat", **changes}, PoolVariation).apply(PRESENT)


def forecast(new: FleetConfig, rows: list[UsageRecord] | None = None) -> ChangeForecast:
    return forecast_change(PRESENT, new, list_rows() if rows is None else rows, None, 2)


def test_more_replicas_shorten_the_wait_and_cost_more() -> None:
    result = forecast(vary(replicas=4))
    assert set(result.simulated) == {"pools[chat].replicas"}
    (pool,) = result.pools
    figures = {each.name: each for each in pool.figures}
    for name, sign in (("TTFT p95", -1), ("cost a day", 1), ("goodput", 1), ("utilisation", -1)):
        present, declared = figures[name].present, figures[name].declared
        assert present is not None
        assert sign * (declared.mean - present.mean) > 0, name
        assert declared.low <= declared.mean <= declared.high
    assert figures["cost a day"].declared.mean == pytest.approx(4 * 2 * 24, rel=0.01)
    assert (pool.traffic, pool.requests) == ("ledger", 60)
    assert "100.0 ms there" in pool.calibration
    assert result.sentence.startswith("chat: TTFT p")
    assert " falls from " in result.sentence


def test_each_simulated_setting_has_its_effect() -> None:
    rows = list_rows(30)
    wider = forecast(vary(max_seqs=16), rows)
    assert "TTFT" in wider.sentence
    routed = forecast(vary(routing="round-robin"), rows)
    assert routed.sentence == "chat: no figure changes beyond its range over the seeds."
    with pytest.raises(ValueError, match="no answers of chat"):
        forecast(vary(replicas=2), [])
    scenario = Scenario(duration_s=20.0)
    no_rows = forecast_change(PRESENT, vary(replicas=2), [], scenario, 1)
    assert no_rows.pools[0].traffic == "statistics"
    first = forecast_change(None, PRESENT, rows, None, 1)
    assert all(each.present is None for each in first.pools[0].figures)
    assert "nothing runs at present" in first.sentence


def test_what_no_request_notices_and_what_the_twin_lacks_are_named() -> None:
    assert forecast(PRESENT).sentence == "Nothing changes: this declaration is in force."
    owned = parse_fleet(DECLARATION.replace("replicas: 1", "replicas: 1, owner: me"))
    result = forecast(owned)
    assert (result.without_effect, result.pools) == (("pools[chat].owner",), ())
    unknown = DECLARATION.replace("argosy-mini", "other").replace("replicas: 1", "spares: 1")
    with pytest.raises(ValueError, match=r"models\[chat\]\.source, pools\[chat\]\.spares"):
        forecast(parse_fleet(unknown))
    for text, problem in (
        ("replicas: 0", r"pools\[chat\]\.replicas of 0"),
        ("replicas: 1, options: {kv_memory_bytes: 1GiB, max_seqs: 2}", "kv_memory_bytes"),
    ):
        changed = DECLARATION.replace("replicas: 1", text).replace(", options: {max_seqs: 2}}", "}")
        with pytest.raises(ValueError, match=problem):
            forecast(parse_fleet(changed))


def test_command_compares_the_file_with_the_declaration_in_force(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    with closing(open_store(url)) as store:
        store.migrate()
        store.ledger.add_records(list_rows())
        apply_declaration(store.fleets, "demo", PRESENT, None, author="test", reason="")
    file = tmp_path / "fleet.yaml"
    arguments = ["twin", "plan", str(file), "--store", url, "--seeds", "1"]
    file.write_text(DECLARATION)
    same = CliRunner().invoke(app, arguments)
    assert same.stdout.strip() == "Nothing changes: this declaration is in force."
    file.write_text(DECLARATION.replace("replicas: 1", "replicas: 3, owner: me"))
    text = CliRunner().invoke(app, arguments)
    assert text.exit_code == 0, text.output
    for part in ("pools[chat].owner: no request notices it", "60 requests", "TTFT p95", "falls"):
        assert part in text.stdout
    decoded = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert decoded["pools"][0]["figures"][0]["present"]["mean"] > 0
    file.write_text(DECLARATION.replace("argosy-mini", "other"))
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "does not simulate models[chat].source" in refused.output
