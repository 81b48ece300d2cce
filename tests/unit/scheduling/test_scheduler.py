"""The scheduler under random arrivals, cancels, hits and shortages keeps its invariants and its tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.scheduling import Scheduler, SchedulerLimits, Sequence, StepResult
from argosy.engine.scheduling.batching_policy import DynamicBatching, StaticBatching
from argosy.protocol.sampling import SamplingParams
from tests.support.fake_executor import FakeExecutor, reference


@dataclass
class Rig:
    """A scheduler with its executor, and what each request was given."""

    limits: SchedulerLimits
    depth: int = 0
    scheduler: Scheduler = field(init=False)
    executor: FakeExecutor = field(init=False)
    now: float = 0.0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.executor = FakeExecutor(
            self.limits.num_blocks, self.limits.block_size, self.limits.max_step_tokens
        )

    def add(self, name: str, prompt: list[int], max_tokens: int, **options: object) -> Sequence:
        self.outputs[name] = list(options.get("output", []))  # type: ignore[call-overload]
        return self.scheduler.add(
            id=name,
            prompt=prompt,
            params=SamplingParams(max_tokens=max_tokens),
            now=self.now,
            **options,  # type: ignore[arg-type]
        )

    def step(self) -> None:
        self.now += 0.01
        for seq in self.scheduler.expire(self.now):
            self.end(seq.id, "timeout")
        plan = self.scheduler.schedule(self.now)
        assert len(self.scheduler.running) <= self.limits.max_seqs
        for seq, _, token, finish in self.scheduler.commit(self.executor.execute(plan)):
            if token >= 0:
                self.outputs[seq.id].append(token)
            if finish:
                self.end(seq.id, finish)
        self.scheduler.check_invariants()

    def end(self, name: str, reason: str) -> None:
        assert name not in self.ended, "a request ended twice"
        self.ended[name] = reason

    def cancel(self, name: str) -> None:
        if self.scheduler.cancel(name):
            self.end(name, "cancelled")

    def run(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, "a request starves"
        memory = self.scheduler.kv_cache
        assert memory.available_blocks == self.limits.num_blocks, "blocks leaked"


def limits(**changes: object) -> SchedulerLimits:
    base = {
        "max_seqs": 4,
        "max_step_tokens": 16,
        "block_size": 4,
        "num_blocks": 32,
        "max_prefill_fraction": 0.5,
        "watermark": 0.01,
        "prefix_cache": True,
        "ridge_tokens": 2,
    }
    return SchedulerLimits(**(base | changes))  # type: ignore[arg-type]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[SchedulerLimits, list[tuple[int, str, dict[str, object]]]]:
    size = draw(st.sampled_from([1, 2, 4]))
    sizes = limits(
        max_seqs=draw(st.integers(1, 5)),
        max_step_tokens=draw(st.integers(5, 40)),
        block_size=size,
        num_blocks=draw(st.integers(-(-30 // size), 40)),
        host_blocks=draw(st.sampled_from([0, 3, 20])),
        prefix_cache=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.1])),
    )
    base = draw(st.lists(st.integers(0, 3), min_size=20, max_size=20))
    events: list[tuple[int, str, dict[str, object]]] = []
    for number in range(draw(st.integers(1, 12))):
        prompt = base[: draw(st.integers(1, 20))] + draw(st.lists(st.integers(0, 3), max_size=2))
        max_tokens = draw(st.integers(1, 30 - len(prompt)))
        resumed = reference(prompt, draw(st.integers(0, max_tokens - 1)))
        lead = draw(st.one_of(st.none(), st.integers(0, number - 1))) if number else None
        events.append(
            (
                draw(st.integers(0, 15)),
                "add",
                {
                    "name": str(number),
                    "prompt": prompt,
                    "max_tokens": max_tokens,
                    "output": resumed,
                    "tenant": draw(st.sampled_from("ab")),
                    "tier": draw(st.integers(0, 2)),
                    "cache_domain": draw(st.sampled_from(["x", "x", "y"])),
                    "timeout_s": draw(st.sampled_from([float("inf")] * 4 + [0.05])),
                    "parent_id": None if lead is None else str(lead),
                },
            )
        )
        if draw(st.integers(0, 4)) == 0:
            events.append((draw(st.integers(0, 40)), "cancel", {"name": str(number)}))
        if draw(st.integers(0, 5)) == 0:
            events.append((draw(st.integers(0, 40)), "rot", {"slot": draw(st.integers(0, 19))}))
    return sizes, sorted(events, key=lambda event: event[0])


@settings(max_examples=400)
@given(worlds())
def test_random_worlds(
    world: tuple[SchedulerLimits, list[tuple[int, str, dict[str, object]]]],
) -> None:
    """Every request ends once with exactly its own tokens; invariants hold after every step."""
    sizes, events = world
    rig = Rig(sizes)
    added: dict[str, dict[str, object]] = {}
    for tick in range(41):
        for when, what, options in events:
            if when != tick:
                continue
            if what == "add":
                added[str(options["name"])] = options
                rig.add(**options)  # type: ignore[arg-type]
            elif what == "cancel":
                rig.cancel(str(options["name"]))
            else:
                rig.executor.rotten.add(int(options["slot"]))  # type: ignore[call-overload]
        rig.step()
    rig.run()
    assert rig.ended.keys() == added.keys()
    for name, options in added.items():
        prompt, most = options["prompt"], options["max_tokens"]
        whole = reference(prompt, most)  # type: ignore[arg-type]
        got = rig.outputs[name]
        assert got == whole[: len(got)]
        if rig.ended[name] == "length":
            assert got == whole


def test_stop_tokens_end_a_sequence() -> None:
    rig = Rig(limits())
    whole = reference([1, 2, 3], 20)
    stop = whole[5]
    rig.add("a", [1, 2, 3], 20, stop_token_ids=frozenset([stop]))
    rig.run()
    assert rig.ended == {"a": "stop"}
    assert rig.outputs["a"] == whole[: whole.index(stop) + 1]


def test_nothing_is_generated_when_nothing_was_asked_for() -> None:
    rig = Rig(limits())
    rig.add("a", [1] * 30, 0)
    rig.run()
    assert rig.outputs == {"a": []}
    assert rig.ended == {"a": "length"}


def test_prefix_hits_within_a_domain_and_none_across() -> None:
    rig = Rig(limits())
    for name, domain in (("first", "x"), ("same", "x"), ("other", "y")):
        seq = rig.add(name, [7] * 17, 2, cache_domain=domain)
        rig.run()
        assert seq.hit_tokens == (16 if name == "same" else 0)


def test_a_hit_never_covers_the_last_token() -> None:
    rig = Rig(limits())
    rig.add("first", [7] * 16, 2)
    rig.run()
    seq = rig.add("second", [7] * 16, 2)
    rig.run()
    assert seq.hit_tokens == 12


def test_simultaneous_requests_share_what_the_first_one_computes() -> None:
    """They arrive together: the prefix is computed once, and strangers do not wait for it."""
    rig = Rig(limits(max_step_tokens=64, num_blocks=64))
    prefix = list(range(40))
    same = [rig.add(f"same{i}", [*prefix, 50 + i], 3) for i in range(3)]
    stranger = rig.add("stranger", [9] * 5, 3)
    rig.step()
    assert stranger.scheduled_at is not None
    rig.run()
    assert [seq.hit_tokens for seq in same] == [0, 40, 40]
    for i in range(3):
        assert rig.outputs[f"same{i}"] == reference([*prefix, 50 + i], 3)


def test_who_waits_for_a_prefix_goes_on_when_it_will_not_come() -> None:
    rig = Rig(limits(max_step_tokens=8, num_blocks=64))
    prefix = list(range(40))
    rig.add("first", [*prefix, 1], 3)
    rig.add("second", [*prefix, 2], 3)
    rig.step()
    assert [seq.id for seq in rig.scheduler.running] == ["first"]
    rig.cancel("first")
    rig.run()
    assert rig.outputs["second"] == reference([*prefix, 2], 3)


def test_siblings_fork_from_the_lead() -> None:
    rig = Rig(limits(num_blocks=64))
    prompt = list(range(10))
    rig.add("parent_id", prompt, 8)
    siblings = [rig.add(f"s{i}", prompt, 8, parent_id="parent_id") for i in range(3)]
    rig.run()
    assert all(seq.hit_tokens == 9 for seq in siblings)
    assert all(rig.outputs[f"s{i}"] == rig.outputs["parent_id"] for i in range(3))


def test_preemption_gives_the_same_tokens() -> None:
    rig = Rig(limits(num_blocks=12, prefix_cache=False))
    rig.scheduler.output_estimator.fraction = 0.0
    for name in "abcd":
        rig.add(name, [ord(name)] * 8, 20)
    rig.run()
    assert rig.scheduler.preemptions > 0
    for name in "abcd":
        assert rig.outputs[name] == reference([ord(name)] * 8, 20)


def test_evicted_blocks_come_back_from_the_host() -> None:
    rig = Rig(limits(num_blocks=8, host_blocks=16))
    rig.add("a", [1] * 21, 2)
    rig.run()
    rig.add("b", [2] * 29, 2)
    rig.run()
    again = rig.add("a2", [1] * 21, 2)
    rig.run()
    assert again.hit_tokens == 20
    assert rig.scheduler.kv_cache.host_hit_tokens > 0


def test_a_corrupt_host_block_is_dropped_and_recomputed() -> None:
    rig = Rig(limits(num_blocks=8, host_blocks=16))
    rig.add("a", [1] * 21, 2)
    rig.run()
    rig.add("b", [2] * 29, 2)
    rig.run()
    rig.executor.rotten.update(range(16))
    rig.add("a2", [1] * 21, 2)
    rig.run()
    assert rig.outputs["a2"] == reference([1] * 21, 2)
    assert rig.scheduler.kv_cache.corrupt_blocks > 0


def test_a_higher_tier_displaces_a_lower_one_and_ties_never_do() -> None:
    rig = Rig(limits(max_seqs=1))
    rig.add("free", [1, 2], 20, tier=2)
    rig.step()
    rig.add("equal", [3, 4], 5, tier=2)
    rig.step()
    assert [seq.id for seq in rig.scheduler.running] == ["free"]
    rig.add("premium", [5, 6], 5, tier=0)
    rig.step()
    assert [seq.id for seq in rig.scheduler.running] == ["premium"]
    rig.run()
    assert list(rig.ended) == ["premium", "free", "equal"]


def test_a_step_mixes_several_partial_prefills_and_keeps_decodes_going() -> None:
    rig = Rig(limits(max_step_tokens=16, num_blocks=64))
    rig.add("decode", [1], 30)
    rig.step()
    rig.add("long", [2] * 60, 2)
    rig.add("short", [3] * 6, 2)
    before = len(rig.outputs["decode"])
    plan = rig.scheduler.schedule(rig.now)
    assert plan.counts[0] == 1
    assert plan.total_tokens <= 2 + 8, "prefills take at most their share while decodes run"
    rig.scheduler.commit(rig.executor.execute(plan))
    rig.step()
    assert len(rig.outputs["decode"]) == before + 1
    assert rig.outputs["short"], "the shorter prefill goes first"
    assert not rig.outputs["long"]


def test_backlogged_tenants_share_evenly() -> None:
    """Weights 1 and 2: service differs by no more than the stated bound, whatever the flood."""
    rig = Rig(limits(max_seqs=2, num_blocks=64, max_step_tokens=16))
    rng = random.Random(0)
    for number in range(200):
        rig.add(f"flood{number}", [1] * rng.randint(1, 12), rng.randint(1, 12), tenant="flood")
    for number in range(60):
        prompt = [2] * rng.randint(1, 12)
        rig.add(f"calm{number}", prompt, rng.randint(1, 12), tenant="calm", weight=2.0)
    accounts = {s.tenant_counter.tenant: s.tenant_counter for s in rig.scheduler.queue}
    bound = 2 * max(12 * 1.0, 2.0 * 2 * 12)
    while {"flood", "calm"} <= {s.tenant_counter.tenant for s in rig.scheduler.queue}:
        rig.step()
        assert abs(accounts["flood"].served_tokens - accounts["calm"].served_tokens) <= bound


def test_a_returning_tenant_cannot_cash_in_its_absence() -> None:
    rig = Rig(limits(max_seqs=1))
    for number in range(10):
        rig.add(f"busy{number}", [1, 2, 3], 5, tenant="busy")
    for _ in range(20):
        rig.step()
    late = rig.add("late", [1], 1, tenant="late")
    assert late.tenant_counter.served_tokens > 0


def test_a_newcomer_does_not_lock_out_who_was_served_before() -> None:
    """Service of a time when nobody else wanted any is no debt towards those who come later."""
    rig = Rig(limits(max_seqs=1))
    for number in range(20):
        rig.add(f"early{number}", [1, 2, 3], 10, tenant="old")
    rig.run()
    for number in range(10):
        rig.add(f"new{number}", [1, 2, 3], 10, tenant="new")
    rig.step()
    rig.add("again", [1, 2, 3], 10, tenant="old")
    rig.run()
    order = list(rig.ended)
    assert order.index("again") <= order.index("new1")


def test_static_batches_run_to_their_end() -> None:
    rig = Rig(limits(max_seqs=2))
    rig.scheduler = Scheduler(rig.limits, StaticBatching())
    for name, most in (("a", 2), ("b", 10), ("c", 2)):
        rig.add(name, [1, 2], most)
    rig.run()
    assert list(rig.ended) == ["a", "b", "c"]


def test_dynamic_batches_wait_for_company_but_not_for_ever() -> None:
    rig = Rig(limits(max_seqs=2))
    rig.scheduler = Scheduler(rig.limits, DynamicBatching(batch_size=2, max_wait_s=0.05))
    rig.add("a", [1, 2], 3)
    rig.step()
    assert not rig.scheduler.running
    rig.add("b", [1, 2], 3)
    rig.step()
    assert len(rig.scheduler.running) == 2
    rig.run()
    rig.add("alone", [1], 2)
    rig.run()
    assert rig.ended["alone"] == "length"


def test_a_failed_step_costs_only_the_guilty() -> None:
    """Whoever raises alone ends; its batch mates start over and lose nothing."""
    rig = Rig(limits(num_blocks=64))
    for name in "abc":
        rig.add(name, [ord(name)] * 5, 6)
    rig.step()
    guilty = {s.id: s for s in rig.scheduler.running}["b"]
    while guilty.id not in rig.ended:
        plan = rig.scheduler.schedule(rig.now)
        if guilty.row in plan.rows and guilty.row >= 0:
            for seq in rig.scheduler.recover_failed_step():
                rig.end(seq.id, "error")
            rig.scheduler.check_invariants()
        else:
            for seq, _, token, finish in rig.scheduler.commit(rig.executor.execute(plan)):
                rig.outputs[seq.id].append(token)
                if finish:
                    rig.end(seq.id, finish)
    rig.run()
    assert rig.ended["b"] == "error"
    for name in "ac":
        assert rig.outputs[name] == reference([ord(name)] * 5, 6)


def test_a_chunk_without_valid_numbers_is_never_shared() -> None:
    rig = Rig(limits())
    rig.add("sick", [1] * 10, 3)
    rig.executor.execute(rig.scheduler.schedule(rig.now))
    (progress,) = rig.scheduler.commit(StepResult([-1], failures={0: "not finite"}))
    assert progress.finish_reason == "error"
    again = rig.add("again", [1] * 10, 3)
    rig.run()
    assert again.hit_tokens == 0


def test_steps_in_flight_overlap() -> None:
    """Planning one step ahead of the results gives the same tokens."""
    rig = Rig(limits(num_blocks=20))
    for name in "abcdef":
        rig.add(name, [ord(name)] * 7, 9)
    results = []
    while rig.scheduler.has_work:
        plan = rig.scheduler.schedule(rig.now)
        results.append(rig.executor.execute(plan))
        if len(results) < 2:
            continue
        for seq, _, token, finish in rig.scheduler.commit(results.pop(0)):
            if token >= 0:
                rig.outputs[seq.id].append(token)
            if finish:
                rig.end(seq.id, finish)
        if not rig.scheduler.has_work:
            break
    for name in "abcdef":
        assert rig.outputs[name] == reference([ord(name)] * 7, 9)


@pytest.mark.parametrize("most", [0, 1])
def test_cancelling_twice_is_harmless(most: int) -> None:
    rig = Rig(limits())
    rig.add("a", [1] * 10, 5)
    for _ in range(most):
        rig.step()
    rig.cancel("a")
    rig.cancel("a")
    assert rig.ended == {"a": "cancelled"}
    rig.run()


def test_queued_tokens_are_those_of_the_queue_and_what_running_prefills_lack() -> None:
    rig = Rig(limits(max_seqs=2, max_step_tokens=10, num_blocks=64))
    for name, length in (("a", 25), ("b", 8), ("c", 12)):
        rig.add(name, list(range(length)), 3)
    told = [rig.scheduler.queued_tokens]
    while rig.scheduler.has_work:
        rig.step()
        told.append(rig.scheduler.queued_tokens)
    assert told[:2] == [45, 35]
    assert told == sorted(told, reverse=True)
    assert told[-1] == 0
