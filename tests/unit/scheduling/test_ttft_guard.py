"""Lower tiers stand back for a first token, within bounds, and nothing is lost by it."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field, replace
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.engine.scheduling import Scheduler, SchedulerLimits, Sequence, StepPlan, StepResult
from argosy.engine.scheduling.ttft_guard import MAX_BURST_YIELDS, YIELD_INTERVAL_STEPS
from argosy.protocol.sampling import SamplingParams

LIMITS = SchedulerLimits(
    max_seqs=32,
    max_step_tokens=1024,
    block_size=16,
    num_blocks=2000,
    max_prefill_fraction=0.25,
    watermark=0.01,
    prefix_cache=False,
    ridge_tokens=24,
)
NEVER_STAND_BACK = 1 << 60
"""As a ridge: no step is ever worth a pass over the weights."""


@dataclass
class Engine:
    """A scheduler whose steps cost time as on a CPU: a pass over the weights, and then by the token."""

    limits: SchedulerLimits
    now: float = 0.0
    scheduler: Scheduler = field(init=False)
    last: dict[str, float] = field(default_factory=dict)
    """When each request came, or had its latest token."""
    waits: dict[int, list[float]] = field(default_factory=dict)
    """Tier -> seconds to first tokens."""
    generated: int = 0
    ended: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)

    def add(self, tier: int, prompt: int, output: int) -> Sequence:
        name = str(len(self.last))
        self.last[name] = self.now
        return self.scheduler.add(
            id=name,
            prompt=[1] * prompt,
            params=SamplingParams(max_tokens=output),
            now=self.now,
            tier=tier,
            tenant=str(tier),
        )

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now)
        decodes = plan.counts.count(1)
        self.now += 1.35e-3 + 0.0865e-3 * decodes + 0.053e-3 * (plan.total_tokens - decodes)
        result = StepResult([5 if samples else -1 for samples in plan.sample_flags])
        for seq, _, token, finish in self.scheduler.commit(result):
            self.generated += token >= 0
            if token >= 0 and seq.output_len == 1:
                self.waits.setdefault(seq.tier, []).append(self.now - self.last[seq.id])
            if finish:
                self.ended.append(seq)
        return plan


def test_a_first_token_comes_in_a_step_of_its_own() -> None:
    engine = Engine(LIMITS)
    standard = [engine.add(1, 20, 50) for _ in range(20)]
    for _ in range(3):
        engine.step()
    premium, late = engine.add(0, 20, 50), engine.add(1, 20, 50)
    plan = engine.step()
    assert plan.rows == [premium.row]
    assert premium.is_prefilled
    assert late.row < 0, "nobody of a lower tier joins in that step"
    plan = engine.step()
    assert sorted(plan.rows) == sorted(seq.row for seq in (premium, late, *standard))


def test_a_first_token_under_way_is_waited_for_by_nobody() -> None:
    engine = Engine(LIMITS)
    for _ in range(20):
        engine.add(1, 20, 50)
    engine.step()
    engine.add(0, 20, 50)
    plans = [engine.scheduler.schedule(engine.now) for _ in range(2)]
    assert [len(plan.rows) for plan in plans] == [1, 21]


def test_nobody_stands_back_for_its_own_tier() -> None:
    engine = Engine(LIMITS)
    for _ in range(20):
        engine.add(1, 20, 50)
    engine.step()
    engine.add(1, 20, 50)
    assert len(engine.step().rows) == 21


def test_nobody_stands_back_where_it_gains_little() -> None:
    """A few decodes cost less than a pass over the weights, or are little beside a long prompt."""
    for standard, prompt in ((8, 20), (28, 2000)):
        engine = Engine(LIMITS)
        for _ in range(standard):
            engine.add(1, 20, 50)
        engine.step()
        engine.add(0, prompt, 50)
        assert len(engine.step().rows) == standard + 1


def test_a_step_of_first_tokens_alone_is_no_longer_than_others() -> None:
    """What stands back waits for one share of prefills, not for a whole step of them."""
    engine = Engine(LIMITS)
    for _ in range(28):
        engine.add(2, 20, 50)
    engine.step()
    long = [engine.add(0, 120, 50) for _ in range(2)] + [engine.add(1, 900, 50)]
    plan = engine.step()
    assert plan.rows == [seq.row for seq in long[:2]]
    assert plan.total_tokens <= 1 + LIMITS.max_prefill_fraction * LIMITS.max_step_tokens


def test_prefills_of_higher_tiers_go_first_until_others_have_waited_long() -> None:
    engine = Engine(replace(LIMITS, max_step_tokens=64, ridge_tokens=NEVER_STAND_BACK))
    old = engine.add(1, 5000, 2)
    engine.step()
    premium = engine.add(0, 6000, 2)
    engine.step()
    before = old.computed_len
    while not premium.is_prefilled:
        assert old.computed_len == before
        engine.step()
    for step in range(1500):  # more premium prompts than can be computed, for 150 s
        engine.now += 0.1
        if step % 5 == 0:
            engine.add(0, 100, 2)
        engine.step()
    assert old in engine.ended


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 40)),
        min_size=5,
        max_size=120,
    ),
    st.integers(0, 30),
)
def test_who_stands_back_does_so_seldom(
    arrivals: list[tuple[int, int, int]], ridge_tokens: int
) -> None:
    """In any n steps at most BURST + n / EACH leave out a decode that could have gone on."""
    engine = Engine(replace(LIMITS, max_step_tokens=128, ridge_tokens=ridge_tokens))
    left_out = [0]
    coming = arrivals[::-1]
    while engine.scheduler.has_work or coming:
        for _ in range(min(2, len(coming))):
            engine.add(*coming.pop())
        due = [seq for seq in engine.scheduler.running if seq.length - seq.computed_len == 1]
        rows = [(seq, seq.row) for seq in due]
        plan = engine.step()
        engine.scheduler.check_invariants()
        assert plan.rows, "a step that computes nothing"
        left_out.append(any(row not in plan.rows for seq, row in rows if seq.row == row))
    sums = list(accumulate(left_out))
    for begin in range(len(sums)):
        for end in range(begin + 1, len(sums)):
            assert (
                sums[end] - sums[begin] <= MAX_BURST_YIELDS + (end - begin) / YIELD_INTERVAL_STEPS
            )
    assert len(engine.ended) == len(arrivals)


def flooded(ridge_tokens: int) -> Engine:
    """Ten seconds with 28 standard requests all the time, and premium ones, eight a second."""
    engine = Engine(replace(LIMITS, ridge_tokens=ridge_tokens))
    rng, due = random.Random(0), 0.1
    for _ in range(28):
        engine.add(1, 20, rng.randint(16, 64))
    while engine.now < 10.0:
        if due <= engine.now:
            engine.add(0, 20, 16)
            due += rng.expovariate(8.0)
        engine.step()
        while engine.ended:
            if engine.ended.pop().tier == 1:
                engine.add(1, 20, rng.randint(16, 64))
    return engine


def test_premium_first_tokens_in_a_flood_come_sooner_at_hardly_any_cost() -> None:
    with_, without = flooded(LIMITS.ridge_tokens), flooded(NEVER_STAND_BACK)
    p95 = [statistics.quantiles(engine.waits[0], n=20)[-1] for engine in (with_, without)]
    rates = [engine.generated / engine.now for engine in (with_, without)]
    assert p95[0] < 0.75 * p95[1]
    assert rates[0] > 0.97 * rates[1]
