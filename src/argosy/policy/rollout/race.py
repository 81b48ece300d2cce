"""Race e-process: evidence that the events of a candidate are more frequent than those of the stable version.

If both versions are alike, each event falls on the candidate with probability p, its share of the opportunities,
whatever the rate of events, its drift and its bursts. If the candidate's rate is r times as high, the probability is
q(r) = p r / (p r + 1 - p). The product of the likelihood ratios q(r) / p and (1 - q(r)) / (1 - p) is a nonnegative
martingale under equality. So it exceeds 1 / alpha with a probability of at most alpha, however often it is looked at
(Ville's inequality). The mean over some r needs no knowledge of the effect. See Lindon and Malek, "Anytime-Valid
Inference for Multinomial Count Data", NeurIPS 2022.

A product of very many factors is a `ScaledNumber`, which needs no logarithms and does not overflow: `log` and `exp`
differ in their last digit between C libraries. A mantissa and a binary exponent need only multiplications and exact
shifts, so a verdict is the same on every platform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ScaledNumber = tuple[float, int]
"""Mantissa and exponent of `mantissa * 2**exponent`, as returned by `math.frexp`."""
ONE: ScaledNumber = (0.5, 1)
_MAX_EXPONENT = 1000
MAX_VALUE = math.ldexp(1.0, _MAX_EXPONENT)
"""Largest value of `to_float`."""


def multiply(a: ScaledNumber, b: ScaledNumber) -> ScaledNumber:
    """Return the product of two scaled numbers."""
    mantissa, exponent = math.frexp(a[0] * b[0])
    return mantissa, exponent + a[1] + b[1]


def power(base: float, count: int) -> ScaledNumber:
    """Return a positive number to the power of a count."""
    result, square = ONE, math.frexp(base)
    while count:
        if count & 1:
            result = multiply(result, square)
        count >>= 1
        if count:
            square = multiply(square, square)
    return result


def to_float(number: ScaledNumber) -> float:
    """Return a scaled number as a float, at most `MAX_VALUE`."""
    return MAX_VALUE if number[1] > _MAX_EXPONENT else math.ldexp(*number)


def candidate_probability(share: float, ratio: float) -> float:
    """Return the probability that an event falls on the candidate if its rate is `ratio` times the stable one."""
    odds = share * ratio
    return odds / (odds + 1.0 - share)


def bernoulli_factor(
    null: float, alternative: float, successes: int, failures: int
) -> ScaledNumber:
    """Return the likelihood ratio of two success probabilities between 0 and 1, excluding both."""
    return multiply(
        power(alternative / null, successes),
        power((1.0 - alternative) / (1.0 - null), failures),
    )


def regression_factors(
    share: float,
    ratios: Sequence[float],
    tolerance: float,
    candidate_events: int,
    stable_events: int,
) -> list[ScaledNumber]:
    """Return the likelihood ratio of each rate ratio against "at most `tolerance` times as many".

    Args:
        share: Candidate's share of the opportunities, between 0 and 1 without both.
        ratios: Rate ratios above 1, relative to `tolerance`.
        tolerance: Largest rate ratio that is no regression.
        candidate_events: Events of the candidate.
        stable_events: Events of the stable version.
    """
    null = candidate_probability(share, tolerance)
    return [
        bernoulli_factor(
            null, candidate_probability(share, tolerance * ratio), candidate_events, stable_events
        )
        for ratio in ratios
    ]


def equivalence_factor(
    share: float, margin: float, candidate_events: int, stable_events: int
) -> ScaledNumber:
    """Return the likelihood ratio of equal rates against "at least `margin` times as many"."""
    null = candidate_probability(share, margin)
    return bernoulli_factor(null, share, candidate_events, stable_events)


def equivalence_growth(share: float, margin: float) -> float:
    """Return by how much the logarithm of `equivalence_factor` grows with an event, on average, at equal rates."""
    null = candidate_probability(share, margin)
    return share * math.log(share / null) + (1.0 - share) * math.log((1.0 - share) / (1.0 - null))


def mean_evidence(products: Sequence[ScaledNumber]) -> float:
    """Return the mean of e-values, which is an e-value whatever their dependence."""
    return sum(map(to_float, products)) / len(products)
