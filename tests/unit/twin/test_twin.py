"""The twin: repeatable, exact and macro alike, on the production's classes; its faults break no invariant."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as replace_struct
from tests.support.request_rows import bench_result
from tests.support.usage_rows import usage_row
from tools.twin_hashes import SCENARIO, compute_hashes, read_golden
from typer.testing import CliRunner

import argosy.twin
from argosy.bench import save_result
from argosy.cli.app import app
from argosy.engine import EngineRequest
from argosy.engine.scheduling import BlockPool, Scheduler, StepRecord, StepResult
from argosy.policy import Bill, HealthCheck, Rates, RequestEnd, SlidingWindow, compute_bill
from argosy.policy.autoscaling import Autoscaler
from argosy.policy.placement import PlacementCore, PlacementPool, PlacementReplica
from argosy.policy.reconciliation import Admit, Drain, LaunchState, Withdraw, reconcile
from argosy.policy.rollout import decide
from argosy.policy.traffic import PoolRoute
from argosy.protocol import SamplingParams
from argosy.store import open_store
from argosy.twin import (
    Engine,
    LinearStepCost,
    PoolSettings,
    Scenario,
    Tenant,
    TwinRun,
    Workload,
    fit_cost,
    make_plan,
    read_scenario,
    run_scenario,
    shrink,
    write_scenario,
)
from argosy.twin import fleet as twin_fleet
from argosy.twin.scenario import RandomFaults
from argosy.twin.workload import Lengths

CORE = sorted(
    path for path in Path(argosy.twin.__file__).parent.glob("*.py") if path.name != "fitting.py"
)
CHAOS = Scenario(
    duration_s=40.0,
    pool=PoolSettings(replicas=3, start_s=5.0, hedge_after_s=2.0),
    engine=Engine(max_seqs=4, kv_blocks=400, max_model_len=4096),
    workload=Workload(
        sessions_per_s=0.4,
        clients=6,
        tenants=(
            Tenant(name="a", tier=0, tokens_per_minute=20_000),
            Tenant(name="b", weight=2.0, concurrency=3),
            Tenant(name="c", tier=2),
        ),
    ),
    random_faults=RandomFaults(per_minute=6.0),
)
ENDS = ("completed", "cancelled", "failed", "refused")
PLANTED = Scenario(
    duration_s=60.0,
    pool=PoolSettings(replicas=2, start_s=5.0),
    engine=Engine(max_seqs=4, kv_blocks=64, host_blocks=128, max_model_len=1024),
    workload=Workload(
        sessions_per_s=0.2,
        clients=4,
        tenants=(Tenant(name="a", tokens_per_minute=2000), Tenant(name="b", concurrency=1)),
        prompt=Lengths(median=100, sigma=0.5),
        output=Lengths(median=60, sigma=0.5),
        leave_fraction=0.2,
    ),
    random_faults=RandomFaults(
        per_minute=6.0,
        kinds=("kill", "spot_reclaim", "rollout", "bad_rollout", "region", "cache_corruption"),
    ),
)
STEADY = msgspec.structs.replace(CHAOS, random_faults=RandomFaults())


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_core_reads_no_clock_no_hash_order_and_no_global_randomness(path: Path) -> None:
    banned_modules = {"asyncio", "time", "datetime", "secrets", "uuid", "threading", "os", "numpy"}
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not banned_modules.intersection(name.split(".")[0] for name in names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"hash", "id", "frozenset"}
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "random" or node.attr == "Random"
        iterables = [node.iter] if isinstance(node, ast.For | ast.comprehension) else []
        for each in iterables:
            assert not isinstance(each, ast.Set | ast.SetComp)
            called = each.func if isinstance(each, ast.Call) else None
            assert not (isinstance(called, ast.Name) and called.id == "set")


def test_decisions_are_those_of_the_production_classes() -> None:
    scenario = msgspec.structs.replace(
        STEADY, pool=msgspec.structs.replace(STEADY.pool, max_replicas=4)
    )
    run = TwinRun(scenario, 1, make_plan(scenario, 1))
    assert run.run() == ""
    process = next(iter(run.fleet.processes.values()))
    for decider, production in (
        (run.gateway.core, PlacementCore),
        (run.gateway.pools[1], PlacementPool),
        (process.scheduler, Scheduler),
        (run.rollout.route, PoolRoute),
        (run.fleet.autoscaler, Autoscaler),
        (run.gateway.metering.limits["a"][0].meter, SlidingWindow),
    ):
        assert type(decider) is production
    assert all(type(each) is PlacementReplica for each in run.gateway.pools[1].replicas.values())
    assert vars(twin_fleet)["reconcile"] is reconcile
    assert vars(sys.modules["argosy.twin.prober"])["HealthCheck"] is HealthCheck
    assert vars(sys.modules["argosy.twin.rollout"])["decide"] is decide


def test_same_seed_gives_the_same_hash_in_another_process() -> None:
    result = run_scenario(CHAOS, 5)
    assert run_scenario(CHAOS, 6).trace_hash != result.trace_hash
    program = (
        "import msgspec, sys; from argosy.twin import Scenario, run_scenario;"
        "print(run_scenario(msgspec.json.decode(sys.stdin.read(), type=Scenario), 5).trace_hash)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=msgspec.json.encode(CHAOS),
        capture_output=True,
        env={"PYTHONHASHSEED": "77"},
        check=True,
    )
    assert done.stdout.decode().strip() == result.trace_hash


@pytest.mark.parametrize("seed", range(2))
def test_faults_break_no_invariant_and_every_request_ends(seed: int) -> None:
    result = run_scenario(CHAOS, seed)
    assert not result.failure
    planned = [each for each in make_plan(CHAOS, seed).requests if each.after is None]
    assert sum(result.effects.get(each, 0) for each in ENDS) >= len(planned)


def test_hashes_are_those_of_the_repository() -> None:
    """If a decision of the product has changed: `python -m tools.twin_hashes --write`."""
    assert compute_hashes() == read_golden()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(2, 40))]
)
def test_macro_agrees_with_exact_within_one_percent(seed: int) -> None:
    exact = run_scenario(msgspec.structs.replace(STEADY, fidelity="exact"), seed)
    macro = run_scenario(STEADY, seed)
    assert not exact.failure
    assert macro.events < exact.events
    for metric in ("ttft", "tpot", "e2e"):
        expected, actual = exact.summary.latency[metric], macro.summary.latency[metric]
        assert actual.count == expected.count
        for field in ("mean", "p50", "p99"):
            assert getattr(actual, field) == pytest.approx(getattr(expected, field), rel=0.01)


@pytest.mark.parametrize("seed", range(10))
def test_skipped_decodes_leave_the_state_of_single_steps(seed: int) -> None:
    stream = random.Random(seed)
    limits = replace(Engine(max_seqs=6, kv_blocks=60, block_size=4).build_limits())
    stepped, skipped = Scheduler(limits), Scheduler(limits)
    for number in range(1 + stream.randrange(5)):
        request = EngineRequest(
            id=str(number),
            prompt=[stream.randrange(9) for _ in range(1 + stream.randrange(20))],
            params=SamplingParams(max_tokens=2 + stream.randrange(20)),
            tier=stream.randrange(3),
        )
        for scheduler in (stepped, skipped):
            scheduler.add(request, now=0.0)
    while stepped.has_work:
        steps = skipped.count_plain_decodes()
        assert steps == stepped.count_plain_decodes()
        count = 1 + stream.randrange(steps) if steps else 0
        if count:
            skipped.skip_decodes(count, 0)
        else:
            _step(skipped)
        for _ in range(count or 1):
            _step(stepped)
        assert _state(skipped) == _state(stepped)
        skipped.check_invariants()
    assert not skipped.has_work


def _step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule(0.0)
    scheduler.commit(StepResult([0 if samples else -1 for samples in plan.sample_counts]))


def _state(scheduler: Scheduler) -> list[Any]:
    pool = scheduler.kv_cache.pool
    return [
        [
            (seq.id, seq.tokens, seq.length, seq.computed_len, seq.capacity, seq.row)
            for seq in scheduler.running
        ],
        [seq.id for seq in scheduler.queue],
        (pool.used_blocks, pool.cached_blocks, scheduler.preemptions),
        [round(seq.tenant_counter.served_tokens, 6) for seq in scheduler.running],
    ]


def test_command_prints_latencies_and_identity(tmp_path: Path) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text("duration_s: 5\npool: {replicas: 2}\nobjectives: 'ttft:5000,tpot:100'\n")
    result = CliRunner().invoke(app, ["twin", "run", str(file), "--seed", "3"])
    assert result.exit_code == 0, result.output
    for part in ("TTFT", "goodput", "utilisation", "seed 3, configuration", "hash"):
        assert part in result.output
    several = CliRunner().invoke(app, ["twin", "run", str(file), "--seeds", "2", "--jobs", "1"])
    assert "2 seeds" in several.output
    file.write_text("pool: {replica: 2}\n")
    wrong = CliRunner().invoke(app, ["twin", "run", str(file)])
    assert wrong.exit_code == 2
    assert "replica" in wrong.output


PRICES = LinearStepCost(
    step_s=0.004, token_s=5e-5, context_token_s=4e-7, pair_s=2e-8, sequence_s=3e-4
)


def _measure_steps(count: int, seed: int = 1) -> list[StepRecord]:
    """Return steps that cost `PRICES` with some noise, and among them some that are far off."""
    stream = random.Random(seed)
    records = []
    for _ in range(count):
        decode_rows = stream.randrange(1, 12)
        context_tokens = sum(stream.randrange(20, 1500) for _ in range(decode_rows))
        prefill_chunks = [(stream.randrange(1, 256), stream.randrange(500))] * stream.randrange(2)
        seconds = PRICES.step_seconds(decode_rows, context_tokens, prefill_chunks)
        seconds *= stream.gauss(1.0, 0.05) * (1.0 if stream.random() < 0.98 else 8.0)
        records.append(
            StepRecord(
                seconds=seconds,
                decode_rows=decode_rows,
                context_tokens=context_tokens,
                prefill_chunks=prefill_chunks,
            )
        )
    return records


def test_fit_finds_prices_despite_outliers_with_honest_errors() -> None:
    fitted = fit_cost(_measure_steps(4000))
    assert fitted.outliers == pytest.approx(80, rel=0.4)
    assert 0.01 < fitted.error < 0.06
    for name, price in msgspec.structs.asdict(PRICES).items():
        error = getattr(fitted.standard_errors, name)
        assert abs(getattr(fitted.cost, name) - price) < 4 * error + 0.03 * price, name
        assert 0 < error < 0.2 * price, name
    assert len(set(fitted.samples)) == len(fitted.samples) > 5


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (_measure_steps(20), "there are 20 steps"),
        ([r for r in _measure_steps(900) if not r.prefill_chunks], "pair_s cannot be fitted"),
        (
            [
                replace_struct(r, context_tokens=50 * r.decode_rows)
                for r in _measure_steps(900)
                if r.prefill_chunks
            ],
            "context_token_s and sequence_s cannot be separated",
        ),
    ],
)
def test_fit_names_prices_that_the_steps_do_not_determine(
    records: list[StepRecord], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        fit_cost(records)


def test_fitted_prices_are_a_scenario_whose_runs_have_intervals(tmp_path: Path) -> None:
    log, trace, scenario, fitted = (
        tmp_path / name for name in ("steps.jsonl", "trace.jsonl", "scenario.yaml", "fitted.yaml")
    )
    log.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in _measure_steps(900)))
    trace.write_text(
        "".join(
            f'{{"timestamp": {900 * number}, "input_length": 200, "output_length": 20}}\n'
            for number in range(8)
        )
    )
    scenario.write_text(f"duration_s: 10\npool: {{replicas: 1}}\nworkload: {{trace: {trace}}}\n")
    command = ["twin", "fit", str(log), "--output", str(fitted)]
    assert CliRunner().invoke(app, command).exit_code == 0
    runs = CliRunner().invoke(app, ["twin", "run", str(scenario), str(fitted), "--json"])
    (run,) = json.loads(runs.output)
    assert 0 < run["intervals"]["tpot.p50"] < 0.1 * run["summary"]["latency"]["tpot"]["p50"]

    outside_s = 0.25
    twin = TwinRun(read_scenario([scenario, fitted]), 1, make_plan(read_scenario([scenario]), 1))
    twin.run()
    rows = [
        replace_struct(row, chunks_s=[at + outside_s for at in row.chunks_s])
        for row in twin.gateway.rows
    ]
    result = tmp_path / "result.json"
    save_result(bench_result(rows), result)
    command += ["--scenario", str(scenario), "--result", str(result), "--json"]
    found = CliRunner().invoke(app, command)
    assert json.loads(found.output)["request_s"] == pytest.approx(outside_s, abs=0.001)
    assert read_scenario([fitted]).engine.request_s == pytest.approx(outside_s, abs=0.001)
    alone = CliRunner().invoke(app, command[:-3])
    assert alone.exit_code == 2
    assert "--result" in alone.output


def _leak_a_block(pool: BlockPool, blocks: list[int]) -> None:
    _RELEASE(pool, blocks[1:])


def _drain_at_once(pool: Any) -> None:  # noqa: ANN401 - a private class
    _REMOVE_LEAVING(pool)
    for member in vars(pool)["_members"]:
        if member.leaving_reason and member.replica.state is LaunchState.RUNNING:
            replica = member.replica
            pool.actions.append(
                Drain(pool=replica.pool, replica=replica.name, launcher="", reason="it leaves")
            )


def _withdraw_needed(pool: Any, rotation: set[str]) -> None:  # noqa: ANN401 - a private class
    for name in sorted(rotation)[:1]:
        pool.actions.append(Withdraw(pool="", replica=name, launcher="", reason="too many"))


def _admit_again(pool: Any) -> set[str]:  # noqa: ANN401 - a private class
    members = vars(pool)["_members"]
    usable = [each for each in members if each.is_usable and not each.leaving_reason]
    for member in usable:
        pool.actions.append(
            Admit(
                pool=member.replica.pool, replica=member.replica.name, launcher="", reason="again"
            )
        )
    return {each.replica.name for each in usable}


def _ignore_digests(cache: Any, step: int, corrupt: list[int]) -> list[Any]:  # noqa: ANN401 - a private class
    del corrupt
    found: list[Any] = _COMPLETE_RESTORES(cache, step, [])
    return found


def _bill_no_cancelled_output(end: RequestEnd, rates: Rates) -> Bill:
    return Bill() if end.status == "cancelled" else compute_bill(end, rates)


_RELEASE = BlockPool.release
_RECONCILER = "argosy.policy.reconciliation.reconciler"
_REMOVE_LEAVING = vars(vars(sys.modules[_RECONCILER])["PoolReconciler"])["_remove_leaving"]
_COMPLETE_RESTORES = type(Scheduler(Engine().build_limits()).kv_cache).complete_restores
MUTATIONS: dict[str, tuple[str, Any, str]] = {
    "router": (
        "argosy.policy.placement.PlacementPool.eligible_replicas",
        lambda pool: list(pool.replicas.values()),
        "drains and gets a request",
    ),
    "scheduler": (
        "argosy.engine.scheduling.BlockPool.release",
        _leak_a_block,
        "references differ",
    ),
    "ledger": ("argosy.twin.metering.compute_bill", _bill_no_cancelled_output, "is billed 0"),
    "reconciliation": (
        f"{_RECONCILER}.PoolReconciler._remove_leaving",
        _drain_at_once,
        "is drained while a gateway routes to it",
    ),
    "convergence": (
        f"{_RECONCILER}.PoolReconciler._select_rotation",
        _admit_again,
        "does not come to rest",
    ),
    "withdrawal": (
        f"{_RECONCILER}.PoolReconciler._withdraw_superfluous",
        _withdraw_needed,
        "is withdrawn, which leaves",
    ),
    "restarts": (
        f"{_RECONCILER}.PoolReconciler._restart_exited",
        lambda _: None,
        "the fleet has not recovered",
    ),
    "limiter": (
        "argosy.policy.quota_meters.SlidingWindow.remaining",
        lambda meter, _: meter.limit,
        "tokens in a minute, above its limit",
    ),
    "concurrency": (
        "argosy.policy.quota_meters.ConcurrencyMeter.remaining",
        lambda meter, _: meter.limit,
        "run, above its limit",
    ),
    "digests": (
        "argosy.engine.scheduling.kv_cache_manager.KvCacheManager.complete_restores",
        _ignore_digests,
        "gets a token of a corrupt block",
    ),
    "rollout": (
        "argosy.policy.rollout.rollout_controller.find_rollback",
        lambda *_: None,
        "although it is rejected",
    ),
}
"""Faults planted into the production's code: which function, what instead, and the invariant that breaks."""
SLOW = {"restarts", "withdrawal", "concurrency"}


@pytest.mark.parametrize(
    ("scenario", "name"),
    [
        *(
            pytest.param(PLANTED, name, marks=[pytest.mark.exhaustive] * (name in SLOW), id=name)
            for name in MUTATIONS
        ),
        *(
            pytest.param(
                read_scenario([SCENARIO]), name, marks=pytest.mark.exhaustive, id=f"{name}-large"
            )
            for name in ("router", "scheduler", "ledger", "reconciliation", "rollout")
        ),
    ],
)
def test_planted_fault_is_found_and_shrunk_to_a_file(
    scenario: Scenario, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replacement, expected = MUTATIONS[name]
    monkeypatch.setattr(target, replacement)
    results = (run_scenario(scenario, seed) for seed in range(1, 20))
    failed = next(result for result in results if result.failure)
    assert expected in failed.failure
    smallest = shrink(scenario, failed.seed)
    assert len(smallest.requests or ()) + len(smallest.faults) < 30
    file = tmp_path / "failure.yaml"
    write_scenario(file, smallest, failed.failure)
    assert expected in run_scenario(read_scenario([file]), failed.seed).failure
    monkeypatch.undo()
    assert not run_scenario(read_scenario([file]), failed.seed).failure


def test_replay_runs_the_requests_of_the_ledger_again_with_other_settings(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.db'}"
    now = time.time()
    with closing(open_store(url)) as store:
        store.migrate()
        store.ledger.add_records(
            [
                usage_row(
                    f"r{number}",
                    ended_at=now - 60 + number,
                    organisation=f"o{number % 2}",
                    input_tokens=400,
                    cached_tokens=300,
                    output_tokens=50 * (number != 3),
                )
                for number in range(20)
            ]
        )
    file = tmp_path / "scenario.yaml"
    file.write_text("pool: {replicas: 1}\nengine: {max_seqs: 2}\n")
    arguments = ["twin", "replay", str(file), "--store", url, "--set", "pool.replicas=4", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    before, after = json.loads(result.output)
    for run in (before, after):
        assert run["summary"]["completed"] == 19
        assert run["summary"]["output_tokens"] == 950
        assert run["cached_fraction"] > 0.5
    assert after["summary"]["latency"]["ttft"]["p99"] < before["summary"]["latency"]["ttft"]["p99"]
    for wrong, problem in (("pool.replica=4", "replica"), ("nothing", "pool.replicas=8")):
        failed = CliRunner().invoke(app, [*arguments[:-2], wrong])
        assert failed.exit_code == 2
        assert problem in failed.output


@pytest.mark.parametrize(
    "sessions_per_s",
    [0.4, *(pytest.param(rate, marks=pytest.mark.exhaustive) for rate in (0.1, 0.8, 1.2))],
)
def test_fluid_agrees_with_macro_within_the_stated_error(sessions_per_s: float) -> None:
    macro = Scenario(
        duration_s=900.0,
        pool=PoolSettings(replicas=4, probe_interval_s=10.0),
        engine=Engine(max_seqs=8),
        workload=Workload(sessions_per_s=sessions_per_s, more_turns=0.0, leave_fraction=0.0),
    )
    requests = run_scenario(macro, 1)
    flows = run_scenario(msgspec.structs.replace(macro, fidelity="fluid"), 1)
    for field, error in (("utilisation", 0.15), ("replica_hours", 0.1)):
        assert getattr(flows, field) == pytest.approx(getattr(requests, field), rel=error)
    rates = requests.summary.output_token_rate, requests.summary.latency["tpot"].mean
    assert flows.summary.output_token_rate == pytest.approx(rates[0], rel=0.15)
    assert flows.summary.latency["tpot"].mean == pytest.approx(rates[1], rel=0.1)
