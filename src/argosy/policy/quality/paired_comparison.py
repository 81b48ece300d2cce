"""Paired comparison: evidence that a candidate scores lower than a baseline on the same items, by betting.

An observation is the difference of both scores of an item, candidate minus baseline, between -1 and 1. To doubt that
the mean is at most m, a bettor multiplies 1 + c (x - m) / (1 + m) for each observation x. If the doubt is wrong, the
product is a nonnegative supermartingale. So it exceeds 1 / alpha with a probability of at most alpha, however often it
is looked at. The mean over some stakes c needs no knowledge of the effect. See Waudby-Smith and Ramdas, "Estimating
means of bounded random variables by betting", JRSS B 2024.

A comparison of a size that was fixed before has a final look too. If two versions are alike, each difference is as
likely as its opposite. So the probability that random signs lead to such a loss is a p-value, the sign test for binary
scores. The looks on the way may err with 0.2 %, and the final one with 0.8 %: together 1 %.

With binary scores this is the race e-process of rollouts with equal shares (p = 1/2). Only items on which the versions
differ count, and the stake (r - 1) / (r + 1) bets on r losses for each win.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from argosy.policy.rollout.race import mean_evidence
from argosy.policy.scaled_number import ONE, multiply, power

WORSE_EVIDENCE = 500.0
"""Evidence from which a candidate is worse. One in 500 comparisons of equal versions reaches it at most."""
FINAL_ERROR = 0.008
"""Probability up to which the final look finds equal versions to be worse."""
MAX_FINAL_CLUSTERS = 2000
"""Discordant clusters up to which there is a final look. With more, the evidence suffices."""
_GRID = 20
"""Parts of 1 to which differences are rounded for it."""
NOT_WORSE_EVIDENCE = 20.0
"""Evidence from which a candidate is not worse than the margin."""
_INTERVAL_EVIDENCE = 40.0
"""Evidence against a mean from which it lies outside of a two-sided 95 % interval."""
_STAKES = (0.1, 0.25, 0.45, 0.7)
_BISECTIONS = 20
_STEPS = 200
"""Losses that `find_detectable_loss` tries."""
_DIGITS = 6


class QualityVerdict(enum.StrEnum):
    """Result of a comparison."""

    WORSE = "worse"
    NOT_WORSE = "not_worse"
    """Its loss is smaller than the margin."""
    UNDECIDED = "undecided"


class QualityComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a paired comparison. Scores and their differences are parts of 1; a loss is negative."""

    verdict: QualityVerdict
    clusters: int
    """Independent observations: items that share a cluster count once."""
    wins: int
    """Clusters in which the candidate scores higher."""
    losses: int
    difference: float
    """Mean score of the candidate minus that of the baseline."""
    lower: float
    """Lower bound of the 95 % interval of the difference, which holds however often it is looked at."""
    upper: float
    margin: float
    """Loss that counts as none."""
    worse_evidence: float
    not_worse_evidence: float
    worse_p: float | None = None
    """Probability of such a loss between equal versions, at the final look. None before it."""
    detectable_loss: float | None
    """Smallest loss that a comparison of this size and share of discordant clusters finds about every second time.
    None if not even a total loss would be found."""

    @property
    def discordant(self) -> int:
        """Clusters in which the scores differ."""
        return self.wins + self.losses


class PairedComparison:
    """Collects the differences of clusters in a fixed order, and can be looked at after each.

    Args:
        margin: Loss that counts as none, at least 0 and less than 1.
    """

    def __init__(self, margin: float) -> None:
        self._margin = margin
        self._differences: Counter[float] = Counter()
        self._worse = _Bet(0.0)
        self._not_worse = _Bet(-margin)
        self._verdict = QualityVerdict.UNDECIDED
        self._worse_p: float | None = None

    @property
    def verdict(self) -> QualityVerdict:
        """First verdict for which there was enough evidence."""
        return self._verdict

    def add(self, differences: Sequence[float]) -> None:
        """Count a cluster with the differences of its items, each candidate minus baseline, between -1 and 1."""
        difference = round(math.fsum(differences) / len(differences), _DIGITS)
        self._differences[difference] += 1
        self._worse.add(-difference)
        self._not_worse.add(difference)
        if self._verdict is not QualityVerdict.UNDECIDED:
            return
        if self._worse.evidence >= WORSE_EVIDENCE:
            self._verdict = QualityVerdict.WORSE
        elif self._not_worse.evidence >= NOT_WORSE_EVIDENCE:
            self._verdict = QualityVerdict.NOT_WORSE

    def finish(self) -> None:
        """Take the final look. Call it once, after a number of clusters that was fixed before the first one."""
        self._worse_p = _test_signs(self._differences)
        is_open = self._verdict is QualityVerdict.UNDECIDED
        if is_open and self._worse_p is not None and self._worse_p <= FINAL_ERROR:
            self._verdict = QualityVerdict.WORSE

    def summarize(self) -> QualityComparison:
        """Return the figures so far."""
        counts = self._differences
        clusters = counts.total()
        wins, losses = (
            sum(n for value, n in counts.items() if sign * value > 0) for sign in (1, -1)
        )
        negated = {-value: n for value, n in counts.items()}
        total = math.fsum(value * n for value, n in counts.items())
        return QualityComparison(
            verdict=self._verdict,
            clusters=clusters,
            wins=wins,
            losses=losses,
            difference=round(total / clusters, _DIGITS) if clusters else 0.0,
            lower=_find_lower_bound(counts),
            upper=-_find_lower_bound(negated),
            margin=self._margin,
            worse_evidence=self._worse.evidence,
            not_worse_evidence=self._not_worse.evidence,
            worse_p=self._worse_p,
            detectable_loss=find_detectable_loss(clusters, wins + losses),
        )


class _Bet:
    """Bets of all stakes that the mean of observations is above `mean`."""

    def __init__(self, mean: float) -> None:
        self._mean = mean
        self._products = [ONE] * len(_STAKES)
        self.evidence = 1.0

    def add(self, observation: float, count: int = 1) -> None:
        """Count an observation between -1 and 1."""
        gain = (observation - self._mean) / (1.0 + self._mean)
        self._products = [
            multiply(product, power(1.0 + stake * gain, count))
            for product, stake in zip(self._products, _STAKES, strict=True)
        ]
        self.evidence = mean_evidence(self._products)


def _test_signs(differences: Mapping[float, int]) -> float | None:
    """Return the probability that differences with random signs have a sum so low; None if there are too many."""
    steps = Counter[int]()
    for value, count in differences.items():
        steps[round(value * _GRID)] += count
    del steps[0]
    if steps.total() > MAX_FINAL_CLUSTERS:
        return None
    unit = math.gcd(*steps) or 1
    loss = -sum(step * count for step, count in steps.items()) // unit
    probabilities = np.ones(1)
    for step, count in steps.items():
        for _ in range(count):
            gap = np.zeros(2 * abs(step) // unit)
            down, up = np.concatenate([probabilities, gap]), np.concatenate([gap, probabilities])
            probabilities = (down + up) / 2.0
    # The position i has the sum i - n / 2 of n + 1 positions.
    lowest = (len(probabilities) - 1) // 2 + loss
    return min(1.0, math.fsum(probabilities[lowest:].tolist()))


def _find_lower_bound(counts: Mapping[float, int]) -> float:
    """Return the largest mean that the observations exclude from below, by bisection: the evidence falls with it."""
    low, high = -1.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        bet = _Bet(middle)
        for value, count in sorted(counts.items()):
            bet.add(value, count)
        if bet.evidence >= _INTERVAL_EVIDENCE:
            low = middle
        else:
            high = middle
    return round(low, _DIGITS)


def find_detectable_loss(clusters: int, discordant: int) -> float | None:
    """Return the smallest loss whose expected wins and losses are evidence of a worse candidate; None without any.

    Args:
        clusters: Number of clusters.
        discordant: Number of those in which binary scores differ.
    """
    for step in range(1, _STEPS + 1):
        loss = step / _STEPS
        differing = max(discordant, loss * clusters)
        bet = _Bet(0.0)
        bet.add(1.0, round((differing + loss * clusters) / 2.0))
        bet.add(-1.0, round((differing - loss * clusters) / 2.0))
        counts = {sign: round((differing - sign * loss * clusters) / 2.0) for sign in (-1.0, 1.0)}
        if bet.evidence >= WORSE_EVIDENCE or (_test_signs(counts) or 1.0) <= FINAL_ERROR:
            return loss
    return None
