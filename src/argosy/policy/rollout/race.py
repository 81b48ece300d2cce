"""Race e-process: evidence that the events of a candidate are more frequent than those of the stable version.

If both versions are alike, each event falls on the candidate with probability p, its share of the opportunities,
whatever the rate of events, its drift and its bursts. If the candidate's rate is r times as high, the probability is
q(r) = p r / (p r + 1 - p). The product of the likelihood ratios q(r) / p and (1 - q(r)) / (1 - p) is a nonnegative
martingale under equality. So it exceeds 1 / alpha with a probability of at most alpha, however often it is looked at
(Ville's inequality). The mean over some r needs no knowledge of the effect. See Lindon and Malek, "Anytime-Valid
Inference for Multinomial Count Data", NeurIPS 2022.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from argosy.policy.scaled_number import ScaledNumber, multiply, power, to_float


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
