"""Gate of a rollout: exact e-values, missing data, restarts, and what must not look like a regression."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from random import Random

import msgspec
import pytest
from benchmarks import rollouts as simulation
from hypothesis import given
from hypothesis import strategies as st

from argosy.policy.rollout import (
    EVENTS,
    Arm,
    Baseline,
    BaselineRecorder,
    EventCell,
    GateRecord,
    GateResult,
    GateSettings,
    Metric,
    MetricRule,
    OutcomeAggregator,
    OutcomeBatch,
    OutcomeStatus,
    RequestOutcome,
    RolloutGate,
    UserHistory,
    UserRates,
)
from argosy.policy.rollout.baseline import QuantileSketch, user_name
from argosy.policy.rollout.race import (
    candidate_probability,
    equivalence_factor,
    regression_factors,
)
from argosy.policy.scaled_number import MAX_VALUE, power, to_float

PROBABILITIES = st.floats(0.01, 0.99)
RATIOS = GateSettings().ratios
NOW = 1000.0


@given(st.floats(0.01, 60.0), st.integers(0, 5000))
def test_powers_are_exact_to_rounding_at_any_size(base: float, count: int) -> None:
    mantissa, exponent = power(base, count)
    exact = Fraction(base) ** count
    got = Fraction(mantissa) * Fraction(2) ** exponent
    assert abs(got / exact - 1) < 1e-12
    assert to_float((mantissa, exponent)) <= MAX_VALUE


@given(PROBABILITIES, st.floats(1.0, 2.0), PROBABILITIES)
def test_evidence_has_a_mean_of_at_most_one_under_its_hypothesis(
    share: float, tolerance: float, part: float
) -> None:
    """The mean over one event is at most 1 if the candidate is at most as bad as tolerated, or at least the margin."""
    null = candidate_probability(share, tolerance)
    on_candidate = regression_factors(share, RATIOS, tolerance, 1, 0)
    on_stable = regression_factors(share, RATIOS, tolerance, 0, 1)
    for up, down in zip(on_candidate, on_stable, strict=True):
        assert null * to_float(up) + (1 - null) * to_float(down) == pytest.approx(1.0)
        better = null * part
        assert better * to_float(up) + (1 - better) * to_float(down) <= 1.0 + 1e-9
    margin = tolerance + 1.0
    worse = 1.0 - (1.0 - candidate_probability(share, margin)) * part
    mean = worse * to_float(equivalence_factor(share, margin, 1, 0))
    assert mean + (1.0 - worse) * to_float(equivalence_factor(share, margin, 0, 1)) <= 1.0 + 1e-9


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_counts_within_a_batch_are_no_stronger_evidence_than_single_events(
    candidate: int, stable: int, data: st.DataObject
) -> None:
    """Events are drawn without replacement from the requests of a batch, which varies less than a binomial."""
    total = candidate + stable
    events = data.draw(st.integers(0, total))
    share = candidate / total
    mean = 0.0
    for on_candidate in range(max(0, events - stable), min(events, candidate) + 1):
        ways = math.comb(candidate, on_candidate) * math.comb(stable, events - on_candidate)
        factor = regression_factors(share, (4.0,), 1.0, on_candidate, events - on_candidate)[0]
        mean += ways / math.comb(total, events) * to_float(factor)
    assert mean <= 1.0 + 1e-9


@given(st.lists(st.floats(1e-3, 1e3), min_size=1), st.floats(0.01, 1.0))
def test_sketch_quantile_is_at_most_a_bucket_above(values: list[float], fraction: float) -> None:
    sketch = QuantileSketch()
    for value in values:
        sketch.add(value)
    exact = sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]
    assert exact < sketch.quantile(fraction) <= exact * (1 + 1 / 16)


def cell(event: Metric, candidate: int, stable: int, share: float = 0.5) -> EventCell:
    index = next(i for i, each in enumerate(EVENTS) if each.metric is event)
    return EventCell(
        event=index,
        candidate_expected=1000 * share,
        stable_expected=1000 * (1 - share),
        candidate_events=candidate,
        stable_events=stable,
    )


def batch(sequence: int, *cells: EventCell, **fields: object) -> OutcomeBatch:
    full = OutcomeBatch(
        rollout="r",
        step=0,
        gateway="g",
        sequence=sequence,
        ended_at=NOW,
        cells=cells,
        candidate_requests=500,
        stable_requests=500,
    )
    return msgspec.structs.replace(full, **fields)


def open_gate(share: float = 0.5, **fields: object) -> RolloutGate:
    gate = RolloutGate.start("r", msgspec.structs.replace(GateSettings(), **fields), 5)
    gate.open_step(0, share, NOW)
    return gate


EQUAL = [cell(metric, 5, 5) for metric in Metric]
ALL_EQUAL = [
    EventCell(
        event=index,
        candidate_expected=500.0,
        stable_expected=500.0,
        candidate_events=60,
        stable_events=60,
    )
    for index in range(len(EVENTS))
]


def test_equal_versions_are_promoted_once_the_evidence_suffices() -> None:
    gate = open_gate()
    gate.add(batch(1, *EQUAL, ended_at=NOW + 60.0))
    early = gate.verdict(NOW + 60.0)
    assert early.result is GateResult.INCONCLUSIVE
    assert early.reason.startswith("not enough evidence yet: 500 of about 7300 requests of the new")
    assert "about 14 min left at this rate (errors, refusals" in early.reason
    for sequence in range(2, 5):
        gate.add(batch(sequence, *ALL_EQUAL))
    assert gate.verdict(NOW).result is GateResult.PROMOTE
    gate.open_step(1, 0.5, NOW)
    assert gate.verdict(NOW).result is GateResult.INCONCLUSIVE


@pytest.mark.parametrize(("events", "share"), [(20, 0.5), (40, 0.05), (8, 0.25)])
def test_estimate_of_needed_requests_holds_if_the_versions_are_alike(
    events: int, share: float
) -> None:
    gate, estimates = open_gate(share), dict[Metric, int]()
    counts = round(events * share), events - round(events * share)
    cells = [
        msgspec.structs.replace(cell(each.metric, *counts, share), event=index)
        for index, each in enumerate(EVENTS)
        if each.decides_promotion
    ]
    for sequence in range(1, 100):
        gate.add(batch(sequence, *cells))
        verdict = gate.verdict(NOW)
        for each in verdict.metrics:
            if sequence == 1:
                assert each.requests_needed is not None
                estimates[each.metric] = each.requests_needed
            if each.has_passed and (estimate := estimates.pop(each.metric, None)):
                assert abs(estimate - verdict.candidate_requests) <= 500
    assert not estimates


@pytest.mark.parametrize(
    ("batches", "now", "reason"),
    [
        pytest.param([], NOW, "no gateway has reported", id="no-report"),
        pytest.param(
            [batch(1, candidate_requests=0, stable_requests=0)],
            NOW,
            "the candidate has had no request",
            id="no-traffic",
        ),
        pytest.param([batch(1, *ALL_EQUAL)], NOW + 76.0, "no measurement for 76 s", id="stale"),
        pytest.param([batch(1, *ALL_EQUAL)], math.nan, "no measurement for nan s", id="clock"),
        pytest.param(
            [batch(1, cell(Metric.ERRORS, 1, 1, math.nan))],
            NOW,
            "all measurements of this step are invalid",
            id="nan",
        ),
        pytest.param(
            [batch(1, cell(Metric.ERRORS, -1, 1))], NOW, "all measurements", id="negative"
        ),
        pytest.param(
            [batch(1, *ALL_EQUAL), batch(2, ended_at=math.inf)], NOW, "500 of 1500", id="infinite"
        ),
        pytest.param(
            [batch(1, *ALL_EQUAL, invalid_requests=50)], NOW, "50 of 1050", id="some-invalid"
        ),
        pytest.param([batch(1)], NOW, "not enough evidence", id="no-events"),
        pytest.param(
            [batch(1, *ALL_EQUAL, step=3)], NOW, "no gateway has reported", id="other-step"
        ),
    ],
)
def test_missing_data_is_inconclusive_whatever_its_cause(
    batches: list[OutcomeBatch], now: float, reason: str
) -> None:
    """Invariant 4; complaints 1 to 4."""
    gate = open_gate()
    for each in batches:
        gate.add(each)
    verdict = gate.verdict(now)
    assert verdict.result is GateResult.INCONCLUSIVE
    assert reason in verdict.reason


@pytest.mark.parametrize(
    ("cells", "metric"),
    [
        pytest.param([cell(Metric.ERRORS, 18, 0)], "errors", id="no-error-in-control"),
        pytest.param([cell(Metric.ERRORS, 6, 0, 0.05)], "errors", id="every-request-fails"),
        pytest.param([cell(Metric.TTFT, 400, 250)], "ttft", id="spikes-in-30-percent"),
        pytest.param([cell(Metric.REFUSALS, 45, 5)], "refusals", id="refusals"),
    ],
)
def test_regressions_are_found(cells: list[EventCell], metric: str) -> None:
    """Complaint 5."""
    gate = open_gate()
    gate.add(batch(1, *cells))
    verdict = gate.verdict(NOW + 1e6)
    assert verdict.result is GateResult.ROLL_BACK
    assert verdict.reason.startswith(f"{metric} is worse than in the stable version")
    gate.open_step(1, 0.5, NOW)
    for sequence in range(2, 20):
        gate.add(batch(sequence, cell(Metric.ERRORS, 0, 40), step=1))
    assert gate.verdict(NOW).result is GateResult.ROLL_BACK


@pytest.mark.parametrize(
    ("slow", "result"), [(24, GateResult.INCONCLUSIVE), (60, GateResult.ROLL_BACK)]
)
def test_slow_answers_count_from_the_measured_rate_on(slow: int, result: GateResult) -> None:
    """The baseline is that of a busier hour, in which 5 % were slower. The stable version has no slow answer now."""
    event = EVENTS.index(next(each for each in EVENTS if each[:2] == (Metric.TTFT, 0.95)))
    gate = open_gate()
    gate.add(batch(1, msgspec.structs.replace(cell(Metric.TTFT, slow, 0), event=event)))
    assert gate.verdict(NOW).result is result


@given(
    st.lists(
        st.tuples(st.sampled_from(Metric), st.integers(0, 9), st.integers(0, 9), PROBABILITIES),
        max_size=6,
    ),
    st.integers(0, 6),
)
def test_new_controller_continues_with_the_same_evidence(
    counts: list[tuple[Metric, int, int, float]], restart: int
) -> None:
    """Invariant 5: the inputs of a verdict are stored. A batch that is sent twice counts once."""
    gates = [open_gate(max_miss_rate=0.05), open_gate(max_miss_rate=0.05)]
    for number, count in enumerate(counts, 1):
        sent = batch(number, cell(*count))
        assert gates[0].add(sent)
        if number == restart:
            encoded = msgspec.json.encode(gates[1].record)
            gates[1] = RolloutGate(msgspec.json.decode(encoded, type=GateRecord))
        gates[1].add(sent)
        assert not gates[1].add(sent)
    assert not gates[0].add(msgspec.structs.replace(batch(99), rollout="other"))
    assert gates[0].verdict(NOW) == gates[1].verdict(NOW)
    assert gates[0].record == gates[1].record


@pytest.mark.parametrize(
    ("requests", "misses", "baseline", "result"),
    [
        (400, 0, 0.0, GateResult.PROMOTE),
        (50, 0, 0.0, GateResult.INCONCLUSIVE),
        (400, 60, 0.0, GateResult.ROLL_BACK),
        (400, 60, 0.15, GateResult.INCONCLUSIVE),
    ],
)
def test_candidate_without_control_is_judged_by_the_objective(
    requests: int, misses: int, baseline: float, result: GateResult
) -> None:
    gate = RolloutGate.start("r", GateSettings(max_miss_rate=0.02), 5, baseline)
    gate.open_step(0, 1.0, NOW)
    gate.add(batch(1, candidate_requests=requests, stable_requests=0, candidate_misses=misses))
    assert gate.verdict(NOW).result is result


def test_metrics_that_passed_a_step_need_no_control_at_the_end() -> None:
    gate = open_gate()
    for sequence in range(1, 5):
        gate.add(batch(sequence, *ALL_EQUAL))
    gate.open_step(1, 1.0, NOW)
    assert gate.verdict(NOW).result is GateResult.INCONCLUSIVE
    gate.add(batch(9, step=1, stable_requests=0))
    assert gate.verdict(NOW).result is GateResult.PROMOTE


def outcome(arm: Arm, number: int = 0, /, **fields: object) -> RequestOutcome:
    usual = RequestOutcome(
        arm=arm,
        key=("t", f"u{number}"),
        status=OutcomeStatus.COMPLETED,
        age_s=1.0,
        ttft_s=0.1,
        output_tokens=20,
        uncached_tokens=100,
        in_flight=3,
    )
    return msgspec.structs.replace(usual, **fields)


def run_gate(
    outcomes: list[RequestOutcome], baseline: Baseline, rates: UserRates, share: float = 0.5
) -> GateResult:
    gate = open_gate(share)
    aggregator = OutcomeAggregator("r", 0, "g", baseline, rates)
    for number, each in enumerate(outcomes):
        aggregator.record(each)
        taken = aggregator.take_batch(NOW + number * 0.1)
        if taken is not None:
            gate.add(taken)
    return gate.verdict(NOW).result


def test_cold_cache_is_no_regression_but_a_slow_candidate_is() -> None:
    random = Random(3)

    def requests(arm: Arm, miss_rate: float, factor: float) -> list[RequestOutcome]:
        drawn = []
        for _ in range(2_000):
            uncached = 2_000 if random.random() < miss_rate else 200
            ttft_s = factor * uncached / 8_000 * random.lognormvariate(0.0, 0.5)
            drawn.append(outcome(arm, uncached_tokens=uncached, ttft_s=ttft_s, age_s=ttft_s + 1.0))
        return drawn

    recorder = BaselineRecorder()
    for each in requests(Arm.STABLE, 0.3, 1.0):
        recorder.record(each)
    baseline = recorder.freeze()
    results = []
    for miss_rate, factor in ((0.9, 1.0), (0.3, 1.5)):
        mixed = requests(Arm.STABLE, 0.3, 1.0) + requests(Arm.CANDIDATE, miss_rate, factor)
        random.shuffle(mixed)
        results.append(run_gate(mixed, baseline, UserRates()) is GateResult.ROLL_BACK)
    assert results == [False, True]


@pytest.mark.parametrize(
    ("max_ttft_s", "factor", "is_worse"),
    [(None, 1.02, False), (None, 1.2, True), (3.0, 1.2, False), (3.0, 2.0, True)],
)
def test_slowdown_that_does_not_matter_is_no_regression(
    max_ttft_s: float | None, factor: float, is_worse: bool
) -> None:
    """Where times hardly vary, half of the requests of a slightly slower version exceed any quantile."""
    random = Random(4)

    def requests(arm: Arm, factor: float) -> list[RequestOutcome]:
        times = [factor * random.uniform(0.099, 0.101) for _ in range(1_000)]
        return [outcome(arm, ttft_s=time_s, age_s=time_s + 1.0) for time_s in times]

    recorder = BaselineRecorder()
    for each in requests(Arm.STABLE, 1.0):
        recorder.record(each)
    mixed = requests(Arm.STABLE, 1.0) + requests(Arm.CANDIDATE, factor)
    random.shuffle(mixed)
    result = run_gate(mixed, recorder.freeze(max_ttft_s), UserRates())
    assert (result is GateResult.ROLL_BACK) is is_worse


@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        (0, [GateResult.INCONCLUSIVE, GateResult.PROMOTE]),
        (20, [GateResult.INCONCLUSIVE, GateResult.PROMOTE]),
        (30, [GateResult.ROLL_BACK, GateResult.ROLL_BACK]),
    ],
)
def test_latency_with_few_events_passes_by_the_objective(
    slow: int, expected: list[GateResult]
) -> None:
    """Few are no more than the stable version had before: 5 % of the requests exceed the 95 % quantile."""
    events = [each for each in ALL_EQUAL if EVENTS[each.event].metric is not Metric.TPOT]
    decisive = next(
        index
        for index, each in enumerate(EVENTS)
        if each.metric is Metric.TPOT and each.decides_promotion
    )
    events.append(msgspec.structs.replace(cell(Metric.TPOT, slow, 0), event=decisive))
    results = []
    for max_miss_rate in (None, 0.05):
        gate = open_gate(max_miss_rate=max_miss_rate)
        for sequence in range(1, 5):
            gate.add(batch(sequence, *events))
        results.append(gate.verdict(NOW).result)
    assert results == expected


def test_heavy_user_with_many_errors_is_no_regression() -> None:
    history = UserHistory(Baseline())
    stream = [
        outcome(
            Arm.CANDIDATE if number % 5 == 0 else Arm.STABLE,
            number % 5,
            status=OutcomeStatus.FAILED if number % 25 == 0 else OutcomeStatus.COMPLETED,
        )
        for number in range(2_000)
    ]
    for each in stream:
        history.record(msgspec.structs.replace(each, arm=Arm.STABLE))
    rates = history.freeze()
    assert rates.expected(("t", "u0"), 0) > 10 * rates.expected(("t", "u1"), 0)
    assert run_gate(stream, Baseline(), UserRates(), 0.2) is GateResult.ROLL_BACK
    assert run_gate(stream, Baseline(), rates, 0.2) is not GateResult.ROLL_BACK


def test_history_is_bounded_and_keeps_heavy_users() -> None:
    history = UserHistory(Baseline(), max_users=10)
    for number in range(300):
        history.record(outcome(Arm.STABLE, 0 if number % 2 else number))
    rates = history.freeze()
    assert len(rates.users) <= 10
    assert user_name(("t", "u0")) in rates.users
    assert UserHistory(Baseline()).freeze() == UserRates()


@pytest.mark.parametrize(
    ("fields", "event", "occurred"),
    [
        ({"status": OutcomeStatus.RUNNING, "ttft_s": None, "age_s": 9.0}, 4, True),
        ({"status": OutcomeStatus.RUNNING, "ttft_s": None, "age_s": 0.0}, 4, None),
        ({"status": OutcomeStatus.RUNNING, "output_tokens": 1}, 8, False),
        ({"status": OutcomeStatus.RUNNING, "output_tokens": 900}, 11, True),
        ({"status": OutcomeStatus.CANCELLED, "output_tokens": 1}, 8, None),
        ({"status": OutcomeStatus.CANCELLED}, 0, None),
        ({"status": OutcomeStatus.FAILED, "ttft_s": None, "age_s": 0.01}, 0, True),
        ({"status": OutcomeStatus.REFUSED}, 1, True),
        ({"output_tokens": 1}, 8, True),
        ({"output_tokens": 1}, 5, None),
        ({"age_s": 99.0}, 7, True),
    ],
)
def test_requests_are_scored_at_a_fixed_age(
    fields: dict[str, object], event: int, occurred: bool | None
) -> None:
    recorder = BaselineRecorder()
    for _ in range(200):
        recorder.record(outcome(Arm.STABLE))
    baseline = recorder.freeze()
    assert baseline.scoring_age_s == 60.0
    aggregator = OutcomeAggregator("r", 0, "g", baseline, UserRates())
    aggregator.record(outcome(Arm.CANDIDATE, **fields))
    taken = aggregator.take_batch(NOW, force=True)
    assert taken is not None
    counted = {each.event: bool(each.candidate_events) for each in taken.cells}
    assert counted.get(event) is occurred


@pytest.mark.parametrize(
    "fields",
    [{"ttft_s": math.nan}, {"age_s": math.inf}, {"age_s": -1.0}, {"output_tokens": -1}],
    ids=str,
)
def test_measurements_that_are_no_numbers_count_as_missing(fields: dict[str, object]) -> None:
    aggregator = OutcomeAggregator("r", 0, "g", Baseline(), UserRates())
    assert aggregator.take_batch(NOW) is None
    aggregator.record(outcome(Arm.CANDIDATE, **fields))
    taken = aggregator.take_batch(NOW + 30.0)
    assert taken is not None
    assert (taken.invalid_requests, taken.candidate_requests, taken.cells) == (1, 0, ())


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: MetricRule(tolerance=0.9), "at least 1"),
        (lambda: MetricRule(tolerance=2.0), "larger than tolerance"),
        (lambda: GateSettings(ratios=(1.0,)), "above 1"),
        (lambda: GateSettings(rules={}), "at least one metric"),
        (lambda: QuantileSketch().quantile(0.5), "call add first"),
    ],
    ids=["tolerance", "margin", "ratios", "rules", "sketch"],
)
def test_invalid_settings_are_refused(create: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create()


@pytest.mark.parametrize(
    "name",
    [
        "identical",
        *list(simulation.CHANGES)[::2],
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in list(simulation.CHANGES)[1::2]
        ),
    ],
)
def test_simulated_rollouts_go_back_from_worse_versions_only(name: str) -> None:
    """A small part of `benchmarks.rollouts`, whose results have the rates."""
    change = simulation.CHANGES.get(name, simulation.Change())
    seeds = (11, 12) if name == "identical" else (11,)
    results = [simulation.simulate(seed, change, GateSettings()) for seed in seeds]
    assert {bool(each.reason) for each in results} == {name != "identical"}, results
