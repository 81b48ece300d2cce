"""Classifier of prompts: a linear score by which a prompt is for the large one of two models, and its model card."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from argosy.policy.traffic.prompt_features import FEATURES, PromptSample, measure_features
from argosy.settings import ByOperator

MAX_CURVE_POINTS = 200

Share = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(ge=-1e6, le=1e6)]
Digest = Annotated[
    str, Meta(pattern=r"^(sha256:[0-9a-f]{64})?$(?!\n)", examples=["sha256:" + "0" * 64])
]


class ClassifiedModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model that a classifier was made for, the small or the large one."""

    name: ByOperator[Annotated[str, Meta(max_length=300)]]
    """Name for people."""
    digest: ByOperator[Digest] = ""
    """Digest of the model. A model with another digest is not routed by the classifier. Empty for any."""
    quality: ByOperator[float]
    """Mean quality of its answers in the training half."""
    cost: ByOperator[Annotated[float, Meta(ge=0)]]
    """Mean cost of its answers there, in the unit of the data."""


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quality and cost of the training half if prompts from a score on go to the large model."""

    threshold: ByOperator[Weight]
    traffic_share: ByOperator[Share]
    """Part of the prompts that go to the large model."""
    quality_share: ByOperator[Annotated[float, Meta(ge=0)]]
    """Mean quality relative to that of the large model alone."""
    cost_share: ByOperator[Annotated[float, Meta(ge=0)]]
    """Cost relative to that of the large model alone."""


class HeldOutResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result on the half of the data that the classifier did not learn from, with 95 % intervals."""

    target: ByOperator[Share]
    """Wanted quality relative to the large model's. The threshold for it is that of the training half."""
    quality_share: ByOperator[tuple[float, float, float]]
    """Reached quality relative to the large model's: lower bound, value, upper bound."""
    saving: ByOperator[tuple[float, float, float]]
    """Cost saved relative to the large model alone: lower bound, value, upper bound."""
    traffic_share: ByOperator[Share]
    """Part of the prompts that went to the large model."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From what a classifier was made, and how good it is."""

    data_digest: ByOperator[Digest]
    """Digest of the labelled data."""
    training_rows: ByOperator[Annotated[int, Meta(ge=0)]]
    held_out_rows: ByOperator[Annotated[int, Meta(ge=0)]]
    held_out_by: ByOperator[Literal["group", "prompt"]]
    """Whether whole groups of the data were held out, such as templates, or single prompts."""
    auc: ByOperator[Share]
    """Probability that a held-out prompt for which the large model is better scores above one for which it is not."""
    held_out: ByOperator[Annotated[tuple[HeldOutResult, ...], Meta(max_length=20)]]


class ClassifierTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The wanted result of a classifier, which selects its threshold. One of the shares is given."""

    quality_share: ByOperator[Share | None] = None
    """Smallest quality, relative to that of the large model alone."""
    cost_share: ByOperator[Share | None] = None
    """Largest cost, relative to that of the large model alone."""
    traffic_share: ByOperator[Share | None] = None
    """Largest part of the prompts for the large model."""

    def __post_init__(self) -> None:
        given = [self.quality_share, self.cost_share, self.traffic_share]
        if sum(each is not None for each in given) != 1:
            raise ValueError("give one of quality_share, cost_share and traffic_share")


class PromptClassifier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trained classifier, as its file has it.

    Raises:
        ValueError: It has other features than this version of Argosy.
    """

    format: ByOperator[Literal["argosy-prompt-classifier-1"]] = "argosy-prompt-classifier-1"
    features: ByOperator[Annotated[tuple[str, ...], Meta(max_length=64)]]
    """Names of the features, in the order of the weights."""
    weights: ByOperator[Annotated[tuple[Weight, ...], Meta(max_length=64)]]
    bias: ByOperator[Weight]
    small: ByOperator[ClassifiedModel]
    large: ByOperator[ClassifiedModel]
    curve: ByOperator[
        Annotated[tuple[CurvePoint, ...], Meta(min_length=1, max_length=MAX_CURVE_POINTS)]
    ]
    """Points of the training half, from none to all prompts for the large model."""
    card: ByOperator[ModelCard]

    def __post_init__(self) -> None:
        if self.features != FEATURES or len(self.weights) != len(FEATURES):
            raise ValueError(
                "the classifier has other features than this version of Argosy; train it again"
            )

    def score(self, sample: PromptSample) -> float:
        """Return the score of a prompt: the log-odds that the large model's answer is the better one."""
        pairs = zip(self.weights, measure_features(sample), strict=True)
        return self.bias + sum(weight * value for weight, value in pairs)

    def select_point(self, target: ClassifierTarget) -> CurvePoint:
        """Return the cheapest point with the wanted quality, or the best one within the wanted share."""
        if target.quality_share is not None:
            wanted = target.quality_share
            return next(
                (each for each in self.curve if each.quality_share >= wanted), self.curve[-1]
            )
        permitted = [
            each
            for each in self.curve
            if (target.cost_share is None or each.cost_share <= target.cost_share)
            and (target.traffic_share is None or each.traffic_share <= target.traffic_share)
        ]
        return permitted[-1] if permitted else self.curve[0]
