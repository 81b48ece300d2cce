"""Engine core under failure: steps that raise, run out of memory or time out affect only the responsible request."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from llguidance import LLMatcher
from torch import Tensor

from argosy import machine_resources as resources
from argosy.engine.engine_request import EngineRequest
from argosy.engine.execution.executor.output_stage import StepHandle
from argosy.engine.execution.kernels.attention import Attention
from argosy.engine.execution.kernels.batch import Batch
from argosy.engine.execution.kernels.cpu import compute_threads
from argosy.engine.scheduling import StepPlan, StepRecord, StepResult
from argosy.engine.serving.engine_core.core import MAX_CONSECUTIVE_FAILED_STEPS, EngineCore
from argosy.engine.serving.engine_core.step_log import StepLog
from argosy.machine_resources import CpuTimes
from argosy.models import BUNDLED_MODEL
from argosy.process import private_memory_bytes
from argosy.protocol import SamplingParams, unpack_block_names
from tests.engine.core_driver import RequestOutput, create_core, run_requests

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
GRAMMARS = ["", "", *(f'{{"grammars": [{{"lark_grammar": "start: /[{c}-z]+/"}}]}}' for c in "abz~")]
"""Grammars, of which the last is invalid. The empty one stands for none."""
HOSTILE_PATTERN = "((.*[a-m].{20})|(.*[g-q].{21})|(.*[h-z].{22}))"
POISON_TOKEN = 3999
"""Token whose presence in a step makes it fail."""


def intercept_steps(
    core: EngineCore, callback: Callable[[StepPlan], None], *, at_result: bool = False
) -> None:
    """Pass each plan to a callback at its launch, or if `at_result`, before its result is returned."""
    submit = core.executor.submit

    def intercepted(plan: StepPlan) -> StepHandle:
        if not at_result:
            callback(plan)
        step = submit(plan)
        return InterceptedStep(step, plan, callback) if at_result else step

    core.executor.submit = intercepted  # type: ignore[method-assign]


@dataclass(frozen=True)
class InterceptedStep:
    """Step that calls a callback before it returns its result."""

    step: StepHandle
    plan: StepPlan
    callback: Callable[[StepPlan], None]

    def result(self) -> StepResult:
        self.callback(self.plan)
        return self.step.result()


def create_request(
    request_id: str, *, prompt: list[int] | None = None, **changes: object
) -> EngineRequest:
    rng = random.Random(request_id)
    request = EngineRequest(
        id=request_id, prompt=prompt or [rng.randint(5, 3900) for _ in range(20)], params=GREEDY
    )
    return msgspec.structs.replace(request, **changes)


@pytest.fixture(params=[0, 1], ids=lambda steps: f"inflight{steps}")
def steps_in_flight(request: pytest.FixtureRequest) -> int:
    """Maximum number of steps in flight while the next one is planned."""
    steps: int = request.param
    return steps


@pytest.fixture
def core(steps_in_flight: int) -> Iterator[EngineCore]:
    core = create_core(BUNDLED_MODEL, max_seqs=8, max_steps_in_flight=steps_in_flight)
    yield core
    assert not core.has_work


def run_without_failures(*requests: EngineRequest) -> dict[str, RequestOutput]:
    return run_requests(create_core(BUNDLED_MODEL, max_seqs=8), list(requests))


@pytest.mark.parametrize(
    ("error", "reported", "at_result"),
    [
        (RuntimeError("poison"), "server's log", False),
        (RuntimeError("poison"), "server's log", True),
        (MemoryError(), "memory", False),
    ],
    ids=["launch", "result", "memory"],
)
def test_request_that_makes_steps_fail_ends_alone(
    core: EngineCore, error: Exception, reported: str, at_result: bool
) -> None:
    rows: set[int] = set()

    def fail(plan: StepPlan) -> None:
        for admission in plan.admissions:
            (rows.add if POISON_TOKEN in admission.tokens else rows.discard)(admission.row)
        if rows.intersection(plan.rows):
            raise error

    intercept_steps(core, fail, at_result=at_result)
    healthy = [create_request(name) for name in "abcd"]
    poisoned = create_request("bad", prompt=[7, POISON_TOKEN, 7])
    outputs = run_requests(core, [*healthy[:2], poisoned, *healthy[2:]])
    bad = outputs.pop("bad")
    assert bad.finish == "error"
    assert reported in (bad.error or "")
    reference = run_without_failures(*healthy)
    assert {name: output.tokens for name, output in outputs.items()} == {
        name: output.tokens for name, output in reference.items()
    }


@pytest.mark.parametrize(("limit", "at_result"), [(40, True), (3, False)], ids=str)
def test_out_of_memory_shrinks_steps_and_loses_nothing(
    core: EngineCore, limit: int, at_result: bool
) -> None:
    """Steps above `limit` tokens fail. The limit is smaller than a prompt, or even than the number of requests."""

    def fail(plan: StepPlan) -> None:
        if plan.total_tokens > limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    intercept_steps(core, fail, at_result=at_result)
    requests = [create_request(name, prompt=[5 + ord(name)] * 50) for name in "abcd"]
    outputs = run_requests(core, requests)
    assert outputs == run_without_failures(*requests)
    core.add(create_request("next"))
    while core.has_work:
        stats = core.step().stats
    assert stats.out_of_memory_steps_total > 1
    assert 1 <= stats.step_token_budget <= limit


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.exhaustive)]
)
def test_changing_thread_count_does_not_change_outputs(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes take a CPU and leave it again. The engine measures that at each step."""
    counters = itertools.count()

    def read_times() -> CpuTimes:
        number = next(counters)
        busy_s = 0.5 * (number // 20 * 10 + min(number % 20, 10))
        at_s = 0.5 * number
        return CpuTimes(at_s, own_s=0.0, idle_s=2 * at_s - busy_s, total_s=2 * at_s, num_cpus=2)

    monkeypatch.setattr(compute_threads, "read_cpu_times", read_times)
    monkeypatch.setattr(compute_threads, "MEASURE_INTERVAL_S", 0.0)
    monkeypatch.setattr(compute_threads, "NUM_STAGGERS", 1)
    monkeypatch.setattr(resources, "usable_cpus", lambda: 2)
    monkeypatch.delenv(compute_threads.THREADS_VARIABLE, raising=False)
    core = create_core(BUNDLED_MODEL, max_seqs=8, threads=None, dtype=dtype)
    params = msgspec.structs.replace(GREEDY, max_tokens=50, logprobs=3)
    requests = [create_request(name, params=params) for name in "abcdefgh"]
    expected = run_requests(create_core(BUNDLED_MODEL, max_seqs=8, dtype=dtype), requests)
    outputs = {request.id: RequestOutput() for request in requests}
    thread_counts = []
    for request in requests:
        core.add(request)
    while core.has_work:
        step = core.step()
        thread_counts.append((step.stats.compute_threads, torch.get_num_threads()))
        for delta in step.deltas:
            outputs[delta.id].add(delta)
    assert outputs == expected
    assert [count for count, _ in itertools.groupby(thread_counts)] == [(2, 2), (1, 1)] * 2


def test_non_finite_logits_fail_their_request_only(steps_in_flight: int) -> None:
    core = create_core(BUNDLED_MODEL, max_seqs=8, max_steps_in_flight=steps_in_flight)
    model = core.executor._model  # noqa: SLF001 - the test replaces a method
    forward = model.forward

    def forward_with_nan(batch: Batch, attention: Attention) -> Tensor:
        logits = forward(batch, attention)
        logits[0] = float("nan")
        return logits

    model.forward = forward_with_nan  # type: ignore[method-assign]
    outputs = run_requests(core, [create_request(name, params=GREEDY) for name in "ab"])
    assert outputs["a"].finish == "error"
    assert "finite" in (outputs["a"].error or "")
    assert {output.finish for output in outputs.values()} <= {"error", "length"}


def test_core_stops_after_consecutive_failed_steps(steps_in_flight: int) -> None:
    core = create_core(BUNDLED_MODEL, max_steps_in_flight=steps_in_flight)

    def fail(_: StepPlan) -> None:
        raise RuntimeError("device lost")

    intercept_steps(core, fail)
    for number in range(MAX_CONSECUTIVE_FAILED_STEPS + 10):
        core.add(create_request(str(number)))
    for _ in range(MAX_CONSECUTIVE_FAILED_STEPS):
        core.step()
    with pytest.raises(RuntimeError, match="device lost"):
        core.step()


def test_timeout_returns_partial_output(core: EngineCore) -> None:
    params = msgspec.structs.replace(GREEDY, max_tokens=500)
    output = run_requests(core, [create_request("slow", params=params, timeout_s=0.05)])["slow"]
    assert output.finish == "timeout"
    assert 0 < len(output.tokens) < 500


def test_abort_frees_blocks_at_once(core: EngineCore) -> None:
    params = msgspec.structs.replace(GREEDY, max_tokens=500)
    for name in "abc":
        core.add(create_request(name, params=params))
    core.step()
    core.abort(["a", "b", "c", "unknown"])
    kv_cache = core.scheduler.kv_cache
    assert kv_cache.pool.available_blocks == kv_cache.pool.num_blocks
    finishes = {
        delta.id: delta.finish_reason for delta in core.step().deltas if delta.finish_reason
    }
    assert finishes == dict.fromkeys("abc", "cancelled")


def test_queued_tokens_are_reported_as_zero_after_abort(core: EngineCore) -> None:
    """With a stale report, routers would avoid this replica until its next request, which they would never send."""
    names = [f"r{number}" for number in range(4)]
    for name in names:
        core.add(create_request(name, prompt=[5] * 400, cache_domain=name))
    reported = [core.step().stats.queued_tokens]
    core.abort(names)
    while core.has_work:
        reported.append(core.step().stats.queued_tokens)
    assert reported[0] > reported[-1] == 0


@pytest.mark.parametrize(
    "changes",
    [{"prompt": [5] * 9000}, {"params": msgspec.structs.replace(GREEDY, max_tokens=10_000)}],
)
def test_invalid_request_that_reaches_core_gets_error(
    core: EngineCore, changes: dict[str, Any]
) -> None:
    output = run_requests(core, [create_request("a", **changes)])["a"]
    assert output.finish == "error"
    assert "exceed" in (output.error or "")


def test_tokens_after_stop_are_neither_delivered_nor_counted(core: EngineCore) -> None:
    """With a step in flight, the device samples one more token before the stop is detected."""
    unstopped = create_request("a", params=msgspec.structs.replace(GREEDY, max_tokens=30))
    tokens = run_without_failures(unstopped)["a"].tokens
    params = msgspec.structs.replace(unstopped.params, stop_token_ids=[tokens[9]])
    core.add(msgspec.structs.replace(unstopped, params=params))
    output = RequestOutput()
    while core.has_work:
        step = core.step()
        for delta in step.deltas:
            output.add(delta)
    length = tokens.index(tokens[9]) + 1
    assert output.tokens == tokens[:length]
    assert output.finish == "stop"
    assert step.stats.generation_tokens_total == length


def test_step_stats_contain_phase_durations(core: EngineCore) -> None:
    core.add(create_request("a"))
    spent = core.step().stats.phase_s_total
    while core.has_work:
        spent, before = core.step().stats.phase_s_total, spent
        assert all(spent[phase] >= before[phase] for phase in before)
    assert set(spent) == {"plan", "launch", "compute", "sample", "commit"}
    assert all(seconds > 0 for seconds in spent.values())


def _read_log(folder: Path) -> list[StepRecord]:
    (file,) = folder.iterdir()
    return [msgspec.json.decode(line, type=StepRecord) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("steps_in_flight", [0, 1])
def test_step_log_has_the_work_of_each_step(tmp_path: Path, steps_in_flight: int) -> None:
    options = {"speculation": "off", "max_steps_in_flight": steps_in_flight}
    core = create_core(BUNDLED_MODEL, step_log=str(tmp_path / "log"), **options)
    requests = [
        EngineRequest(
            id=str(number), prompt=list(range(100 * number, 130 + 101 * number)), params=GREEDY
        )
        for number in range(3)
    ]
    run_requests(core, requests)
    core.close()
    records = _read_log(tmp_path / "log")
    prompts = sum(count for record in records for count, _ in record.prefill_chunks)
    assert prompts == sum(len(request.prompt) for request in requests)
    assert sum(record.decode_rows for record in records) == 3 * (8 - 1)
    assert all(record.context_tokens >= 30 * record.decode_rows for record in records)
    assert all(record.seconds > 0 for record in records)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another folder"):
        create_core(BUNDLED_MODEL, step_log=str(tmp_path / "file"))


def test_logged_step_begins_with_the_end_of_the_one_before_unless_the_engine_was_idle(
    tmp_path: Path,
) -> None:
    log = StepLog(str(tmp_path))
    plan = StepPlan(1, rows=[0], starts=[5], counts=[1], sample_counts=[1])
    for began, ended, has_work in ((1.0, 1.5, True), (1.75, 2.0, False), (5.0, 5.25, False)):
        log.begin_step(began)
        log.end_step(plan, ended, has_work=has_work)
    log.close()
    assert [record.seconds for record in _read_log(tmp_path)] == [0.5, 0.5, 0.25]


def test_stored_blocks_are_reported_by_first_token_and_at_end(core: EngineCore) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for name in "ab":
        core.add(create_request(name, prompt=list(range(10, 60)), params=params, cache_domain=name))
    reported: set[int] = set()
    prompt_blocks: dict[str, set[int]] = {}
    while core.has_work:
        step = core.step()
        if step.kv_change is not None:
            reported |= set(unpack_block_names(step.kv_change.stored_names))
            reported -= set(unpack_block_names(step.kv_change.removed_names))
        for delta in step.deltas:
            if delta.cached_tokens is not None:
                prompt_blocks[delta.id] = set(unpack_block_names(delta.prompt_block_names))
                assert prompt_blocks[delta.id] <= reported
            else:
                assert not delta.prompt_block_names
    assert len(prompt_blocks["a"]) == len(prompt_blocks["b"]) == 50 // 16
    assert prompt_blocks["a"].isdisjoint(prompt_blocks["b"])
    assert len(reported) == 2 * ((50 + 40 - 1) // 16)
    assert not core.scheduler.kv_cache.has_changes


def test_memory_of_grammars_is_released_and_only_its_largest_cause_loses_requests(
    core: EngineCore,
) -> None:
    """Each hostile grammar grows its lexer by megabytes within some tokens."""
    params = [
        msgspec.structs.replace(
            GREEDY, max_tokens=6, grammar=LLMatcher.grammar_from_regex(f"{HOSTILE_PATTERN}q{n}")
        )
        for n in range(9)
    ]
    hostile = [create_request(f"x{n}", tenant="x", params=params[n]) for n in range(8)]
    others = [create_request("y", tenant="y", params=params[8]), create_request("z", tenant="z")]
    expected = run_requests(core, others)
    core.shed_memory(end_requests=False)
    before = private_memory_bytes()

    # Threads compile grammars: with compiled ones, all requests begin in the same step.
    run_requests(
        core,
        [
            create_request(f"compile{n}", params=msgspec.structs.replace(params[n], max_tokens=1))
            for n in range(8)
        ],
    )
    outputs = {request.id: RequestOutput() for request in [*hostile, *others]}
    sheds = itertools.chain([False, True], itertools.repeat(None))
    for request in [*hostile, *others]:
        core.add(request)
    grown = 0
    while core.has_work:
        for delta in core.step().deltas:
            outputs[delta.id].add(delta)
        if len(outputs["x0"].tokens) >= 4 and (end_requests := next(sheds)) is not None:
            grown = max(grown, private_memory_bytes() - before)
            core.shed_memory(end_requests=end_requests)
    core.shed_memory(end_requests=False)
    kept = private_memory_bytes() - before
    assert {outputs[r.id].error_code for r in hostile} == {"grammar_failed"}
    assert [outputs[r.id].tokens for r in others] == [output.tokens for output in expected.values()]
    # More than half may stay in pages that earlier tests of the process left half full.
    assert kept < 0.75 * grown, (kept, grown)


@pytest.mark.parametrize("at_result", [False, True], ids=["launch", "result"])
def test_every_request_finishes_once_under_random_failures(
    core: EngineCore, at_result: bool
) -> None:
    """Requests are cancelled, time out and fail at random. Some have grammars, of which some are invalid."""
    rng = random.Random(1)

    def fail(_: StepPlan) -> None:
        if rng.random() < 0.05:
            raise RuntimeError("random failure")

    intercept_steps(core, fail, at_result=at_result)
    outputs: dict[str, RequestOutput] = {}
    for number in range(40):
        name = str(number)
        outputs[name] = RequestOutput()
        timeout = rng.choice([None, None, 0.03])
        core.add(
            create_request(
                name,
                timeout_s=timeout,
                tier=rng.randint(0, 2),
                tenant=rng.choice("xy"),
                params=msgspec.structs.replace(GREEDY, grammar=rng.choice(GRAMMARS)),
            )
        )
        if rng.random() < 0.2:
            core.abort([str(rng.randint(0, number))])
        for delta in core.step().deltas:
            outputs[delta.id].add(delta)
        core.scheduler.check_invariants()
    while core.has_work:
        for delta in core.step().deltas:
            outputs[delta.id].add(delta)
    assert all(output.finish for output in outputs.values())
