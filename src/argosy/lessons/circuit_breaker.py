"""Lesson on the circuit breaker: replicas fail for a while, are ejected, and come back after a probe."""

from __future__ import annotations

from itertools import cycle
from typing import Annotated

import msgspec

from argosy.lessons.lesson import LessonRun, count_of, describe_parameters, slider
from argosy.policy import AttemptOutcome, Breaker, BreakerLimits, eligible_replicas

REPLICAS = ("r1", "r2", "r3", "r4")
TICK_S = 0.5
DURATION_S = 40
OUTAGE_AT_S = 3.0
REQUESTS_PER_TICK = 4


class CircuitBreakerParameters(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """Parameters of the lesson."""

    failing: Annotated[int, slider("Replicas that fail", 0, len(REPLICAS), unit="of 4")] = 1
    outage_s: Annotated[int, slider("For how long they fail", 1, 30, unit="s")] = 12
    consecutive_failures: Annotated[int, slider("Failures in a row that open a breaker", 1, 10)] = 3
    base_open_s: Annotated[int, slider("It stays open for", 1, 8, unit="s the first time")] = 2


class BreakerReplica(msgspec.Struct, frozen=True, kw_only=True):
    """State of one replica."""

    name: str
    is_failing: bool
    open_s: float | None
    """Seconds for which its breaker stays open, None while it is closed."""
    is_eligible: bool
    """Whether it may get requests."""
    sent: int
    """Requests that it has got."""
    failed: int


class CircuitBreakerFrame(msgspec.Struct, frozen=True, kw_only=True):
    """State of the pool after half a second."""

    at_s: float
    text: str
    replicas: list[BreakerReplica]


def run_circuit_breaker(parameters: CircuitBreakerParameters) -> LessonRun[CircuitBreakerFrame]:
    """Send requests to a pool in which the first replicas fail for a while."""
    limits = BreakerLimits(
        consecutive_failures=parameters.consecutive_failures,
        base_open_s=float(parameters.base_open_s),
    )
    breakers = {name: Breaker(limits) for name in REPLICAS}
    failing = set(REPLICAS[: parameters.failing])
    sent, failed = dict.fromkeys(REPLICAS, 0), dict.fromkeys(REPLICAS, 0)
    turns = cycle(REPLICAS)
    frames: list[CircuitBreakerFrame] = []
    for tick in range(int(DURATION_S / TICK_S) + 1):
        now = tick * TICK_S
        is_outage = OUTAGE_AT_S <= now < OUTAGE_AT_S + parameters.outage_s
        sentences = _explain_outage(now, parameters)
        for name, breaker in breakers.items():
            if breaker.is_probe_due(now):
                is_failure = is_outage and name in failing
                breaker.record_probe_outcome(_outcome(is_failure=is_failure), now)
                sentences.append(
                    f"The probe of {name} fails, so its breaker stays open for {_open_s(breaker, now):g} s."
                    if is_failure
                    else f"The probe of {name} succeeds, so its breaker closes."
                )
        eligible = eligible_replicas(breakers)
        for _ in range(REQUESTS_PER_TICK):
            name = next(turn for turn in turns if turn in eligible)
            is_failure = is_outage and name in failing
            sent[name] += 1
            failed[name] += is_failure
            was_closed = breakers[name].is_closed
            breakers[name].record_outcome(_outcome(is_failure=is_failure), now)
            if was_closed and not breakers[name].is_closed:
                sentences.append(
                    f"{name} has failed too often, so its breaker opens for {_open_s(breakers[name], now):g} s."
                )
                eligible = eligible_replicas(breakers)
        if any(not breakers[name].is_closed for name in eligible):
            sentences.append("Half of the pool stays in use, although more breakers are open.")
        frames.append(
            CircuitBreakerFrame(
                at_s=now,
                text=" ".join(sentences) or _explain_quiet(breakers),
                replicas=[
                    BreakerReplica(
                        name=name,
                        is_failing=is_outage and name in failing,
                        open_s=None if breaker.is_closed else _open_s(breaker, now),
                        is_eligible=name in eligible,
                        sent=sent[name],
                        failed=failed[name],
                    )
                    for name, breaker in breakers.items()
                ],
            )
        )
    result = _summarize(parameters, sum(sent.values()), sum(failed.values()))
    return LessonRun(parameters=describe_parameters(parameters), frames=frames, result=result)


def _outcome(*, is_failure: bool) -> AttemptOutcome:
    return AttemptOutcome.FAILURE if is_failure else AttemptOutcome.SUCCESS


def _open_s(breaker: Breaker, now: float) -> float:
    return max(0.0, (breaker.open_until or now) - now)


def _explain_outage(now: float, parameters: CircuitBreakerParameters) -> list[str]:
    if not parameters.failing:
        return []
    replicas = count_of(parameters.failing, "replica")
    if now == OUTAGE_AT_S:
        return [f"From now on {replicas} of 4 cannot answer requests."]
    if now == OUTAGE_AT_S + parameters.outage_s:
        return [f"{replicas} of 4 can answer again. Each waits for its next probe."]
    return []


def _explain_quiet(breakers: dict[str, Breaker]) -> str:
    is_open = [name for name, breaker in breakers.items() if not breaker.is_closed]
    if not is_open:
        return "All breakers are closed, so the replicas take turns."
    return f"The others get the requests of {' and '.join(is_open)}."


def _summarize(parameters: CircuitBreakerParameters, sent: int, failed: int) -> str:
    """Compare with turns for all replicas, whatever they answer."""
    ticks = min(parameters.outage_s, DURATION_S - OUTAGE_AT_S) / TICK_S
    without = int(ticks * REQUESTS_PER_TICK * parameters.failing / len(REPLICAS))
    return (
        f"{failed} of {sent:,} attempts failed. Without breakers, about {without} would have failed. The gateway "
        "repeats a failed attempt at another replica, so clients notice none of them while one replica answers."
    )
