"""Decides whether two questions may share an answer, for the semantic cache.

Embeddings find the nearest questions (see `policy.vectors`), but do not separate a question from its opposite.
So `allows_answer` compares the words. `count_hits` and `upper_bound` say how often both together are wrong.
A `CacheEvaluation` is the result that a cache rule has to carry.
"""

from argosy.policy.paraphrase.evaluation import (
    CacheEvaluation,
    LabelledPair,
    count_hits,
    interval,
    upper_bound,
)
from argosy.policy.paraphrase.guard import (
    MAX_QUESTION_CHARS,
    GuardName,
    allows_answer,
    guard_version,
)

__all__ = [
    "MAX_QUESTION_CHARS",
    "CacheEvaluation",
    "GuardName",
    "LabelledPair",
    "allows_answer",
    "count_hits",
    "guard_version",
    "interval",
    "upper_bound",
]
