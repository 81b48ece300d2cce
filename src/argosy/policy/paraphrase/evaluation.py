"""Evaluation of the semantic cache on labelled pairs of questions: hits, wrong answers, and what they prove."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.policy.paraphrase.guard import GuardName, allows_answer
from argosy.settings import ByOperator

CONFIDENCE = 0.95
"""Confidence of all bounds."""
_BISECTIONS = 50

Digest = Annotated[str, Meta(min_length=1, max_length=200)]
Count = Annotated[int, Meta(ge=0, le=10_000_000)]


class LabelledPair(msgspec.Struct, frozen=True):
    """Two questions, and whether the answer to one answers the other."""

    a: str
    b: str
    same: bool
    kind: str = ""
    """Kind of the pair in reports, such as `negation`."""


class CacheEvaluation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of `argosy cache evaluate`, which lets a cache rule answer similar questions."""

    embedding_digest: ByOperator[Digest]
    """Digest of the embedding model. Another one is not used."""
    pairs_digest: ByOperator[Digest]
    """SHA-256 of the file of pairs."""
    guard: ByOperator[GuardName]
    """The guard that was evaluated."""
    guard_version: ByOperator[Digest]
    """Version of its words and rules."""
    threshold: ByOperator[Annotated[float, Meta(ge=0.85, le=1)]]
    """Similarity from which pairs were hits."""
    equal_pairs: ByOperator[Count]
    """Pairs of which one question's answer answers the other."""
    hits: ByOperator[Count]
    """Hits among them."""
    unequal_pairs: ByOperator[Count]
    """Pairs of similar questions with different answers."""
    wrong_answers: ByOperator[Count]
    """Hits among them."""

    @property
    def wrong_bound(self) -> float:
        """Upper 95 % bound of the share of wrong answers to such pairs."""
        return upper_bound(self.wrong_answers, self.unequal_pairs)


def count_hits(
    pairs: Sequence[LabelledPair],
    similarities: Sequence[float],
    guard: GuardName | None,
    threshold: float,
) -> tuple[int, int]:
    """Count the pairs that are hits: those that should be, and those that should not be. None is no guard."""
    right = wrong = 0
    for pair, similarity in zip(pairs, similarities, strict=True):
        if similarity >= threshold and (guard is None or allows_answer(guard, pair.a, pair.b)):
            right += pair.same
            wrong += not pair.same
    return right, wrong


def upper_bound(count: int, total: int, confidence: float = CONFIDENCE) -> float:
    """Return the upper bound of a share by Clopper and Pearson (1934), one-sided. 1 without any trial."""
    if count >= total:
        return 1.0
    low, high = count / total, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _binomial_cdf(count, total, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def interval(count: int, total: int) -> tuple[float, float]:
    """Return the two-sided 95 % interval of a share."""
    confidence = (1 + CONFIDENCE) / 2
    return 1 - upper_bound(total - count, total, confidence), upper_bound(count, total, confidence)


def _binomial_cdf(count: int, total: int, share: float) -> float:
    """Return the probability of at most `count` of `total` events of probability `share`.

    The share is between `count / total` and 1. Fewer events are ever less probable then, so that the sum needs about
    as many terms as the square root of `total`.
    """
    term = math.exp(
        math.lgamma(total + 1)
        - math.lgamma(count + 1)
        - math.lgamma(total - count + 1)
        + count * math.log(share)
        + (total - count) * math.log1p(-share)
    )
    sum_ = 0.0
    for each in range(count, -1, -1):
        sum_ += term
        term *= each / (total - each + 1) * (1 - share) / share
        if term <= sum_ * sys.float_info.epsilon:
            break
    return sum_
