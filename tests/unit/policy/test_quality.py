"""Paired comparisons: their error rates, their power, their intervals, and the calibration of judges."""

from __future__ import annotations

from random import Random

import pytest

from argosy.policy.quality import (
    PairedComparison,
    QualityComparison,
    QualityVerdict,
    SampleCounts,
    calibrate_judge,
    compare_samples,
)
from argosy.policy.quality.paired_comparison import find_detectable_loss
from argosy.policy.rollout.race import mean_evidence, regression_factors


def compare(
    random: Random, items: int, losses: float, wins: float, margin: float = 0.05
) -> tuple[QualityComparison, int]:
    """Return the comparison of one simulated set, which stops at a verdict, and the number of items it needed."""
    comparison = PairedComparison(margin)
    for _ in range(items):
        draw = random.random()
        comparison.add([-1.0 if draw < losses else 1.0 if draw < losses + wins else 0.0])
        if comparison.verdict is not QualityVerdict.UNDECIDED:
            break
    else:
        comparison.finish()
    summary = comparison.summarize()
    return summary, summary.clusters


def test_identical_models_are_hardly_ever_worse() -> None:
    random = Random(1)
    verdicts = [compare(random, 100, 0.1, 0.1)[0].verdict for _ in range(1000)]
    assert verdicts.count(QualityVerdict.WORSE) <= 10


@pytest.mark.parametrize(("losses", "wins", "mean_items"), [(0.125, 0.025, 230), (0.15, 0.05, 270)])
def test_a_loss_of_ten_points_on_300_items_is_found(
    losses: float, wins: float, mean_items: int
) -> None:
    random = Random(2)
    found = [compare(random, 300, losses, wins) for _ in range(200)]
    worse = [used for each, used in found if each.verdict is QualityVerdict.WORSE]
    assert len(worse) >= 180
    assert sum(worse) / len(worse) < mean_items


def test_final_look_is_a_sign_test_which_graded_scores_share() -> None:
    comparison, graded = PairedComparison(0.05), PairedComparison(0.05)
    for difference in [-1.0] * 9 + [1.0]:
        comparison.add([difference])
        graded.add([0.3 * difference])
    for each in (comparison, graded):
        assert each.summarize().worse_p is None
        each.finish()
        assert each.summarize().worse_p == pytest.approx(11 / 1024)
        assert each.verdict is QualityVerdict.UNDECIDED
    random, found = Random(5), 0
    for _ in range(500):
        same = PairedComparison(0.05)
        for _ in range(60):
            same.add([random.choice((-1.0, -0.6, -0.15, 0.0, 0.15, 0.6, 1.0))])
        same.finish()
        found += same.verdict is QualityVerdict.WORSE
    assert found <= 10


def test_a_loss_of_the_margin_is_hardly_ever_excluded_and_equality_is_found() -> None:
    random = Random(3)
    lossy = [compare(random, 300, 0.1, 0.05)[0].verdict for _ in range(200)]
    assert lossy.count(QualityVerdict.NOT_WORSE) <= 10
    assert compare(random, 300, 0.0, 0.0)[0].verdict is QualityVerdict.NOT_WORSE


def test_intervals_contain_the_true_difference() -> None:
    random = Random(4)
    hits = 0
    for _ in range(100):
        comparison = PairedComparison(0.05)
        for _ in range(100):
            comparison.add([random.choice((-1.0, -0.5, 0.0, 0.25, 0.75))])
        summary = comparison.summarize()
        assert summary.lower <= summary.difference <= summary.upper
        hits += summary.lower <= -0.1 <= summary.upper
    assert hits >= 95


def test_binary_scores_are_the_race_with_equal_shares() -> None:
    comparison = PairedComparison(0.05)
    for difference in [-1.0] * 12 + [0.0] * 30 + [1.0] * 3:
        comparison.add([difference])
    ratios = [(1 + stake) / (1 - stake) for stake in (0.1, 0.25, 0.45, 0.7)]
    expected = mean_evidence(regression_factors(0.5, ratios, 1.0, 12, 3))
    assert comparison.summarize().worse_evidence == pytest.approx(expected)


def test_clusters_count_once_and_small_sets_name_what_they_cannot_see() -> None:
    comparison = PairedComparison(0.05)
    for _ in range(5):
        comparison.add([-1.0] * 20)
    assert comparison.verdict is QualityVerdict.UNDECIDED
    assert comparison.summarize().losses == 5
    summary = PairedComparison(0.05).summarize()
    assert (summary.clusters, summary.difference, summary.detectable_loss) == (0, 0.0, None)
    assert (summary.lower, summary.upper) == (-1.0, 1.0)
    hundred = find_detectable_loss(100, 10)
    assert hundred is not None
    assert hundred > 0.05
    thousand = find_detectable_loss(1000, 100)
    assert thousand is not None
    assert thousand < hundred


def test_judges_are_calibrated_by_labels_of_people() -> None:
    # The judge passes everything that people pass, and a quarter of the rest.
    labelled = [(1.0, 1.0)] * 30 + [(1.0, 0.0)] * 10 + [(0.0, 0.0)] * 30
    calibration = calibrate_judge(labelled, [1.0] * 60 + [0.0] * 40)
    assert calibration.is_calibrated
    assert calibration.kappa == pytest.approx(0.72, abs=0.01)
    assert calibration.corrected_mean == pytest.approx(0.6 - 10 / 70, abs=1e-6)
    assert calibration.lower < 0.6 - 10 / 70 < calibration.upper < 0.6
    assert not calibrate_judge(labelled[:49], [1.0]).is_calibrated
    assert calibrate_judge([(1.0, 1.0)] * 60, [1.0]).kappa is None


def test_samples_of_two_versions_are_compared_and_equal_ones_hardly_ever_differ() -> None:
    def count(version: str, samples: int, passed: int, at: float, judge: str = "") -> SampleCounts:
        return SampleCounts(
            model="m", version=version, judge=judge, samples=samples, passed=passed, first_at=at
        )

    earlier, later = count("new", 200, 150, 2.0), count("old", 600, 570, 1.0)
    alone = count("old", 90, 80, 1.0, "other")
    judged = [count("old", 50, 40, 1.0, "big"), count("new", 50, 41, 2.0, "big")]
    fixed, by_judge = compare_samples([earlier, later, alone, *judged])
    assert (fixed.version, fixed.against, fixed.warning) == ("new", "old", "")
    assert fixed.verdict is QualityVerdict.WORSE
    assert (fixed.pass_ratio, fixed.pass_ratio_before) == (0.75, 0.95)
    assert by_judge.verdict is QualityVerdict.UNDECIDED
    assert "big is not calibrated" in by_judge.warning

    random, found = Random(6), 0
    for _ in range(2000):
        passed = [sum(random.random() < 0.9 for _ in range(size)) for size in (100, 150)]
        sides = [count("old", 100, passed[0], 1.0), count("new", 150, passed[1], 2.0)]
        found += compare_samples(sides)[0].verdict is QualityVerdict.WORSE
    assert found <= 20
