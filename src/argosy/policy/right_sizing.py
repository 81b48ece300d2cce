"""Advice on the number of replicas of a model, from its requests of the last weeks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import takewhile

import msgspec

IDLE_RATIO = 0.05
"""Share of the slots below which replicas count as idle."""
MIN_IDLE_S = 2 * 3600
TARGET_RATIO = 0.6
"""Share of the slots that the busiest step may use. The rest is for bursts within it."""
MAX_RATIO = 0.9
"""Share of the slots from which the busiest step had no room for bursts."""
MIN_KNOWN_S = 86_400
"""Time with values without which nothing but idleness is known."""


class SizeVerdict(StrEnum):
    """Relation of the number of replicas to their requests."""

    IDLE = "idle"
    OVERSIZED = "oversized"
    UNDERSIZED = "undersized"
    FITS = "fits"
    UNKNOWN = "unknown"


class SizeAdvice(msgspec.Struct, frozen=True, kw_only=True):
    """Number of replicas that the requests need. Times are in seconds."""

    verdict: SizeVerdict
    advised_replicas: int
    mean_ratio: float | None = None
    """Mean share of the slots of all replicas in use. None if nothing is known."""
    peak_ratio: float | None = None
    """Share in the busiest step, with waiting requests, so that it may exceed 1."""
    idle_s: float = 0.0
    """Time up to now in which no step used `IDLE_RATIO` of the slots."""
    known_s: float = 0.0
    """Time with values."""
    reason: str


def advise_size(
    replicas: int, slots: int, concurrency: Sequence[float | None], step_s: float
) -> SizeAdvice:
    """Return how many replicas a model needs.

    A model with several replicas keeps one more than the busiest step needs, for the loss of one.

    Args:
        replicas: Replicas that serve it.
        slots: Requests that all of them run at a time.
        concurrency: Mean number of running and waiting requests per step, oldest first; None where it is not known.
        step_s: Seconds of a step.
    """
    known = [value for value in concurrency if value is not None]
    known_s = len(known) * step_s
    if not known or not replicas or not slots:
        return SizeAdvice(
            verdict=SizeVerdict.UNKNOWN,
            advised_replicas=replicas,
            reason="No replica serves the model." if known else "No requests are recorded yet.",
        )
    ratios = [None if value is None else value / slots for value in concurrency]
    mean, peak = sum(known) / len(known) / slots, max(known) / slots
    needed = max(1, math.ceil(max(known) * replicas / (slots * TARGET_RATIO)))
    idle_steps = takewhile(lambda ratio: ratio is not None and ratio < IDLE_RATIO, reversed(ratios))
    idle_s = step_s * sum(1 for _ in idle_steps)
    verdict, advised = SizeVerdict.FITS, replicas
    reason = f"The busiest {step_s / 60:.0f} minutes used {peak:.0%} of the slots."
    if idle_s >= MIN_IDLE_S:
        verdict, advised = SizeVerdict.IDLE, 0
        reason = f"Less than {IDLE_RATIO:.0%} of the slots were used for {idle_s / 3600:.0f} hours."
    elif peak > MAX_RATIO:
        verdict, advised = SizeVerdict.UNDERSIZED, max(replicas + 1, needed)
    elif known_s < MIN_KNOWN_S:
        verdict = SizeVerdict.UNKNOWN
        reason = (
            f"Only {known_s / 3600:.0f} hours are recorded; advice needs {MIN_KNOWN_S // 3600}."
        )
    elif needed + (replicas > 1) < replicas:
        verdict, advised = SizeVerdict.OVERSIZED, needed + 1
    return SizeAdvice(
        verdict=verdict,
        advised_replicas=advised,
        mean_ratio=mean,
        peak_ratio=peak,
        idle_s=idle_s,
        known_s=known_s,
        reason=reason,
    )
