"""The planner: ranked ways to serve a load, and answers to absurd questions that name the bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from argosy.cli.app import app

PLAN = ["plan", "llama-3.1-8b", "--accelerator", "h100_sxm", "--weights", "fp8"]
LOAD = ["--requests-per-minute", "6000"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["capacity", *arguments])


def answer(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    value: dict[str, object] = json.loads(result.stdout)
    return value


def best(*arguments: str) -> dict[str, float]:
    pools = answer(*PLAN, "--tensor-parallel", "1", *arguments)["pools"]
    assert isinstance(pools, list)
    found: dict[str, float] = pools[0]
    return found


def test_headroom_objectives_and_prefix_hits_change_the_plan() -> None:
    plain = best(*LOAD, "--spares", "0")
    assert plain["load_replicas"] == plain["replicas"] >= 100 / plain["replica_requests_s"] * 0.99
    assert plain["replicas_low"] <= plain["replicas"] <= plain["replicas_high"]
    assert best(*LOAD)["replicas"] == plain["replicas"] + 1
    zones = best(*LOAD, "--zones", "2")
    assert zones["replicas"] == 2 * plain["load_replicas"]  # either zone serves the load alone
    strict = best(*LOAD, "--ttft", "p99:150", "--tpot", "p99:15")
    assert strict["load_replicas"] > plain["load_replicas"]
    assert strict["ttft_p99_ms"] <= 150
    assert strict["tpot_p99_ms"] <= 15
    assert best(*LOAD, "--prefix-hits", "0.8")["replica_requests_s"] > plain["replica_requests_s"]
    spot = best(*LOAD, "--spares", "0", "--spot-share", "1")
    assert spot["dollars_per_hour"] == pytest.approx(plain["dollars_per_hour"] * 1.6 / 2.95)
    users = best("--users", "1.728M", "--requests-per-user", "5", "--peak-factor", "1")
    assert users["load_replicas"] == plain["load_replicas"]  # 100 requests/s all day
    streams = best("--concurrent", "1000", "--spares", "0")
    assert streams["in_flight"] * streams["replicas"] >= 1000


@pytest.mark.parametrize(
    ("arguments", "bound"),
    [
        (["plan", "llama-3.1-8b", "--users", "0"], "the load is 0 requests"),
        (["plan", "llama-3.1-8b", "--users", "-5"], "the number of users is -5"),
        (["plan", "llama-3.1-8b", *LOAD, "--ttft", "p100:200"], "no plan can promise p100"),
        (["plan", "llama-3.1-8b", *LOAD, "--ttft", "p99:0.001"], "one request alone takes"),
        (["plan", "llama-3.1-8b", *LOAD, "--tpot", "fast"], "is not a limit"),
        (["plan", "llama-3.1-405b", *LOAD, "-a", "t4"], "memory: weights, activations and reserve"),
        (["plan", "no-such-model", *LOAD], "give the path of its config.json"),
        ([*PLAN, *LOAD, "--tensor-parallel", "1", "--max-accelerators", "1"], "serve at most"),
        ([*PLAN, *LOAD, "--spot-share", "2"], "the share of spot capacity is 2"),
        ([*PLAN, *LOAD, "--prompt-tokens", "10000000"], "memory: the KV cache holds"),
        ([*PLAN, "--users", "5", "--concurrent", "5"], "give the load once"),
        (["fit", "llama-3.1-8b", "-a", "abacus"], "there is no accelerator 'abacus'"),
        (["fit", "llama-3.1-8b", "-w", "fp1"], "weights 'fp1' are unknown"),
        (["cost", "llama-3.1-8b", *LOAD, "-a", "h100_sxm", "--people", "-1"], "negative price"),
        (["cost", *PLAN[1:], *LOAD, "--tensor-parallel", "1", "--budget", "10"], "The bound is"),
    ],
)
def test_absurd_questions_get_an_answer_that_names_the_bound(
    arguments: list[str], bound: str
) -> None:
    result = run(*arguments)
    assert bound in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_plan_writes_a_page_and_a_fleet_that_can_be_declared(tmp_path: Path) -> None:
    page, fleet = tmp_path / "plan.html", tmp_path / "fleet.yaml"
    options = ["--tensor-parallel", "1", "--html", str(page), "--fleet", str(fleet)]
    result = run(*PLAN, *LOAD, *options)
    assert result.exit_code == 0, result.output
    assert "<svg" in page.read_text()
    assert "http" not in page.read_text()
    validated = CliRunner().invoke(app, ["validate", str(fleet)])
    assert validated.exit_code == 0, validated.output


def test_the_twin_serves_a_plan_within_its_objectives(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    objectives = ["--ttft", "p90:600", "--tpot", "p90:40", "--spares", "0"]
    load = ["--requests-per-minute", "600", "--output-tokens", "100", "--tensor-parallel", "1"]
    planned = run(*PLAN, *load, *objectives, "--scenario", str(scenario))
    assert planned.exit_code == 0, planned.output
    result = CliRunner().invoke(app, ["twin", "run", str(scenario), "--seed", "1", "--json"])
    assert result.exit_code == 0, result.output
    latency = json.loads(result.stdout)[0]["summary"]["latency"]
    assert latency["ttft"]["p90"] < 600
    assert latency["tpot"]["p90"] < 40


def test_a_plan_for_this_machine_can_be_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["-a", "cpu", "--engine", "argosy", "-w", "bf16", "--tensor-parallel", "1"]
    load = ["--requests-per-minute", "30", "--prompt-tokens", "50", "--output-tokens", "20"]
    planned = run("plan", "argosy-mini", *options, *load, "--spares", "0", "--fleet", "fleet.yaml")
    assert planned.exit_code == 0, planned.output
    result = CliRunner().invoke(
        app, ["plan", "fleet.yaml", "--store", f"sqlite:///{tmp_path}/argosy.db"]
    )
    assert result.exit_code == 0, result.output
    assert "argosy-mini" in result.output


def test_cost_lists_parts_and_savings_that_fit_a_budget() -> None:
    hardware = ["--accelerator", "h100_sxm", "--weights", "bf16", "--tensor-parallel", "4"]
    options = [*hardware, "--small-model", "qwen3-8b", "--budget", "70K"]
    book = answer("cost", "llama-3.1-70b", *LOAD, *options)
    lines, savings = book["lines"], book["savings"]
    assert isinstance(lines, list)
    assert isinstance(savings, list)
    assert sum(line["dollars"] for line in lines) == pytest.approx(book["total"])
    assert {"weights in fp8", "half of the replicas on spot capacity"} <= {
        each["measure"] for each in savings
    }
    assert "Yes: " in str(book["verdict"])


def test_memory_tables_name_where_a_model_fits() -> None:
    result = run("kv", "llama-3.1-70b", "--context", "32768")
    assert "10 GiB" in result.output
    assert "does not fit 8" in run("fit", "llama-3.1-405b", "-a", "l4").output
