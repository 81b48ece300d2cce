"""Comparison of sampled answers of two versions, which answered different requests, by the race of rollouts.

If both versions fail alike, each failed answer falls on the candidate with the probability of its part of the samples.
Given both totals, the number that falls on it varies less than with independent draws. So the evidence is an e-value.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from argosy.policy.quality.paired_comparison import QualityVerdict
from argosy.policy.rollout.race import mean_evidence, regression_factors

SAMPLE_EVIDENCE = 100.0
"""Evidence from which a version fails more often. One in 100 comparisons of equal versions has as much."""
_RATIOS = (1.25, 1.5, 2.0, 4.0)


class SampleCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled answers of a version, graded by one judge or by fixed checks."""

    model: str
    version: str
    judge: str
    """Model that graded. Empty for fixed checks."""
    samples: int
    passed: int
    first_at: float
    """Time of the first one, in seconds since the epoch."""


class SampleComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled answers of the latest version of a model beside those of the version before it."""

    model: str
    version: str
    against: str
    judge: str
    warning: str
    """Why the grades should not decide. Empty for fixed checks."""
    verdict: QualityVerdict
    """Whether the latest version fails more often. It is never `not_worse`, since no margin is known."""
    pass_ratio: float
    pass_ratio_before: float
    worse_evidence: float


def compare_samples(counts: Sequence[SampleCounts]) -> list[SampleComparison]:
    """Compare the latest version of each model with the one before it, each judge apart."""
    groups: dict[tuple[str, str], list[SampleCounts]] = {}
    for each in sorted(counts, key=lambda each: (each.model, each.judge, each.first_at)):
        if each.version and each.samples:
            groups.setdefault((each.model, each.judge), []).append(each)
    return [_compare(found[-1], found[-2]) for found in groups.values() if len(found) > 1]


def _compare(candidate: SampleCounts, stable: SampleCounts) -> SampleComparison:
    share = candidate.samples / (candidate.samples + stable.samples)
    failed = candidate.samples - candidate.passed
    evidence = mean_evidence(
        regression_factors(share, _RATIOS, 1.0, failed, stable.samples - stable.passed)
    )
    is_worse = evidence >= SAMPLE_EVIDENCE
    judge = candidate.judge
    return SampleComparison(
        model=candidate.model,
        version=candidate.version,
        against=stable.version,
        judge=judge,
        warning=f"the judge {judge} is not calibrated by labels of people" if judge else "",
        verdict=QualityVerdict.WORSE if is_worse else QualityVerdict.UNDECIDED,
        pass_ratio=candidate.passed / candidate.samples,
        pass_ratio_before=stable.passed / stable.samples,
        worse_evidence=evidence,
    )
