"""The engine loop under failure: a step that raises, starves or times out costs the guilty one only."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import pytest

from argosy.engine.execution.executor import StepHandle
from argosy.engine.scheduling import StepPlan, StepResult
from argosy.engine.serving.core_messages import EngineRequest
from argosy.engine.serving.engine_core.core import MAX_CONSECUTIVE_FAILED_STEPS, EngineCore
from argosy.models import BUNDLED_MODEL
from argosy.protocol import SamplingParams, unpack_block_names
from tests.engine.core_driver import Answer, core_of, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
POISON = 3999


class Saboteur:
    """An executor that acts on each plan as it is launched, or, if `late`, when its result is asked for."""

    def __init__(
        self, core: EngineCore, act: Callable[[StepPlan], None], *, late: bool = False
    ) -> None:
        self._inner = core.executor
        self._act = act
        self._late = late
        core.executor = self

    def submit(self, plan: StepPlan) -> StepHandle:
        if not self._late:
            self._act(plan)
        flight = self._inner.submit(plan)
        return Sabotaged(flight, plan, self._act) if self._late else flight

    @property
    def pending_preparations(self) -> int:
        return self._inner.pending_preparations

    def prepare_next(self) -> None:
        self._inner.prepare_next()

    def reset(self) -> None:
        self._inner.reset()


@dataclass(frozen=True)
class Sabotaged:
    """A flight that does something else before it lands."""

    step: StepHandle
    plan: StepPlan
    act: Callable[[StepPlan], None]

    def result(self) -> StepResult:
        self.act(self.plan)
        return self.step.result()


def request(name: str, *, prompt: list[int] | None = None, **changes: object) -> EngineRequest:
    rng = random.Random(name)
    made = EngineRequest(
        id=name, prompt=prompt or [rng.randint(5, 3900) for _ in range(20)], params=GREEDY
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture(params=[0, 1], ids=lambda depth: f"inflight{depth}", name="depth")
def a_depth(request: pytest.FixtureRequest) -> int:
    """How many steps are under way while the next one is planned."""
    depth: int = request.param
    return depth


@pytest.fixture(name="core")
def a_core(depth: int) -> Iterator[EngineCore]:
    core = core_of(BUNDLED_MODEL, max_seqs=8, max_steps_in_flight=depth)
    yield core
    assert not core.has_work


def expected(*requests: EngineRequest) -> dict[str, Answer]:
    return run(core_of(BUNDLED_MODEL, max_seqs=8), list(requests))


@pytest.mark.parametrize("late", [False, True], ids=["launch", "result"])
def test_a_poisonous_request_ends_alone(core: EngineCore, late: bool) -> None:
    rows: set[int] = set()

    def act(plan: StepPlan) -> None:
        for admission in plan.admissions:
            (rows.add if POISON in admission.tokens else rows.discard)(admission.row)
        if rows.intersection(plan.rows):
            raise RuntimeError("poison")

    Saboteur(core, act, late=late)
    healthy = [request(name) for name in "abcd"]
    poisoned = request("bad", prompt=[7, POISON, 7])
    answers = run(core, [*healthy[:2], poisoned, *healthy[2:]])
    assert answers["bad"].finish == "error"
    assert "server's log" in (answers["bad"].error or "")
    reference = expected(*healthy)
    assert {name: answers[name].tokens for name in "abcd"} == {
        name: reference[name].tokens for name in "abcd"
    }


def test_running_out_of_memory_shrinks_the_step_and_goes_on(core: EngineCore) -> None:
    limit = 40

    def act(plan: StepPlan) -> None:
        if plan.total_tokens > limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    Saboteur(core, act)
    requests = [request(name) for name in "abcdef"]
    answers = run(core, requests)
    assert {answer.finish for answer in answers.values()} == {"length"}
    assert core.scheduler.token_budget < core.scheduler.limits.max_step_tokens


def test_numbers_that_are_not_finite_end_their_row(depth: int) -> None:
    core = core_of(BUNDLED_MODEL, max_seqs=8, max_steps_in_flight=depth)
    model = core.executor._model  # type: ignore[attr-defined]  # noqa: SLF001 - the model is the culprit

    def sick(batch: object, attention: object) -> object:
        logits = model(batch, attention)
        logits[0] = float("nan")
        return logits

    core.executor._model = sick  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    answers = run(core, [request(name, params=GREEDY) for name in "ab"])
    assert answers["a"].finish == "error"
    assert "finite" in (answers["a"].error or "")
    assert {answer.finish for answer in answers.values()} <= {"error", "length"}


def test_a_broken_worker_gives_up_after_a_bounded_number_of_steps(depth: int) -> None:
    core = core_of(BUNDLED_MODEL, max_steps_in_flight=depth)

    def act(_: StepPlan) -> None:
        raise RuntimeError("nothing works")

    Saboteur(core, act)
    for number in range(MAX_CONSECUTIVE_FAILED_STEPS + 10):
        core.add(request(str(number)))
    for _ in range(MAX_CONSECUTIVE_FAILED_STEPS):
        core.step()
    with pytest.raises(RuntimeError, match="nothing works"):
        core.step()


def test_a_timeout_returns_what_there_is(core: EngineCore) -> None:
    params = msgspec.structs.replace(GREEDY, max_tokens=500)
    answer = run(core, [request("slow", params=params, timeout_s=0.05)])["slow"]
    assert answer.finish == "timeout"
    assert 0 < len(answer.tokens) < 500


def test_an_abort_frees_everything_at_once(core: EngineCore) -> None:
    params = msgspec.structs.replace(GREEDY, max_tokens=500)
    for name in "abc":
        core.add(request(name, params=params))
    core.step()
    core.abort(["a", "b", "c", "never"])
    memory = core.scheduler.kv_cache
    assert memory.available_blocks == memory.pool.num_blocks
    finishes = {
        delta.id: delta.finish_reason for delta in core.step().deltas if delta.finish_reason
    }
    assert finishes == dict.fromkeys("abc", "cancelled")


def test_a_queue_that_has_gone_is_no_longer_told(core: EngineCore) -> None:
    """Who chooses a replica would shun this one as long as nobody asks it, which is for ever."""
    names = [f"r{number}" for number in range(4)]
    for name in names:
        core.add(request(name, prompt=[5] * 1500, cache_domain=name))
    told = [core.step().stats.queued_tokens]
    core.abort(names)
    while core.has_work:
        told.append(core.step().stats.queued_tokens)
    assert told[0] > told[-1] == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": [5] * 3000}, "exceed"),
        ({"params": msgspec.structs.replace(GREEDY, max_tokens=10_000)}, "exceed"),
    ],
)
def test_what_slips_past_the_door_is_answered(
    core: EngineCore, changes: dict[str, object], reason: str
) -> None:
    answer = run(core, [request("a", **changes)])["a"]  # type: ignore[arg-type]
    assert answer.finish == "error"
    assert reason in (answer.error or "")


def test_tokens_beyond_a_stop_are_neither_delivered_nor_counted(core: EngineCore) -> None:
    """With a step under way, the device samples one more before the stop is seen."""
    free = request("a", params=msgspec.structs.replace(GREEDY, max_tokens=30))
    tokens = expected(free)["a"].tokens
    params = msgspec.structs.replace(free.params, stop_token_ids=[tokens[9]])
    core.add(msgspec.structs.replace(free, params=params))
    answer = Answer()
    while core.has_work:
        outputs = core.step()
        for delta in outputs.deltas:
            answer.take(delta)
    length = tokens.index(tokens[9]) + 1
    assert answer.tokens == tokens[:length]
    assert answer.finish == "stop"
    assert outputs.stats.generated_tokens_total == length


def test_steps_say_where_their_time_went(core: EngineCore) -> None:
    core.add(request("a"))
    spent = core.step().stats.phase_s_total
    while core.has_work:
        spent, before = core.step().stats.phase_s_total, spent
        assert all(spent[phase] >= before[phase] for phase in before)
    assert set(spent) == {"plan", "launch", "compute", "sample", "commit"}
    assert all(seconds > 0 for seconds in spent.values())


def test_blocks_are_told_with_the_first_token_and_all_in_the_end(core: EngineCore) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for name in "ab":
        core.add(request(name, prompt=list(range(10, 60)), params=params, cache_domain=name))
    told: set[int] = set()
    first: dict[str, set[int]] = {}
    while core.has_work:
        outputs = core.step()
        if outputs.kv_change is not None:
            told |= set(unpack_block_names(outputs.kv_change.stored_names))
            told -= set(unpack_block_names(outputs.kv_change.removed_names))
        for delta in outputs.deltas:
            if delta.cached_tokens is not None:
                first[delta.id] = set(unpack_block_names(delta.prompt_block_names))
                assert first[delta.id] <= told
            else:
                assert not delta.prompt_block_names
    assert len(first["a"]) == len(first["b"]) == 50 // 16
    assert first["a"].isdisjoint(first["b"])
    assert len(told) == 2 * ((50 + 40 - 1) // 16)
    assert not core.scheduler.kv_cache.has_changes


@pytest.mark.parametrize("late", [False, True], ids=["launch", "result"])
def test_every_request_ends_once_whatever_happens(core: EngineCore, late: bool) -> None:
    """Random cancels, timeouts, failures and shortages; `run` checks the rest."""
    rng = random.Random(1)

    def act(_: StepPlan) -> None:
        if rng.random() < 0.05:
            raise RuntimeError("a bad moment")

    Saboteur(core, act, late=late)
    answers: dict[str, Answer] = {}
    for number in range(40):
        name = str(number)
        answers[name] = Answer()
        timeout = rng.choice([None, None, 0.03])
        core.add(request(name, timeout_s=timeout, tier=rng.randint(0, 2), tenant=rng.choice("xy")))
        if rng.random() < 0.2:
            core.abort([str(rng.randint(0, number))])
        for delta in core.step().deltas:
            answers[delta.id].take(delta)
        core.scheduler.check_invariants()
    while core.has_work:
        for delta in core.step().deltas:
            answers[delta.id].take(delta)
    assert all(answer.finish for answer in answers.values())
