"""Training of prompt classifiers: logistic regression on labelled prompts, and its curve of quality against cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from argosy.policy.traffic.prompt_classifier import (
    ClassifiedModel,
    ClassifierTarget,
    CurvePoint,
    HeldOutResult,
    ModelCard,
    PromptClassifier,
)
from argosy.policy.traffic.prompt_features import FEATURES, PromptSample, measure_features
from argosy.policy.traffic.sticky_hash import hash_point

Floats = NDArray[np.float64]

MIN_ROWS = 40
"""Rows that each half needs."""
QUALITY_TARGETS = (0.9, 0.95, 0.98)
"""Relative qualities that the model card reports."""
_RIDGES = (1.0, 10.0, 100.0)
"""Penalties of the weights of which the best one is used."""
_NUM_FOLDS = 5
_MAX_ITERATIONS = 50
_NUM_RESAMPLES = 1000
_CURVE_STEPS = 100


class LabelledAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one model for a labelled prompt."""

    quality: Annotated[float, Meta(ge=0, le=1)]
    """How good its answer is, for example 1 for right and 0 for wrong."""
    cost: Annotated[float, Meta(ge=0, le=1e12)] = 1.0
    """Cost of its answer, in the same unit for both models."""


class LabelledPrompt(NamedTuple):
    """A prompt with the results of both models."""

    sample: PromptSample
    group: str
    """Prompts of one group, such as one template, are held out together. Empty for the prompt alone."""
    small: LabelledAnswer
    large: LabelledAnswer


class RoutingOutcome(NamedTuple):
    """Result of sending some prompts to the large model and the others to the small one."""

    quality_share: float
    cost_share: float
    traffic_share: float


class LabelledSet:
    """Labelled prompts as arrays."""

    def __init__(self, prompts: Sequence[LabelledPrompt]) -> None:
        self.features = np.array([measure_features(each.sample) for each in prompts]).reshape(
            len(prompts), len(FEATURES)
        )
        self.small, self.large = (
            np.array([(each.quality, each.cost) for each in answers]).reshape(len(prompts), 2)
            for answers in ([each.small for each in prompts], [each.large for each in prompts])
        )

    def __len__(self) -> int:
        return len(self.features)

    @property
    def is_large_better(self) -> NDArray[np.bool_]:
        """Whether the large model's answer is better, by prompt."""
        return self.large[:, 0] > self.small[:, 0]

    def evaluate(
        self, is_large: NDArray[np.bool_], rows: NDArray[np.int64] | None = None
    ) -> RoutingOutcome:
        """Return the result if the prompts with a true value go to the large model, for some rows or all."""
        chosen = np.where(is_large[:, None], self.large, self.small)
        large = self.large
        if rows is not None:
            chosen, large, is_large = chosen[rows], large[rows], is_large[rows]
        quality, cost = chosen.mean(axis=0)
        large_quality, large_cost = large.mean(axis=0)
        return RoutingOutcome(
            float(quality / large_quality) if large_quality else 1.0,
            float(cost / large_cost) if large_cost else 1.0,
            float(is_large.mean()),
        )

    def score(self, classifier: PromptClassifier) -> Floats:
        """Return the score of each prompt."""
        scores: Floats = self.features @ np.array(classifier.weights) + classifier.bias
        return scores


def train_classifier(
    prompts: Sequence[LabelledPrompt],
    *,
    small: tuple[str, str],
    large: tuple[str, str],
    data_digest: str,
) -> PromptClassifier:
    """Train a classifier on one half of the prompts, and measure it on the other one.

    The curve, from which thresholds follow, is that of the training half too, each fold by weights that were fitted to
    the others. Otherwise it would promise what only known prompts keep.

    Args:
        prompts: Labelled prompts. Those of one group are in the same half.
        small: Name and digest of the small model.
        large: Name and digest of the large model.
        data_digest: Digest of the data.

    Raises:
        ValueError: There are too few prompts, or one of the models is better for all. The message says what to change.
    """
    has_groups = len({each.group for each in prompts} - {""}) >= 2
    halves: tuple[list[LabelledPrompt], list[LabelledPrompt]] = [], []
    for each in prompts:
        halves[hash_point("held out", _held_out_key(each)) < 0.5].append(each)
    if min(map(len, halves)) < MIN_ROWS:
        raise ValueError(
            f"the data has halves of {len(halves[0])} and {len(halves[1])} prompts, and each needs {MIN_ROWS}. "
            "Add prompts, or use more groups."
        )
    training, held_out = map(LabelledSet, halves)
    wins = training.is_large_better
    if wins.all() or not wins.any():
        raise ValueError(
            "the large model is better for all prompts of the training half, or for none. Use other data or models."
        )
    folds = np.array(
        [int(hash_point("fold", _held_out_key(each)) * _NUM_FOLDS) for each in halves[0]]
    )
    candidates = {ridge: _score_unseen(training, folds, ridge) for ridge in _RIDGES}
    ridge = max(_RIDGES, key=lambda each: compute_auc(candidates[each], wins))
    weights, bias = _fit(training.features, wins, ridge)
    names = [
        ClassifiedModel(name=name, digest=digest, quality=float(quality), cost=float(cost))
        for (name, digest), (quality, cost) in (
            (small, training.small.mean(axis=0)),
            (large, training.large.mean(axis=0)),
        )
    ]
    card = ModelCard(
        data_digest=data_digest,
        training_rows=len(training),
        held_out_rows=len(held_out),
        held_out_by="group" if has_groups else "prompt",
        auc=0.0,
        held_out=(),
    )
    classifier = PromptClassifier(
        features=FEATURES,
        weights=tuple(map(float, weights)),
        bias=bias,
        small=names[0],
        large=names[1],
        curve=trace_curve(training, candidates[ridge]),
        card=card,
    )
    scores = held_out.score(classifier)
    results = [
        measure_target(classifier, held_out, ClassifierTarget(quality_share=quality))
        for quality in QUALITY_TARGETS
    ]
    card = msgspec.structs.replace(
        card, auc=compute_auc(scores, held_out.is_large_better), held_out=tuple(results)
    )
    return msgspec.structs.replace(classifier, card=card)


class RouterResult(msgspec.Struct, frozen=True, kw_only=True):
    """A way to select the model, measured on labelled prompts."""

    router: str
    auc: float
    """Probability that a prompt for which the large model is better scores above one for which it is not."""
    saving: float
    """Cost saved relative to the large model alone, at the first point of the curve with the wanted quality."""
    curve: tuple[CurvePoint, ...]


def compare_routers(
    classifier: PromptClassifier, labelled: LabelledSet, quality: float
) -> list[RouterResult]:
    """Return the results of the classifier beside those of a random choice, the prompt's length, and an oracle.

    Args:
        classifier: The classifier.
        labelled: Prompts that it has not learned from.
        quality: Wanted quality relative to the large model alone.
    """
    gains = labelled.large[:, 0] - labelled.small[:, 0]
    scores = {
        "classifier": labelled.score(classifier),
        "random": np.random.Generator(np.random.PCG64(2)).random(len(labelled)),
        "length": labelled.features[:, FEATURES.index("text_length")],
        "oracle": gains - 1e-9 * (labelled.large[:, 1] - labelled.small[:, 1]),
    }
    results = []
    for router, each in scores.items():
        curve = trace_curve(labelled, each)
        reached = next(point for point in curve if point.quality_share >= min(quality, 1.0))
        results.append(
            RouterResult(
                router=router,
                auc=compute_auc(each, labelled.is_large_better),
                saving=1.0 - reached.cost_share,
                curve=curve,
            )
        )
    return results


def trace_curve(labelled: LabelledSet, scores: Floats) -> tuple[CurvePoint, ...]:
    """Return the results for thresholds from above all scores to below all, as shares of the prompts grow."""
    ordered = np.sort(scores)
    points = []
    for step in range(_CURVE_STEPS + 1):
        index = len(ordered) - round(step * len(ordered) / _CURVE_STEPS)
        threshold = float(ordered[index]) if index < len(ordered) else float(ordered[-1]) + 1.0
        quality, cost, traffic = labelled.evaluate(scores >= threshold)
        points.append(
            CurvePoint(
                threshold=threshold, quality_share=quality, cost_share=cost, traffic_share=traffic
            )
        )
    return tuple(points)


def measure_target(
    classifier: PromptClassifier, labelled: LabelledSet, target: ClassifierTarget
) -> HeldOutResult:
    """Return the result for labelled prompts with the threshold of a target, with bootstrap intervals of 95 %."""
    is_large = labelled.score(classifier) >= classifier.select_point(target).threshold
    result = labelled.evaluate(is_large)
    generator = np.random.Generator(np.random.PCG64(1))
    resampled = [
        labelled.evaluate(is_large, generator.integers(0, len(labelled), len(labelled)))
        for _ in range(_NUM_RESAMPLES)
    ]
    quality, saving = (
        _interval([each.quality_share for each in resampled], result.quality_share),
        _interval([1.0 - each.cost_share for each in resampled], 1.0 - result.cost_share),
    )
    return HeldOutResult(
        target=target.quality_share or 0.0,
        quality_share=quality,
        saving=saving,
        traffic_share=result.traffic_share,
    )


def _interval(values: Sequence[float], value: float) -> tuple[float, float, float]:
    low, high = np.quantile(values, (0.025, 0.975))
    return round(float(low), 4), round(value, 4), round(float(high), 4)


def compute_auc(scores: Floats, labels: NDArray[np.bool_]) -> float:
    """Return the probability that a positive scores above a negative; ties count half, and 0.5 without one of both."""
    positives, negatives = np.sort(scores[labels]), np.sort(scores[~labels])
    if not (len(positives) and len(negatives)):
        return 0.5
    below = np.searchsorted(negatives, positives, "left") + np.searchsorted(
        negatives, positives, "right"
    )
    return float(below.mean() / 2 / len(negatives))


def _held_out_key(prompt: LabelledPrompt) -> str:
    """Return what is held out as one."""
    return prompt.group or prompt.sample.text


def _score_unseen(labelled: LabelledSet, folds: NDArray[np.int64], ridge: float) -> Floats:
    """Return the score of each prompt by weights that were fitted without its fold."""
    scores = np.zeros(len(labelled))
    labels = labelled.is_large_better
    for fold in np.unique(folds):
        others, own = folds != fold, folds == fold
        if labels[others].any() and not labels[others].all():
            weights, bias = _fit(labelled.features[others], labels[others], ridge)
            scores[own] = labelled.features[own] @ weights + bias
    return scores


def _fit(features: Floats, labels: NDArray[np.bool_], ridge: float) -> tuple[Floats, float]:
    """Fit a logistic regression with a ridge penalty by Newton's method. Returns weights and bias of raw features."""
    means, scales = features.mean(axis=0), features.std(axis=0)
    scales[scales < 1e-9] = np.inf  # a constant feature has no weight
    design = np.column_stack([(features - means) / scales, np.ones(len(features))])
    penalty = np.full(design.shape[1], ridge)
    penalty[-1] = 0.0
    solution = np.zeros(design.shape[1])
    for _ in range(_MAX_ITERATIONS):
        odds = 1.0 / (1.0 + np.exp(-np.clip(design @ solution, -30.0, 30.0)))
        gradient = design.T @ (odds - labels) + penalty * solution
        curvature = (design * (odds * (1.0 - odds))[:, None]).T @ design + np.diag(penalty + 1e-9)
        step = np.linalg.solve(curvature, gradient)
        solution -= step
        if np.abs(step).max() < 1e-8:
            break
    weights = solution[:-1] / scales
    return weights, float(solution[-1] - weights @ means)
