"""Calibration of a judge by labels of people: agreement beyond chance, and a corrected mean score."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

MIN_LABELS = 50
"""Labels of people from which a judge counts as calibrated."""
_Z = 1.96
"""Half the width of a 95 % interval, in standard errors."""
_PASSING = 0.5
_DIGITS = 6


class JudgeCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """Agreement of a judge with people, and the mean of its scores as corrected by their labels."""

    labels: int
    kappa: float | None
    """Cohen's kappa of passing scores: 1 for full agreement, 0 for that of chance. None if it is not defined."""
    corrected_mean: float
    """Mean of the judge's scores plus the mean of what people scored higher."""
    lower: float
    """Lower bound of its 95 % interval, between 0 and 1."""
    upper: float

    @property
    def is_calibrated(self) -> bool:
        """Whether there are enough labels, and the agreement exceeds that of chance."""
        return self.labels >= MIN_LABELS and self.kappa is not None and self.kappa > 0.0


def calibrate_judge(
    labelled: Sequence[tuple[float, float]], scores: Sequence[float]
) -> JudgeCalibration:
    """Compute the agreement and the corrected mean.

    The correction is prediction-powered inference: Angelopoulos et al., "Prediction-Powered Inference", Science 2023.

    Args:
        labelled: Score of the judge and of a person for each labelled answer, from 0 to 1. At least one.
        scores: Scores of the judge for the answers whose mean is wanted. At least one.
    """
    errors = [person - judge for judge, person in labelled]
    mean = _mean(scores) + _mean(errors)
    half_width = _Z * math.sqrt(_variance(scores) / len(scores) + _variance(errors) / len(errors))
    return JudgeCalibration(
        labels=len(labelled),
        kappa=_kappa(labelled),
        corrected_mean=round(mean, _DIGITS),
        lower=round(max(0.0, mean - half_width), _DIGITS),
        upper=round(min(1.0, mean + half_width), _DIGITS),
    )


def _kappa(labelled: Sequence[tuple[float, float]]) -> float | None:
    total = len(labelled)
    pairs = [(judge >= _PASSING, person >= _PASSING) for judge, person in labelled]
    agreement = sum(judge == person for judge, person in pairs) / total
    judge_share, person_share = (sum(column) / total for column in zip(*pairs, strict=True))
    chance = judge_share * person_share + (1.0 - judge_share) * (1.0 - person_share)
    return None if chance == 1.0 else round((agreement - chance) / (1.0 - chance), _DIGITS)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
