"""Where an excess of events is, and what happened before it. Neither is a proof of the cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from argosy.policy.detection.baseline import SHRINKAGE

RECENCY_HALF_S = 900.0
"""Time before the onset after which a change counts half."""
MAX_ONSET_ERROR_S = 600.0
"""Time after the estimated onset up to which a change may still be its cause."""
WINDOW_S = 7200.0
"""How long before the onset a change may be."""
SLOW_WINDOW_S = 86_400.0
"""The same for slow drift."""


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Part of the requests that share one value, with its part of an excess of events."""

    dimension: str
    """Such as `replica`."""
    value: str
    excess_share: float
    """Its part of the excess. Parts of others may be negative."""
    request_share: float
    """Its part of the requests."""
    share: float
    """Share of events in it."""
    share_before: float
    share_elsewhere: float
    """Share of events in the requests without it."""


def rank_slices(
    before: Mapping[tuple[str, str], tuple[int, int]],
    after: Mapping[tuple[str, str], tuple[int, int]],
) -> list[Slice]:
    """Return the slices that carry an excess, first those that carry most for their part of the requests.

    Args:
        before: Events and opportunities before the onset, by dimension and value.
        after: The same since the onset.
    """
    slices = []
    for dimension in sorted({key[0] for key in after}):
        earlier = {value: counts for (name, value), counts in before.items() if name == dimension}
        later = {value: counts for (name, value), counts in after.items() if name == dimension}
        events, total = _sum(later.values())
        earlier_events, earlier_total = _sum(earlier.values())
        usual = earlier_events / earlier_total if earlier_total else 0.0
        excesses = {}
        for value, (own_events, own_total) in later.items():
            own_before = earlier.get(value, (0, 0))
            expected = (own_before[0] + SHRINKAGE * usual) / (own_before[1] + SHRINKAGE)
            excesses[value] = (own_events - own_total * expected, expected)
        excess = sum(each for each, _ in excesses.values())
        if excess <= 0.0 or not total:
            continue
        for value, (own_excess, expected) in excesses.items():
            own_events, own_total = later[value]
            others = total - own_total
            slices.append(
                Slice(
                    dimension=dimension,
                    value=value,
                    excess_share=own_excess / excess,
                    request_share=own_total / total,
                    share=own_events / own_total if own_total else 0.0,
                    share_before=expected,
                    share_elsewhere=(events - own_events) / others if others else 0.0,
                )
            )
    slices.sort(
        key=lambda each: (each.request_share - each.excess_share, each.dimension, each.value)
    )
    return slices


def _sum(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    listed = list(counts)
    return sum(each[0] for each in listed), sum(each[1] for each in listed)


class PastChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that changed in the fleet."""

    at: float
    """Seconds since the epoch."""
    kind: str
    """Such as `replica_start` or `price.create`."""
    text: str
    actor: str = ""
    scope: Mapping[str, str] = {}
    """Its subject: `model`, `pool`, `replica`, `version` or `tenant`. Empty for the whole fleet."""
    source: str = ""
    """Where it is recorded: `fleet_events` or `audit`."""


class RankedChange(msgspec.Struct, frozen=True, kw_only=True):
    """Change with how well it fits an onset. It happened before, which is no proof that it is the cause."""

    change: PastChange
    score: float
    """From 0 to 1."""


_SCOPE_WEIGHTS = {"replica": 1.0, "tenant": 1.0, "version": 0.9, "pool": 0.7, "model": 0.7}
_FLEET_WEIGHT = 0.35
_OTHER_WEIGHT = 0.03


def rank_changes(
    changes: Sequence[PastChange],
    onset: float,
    scope: Mapping[str, str],
    *,
    window_s: float = WINDOW_S,
    usual: Mapping[str, int] | None = None,
) -> list[RankedChange]:
    """Return the changes that may have led to what began at `onset`, the most likely ones first.

    A change ranks high that concerns the same replica, tenant, version or pool, that is recent, and whose kind is rare.

    Args:
        changes: Changes before the onset, and some time after it.
        onset: Seconds since the epoch.
        scope: What has changed its behaviour, as in `PastChange.scope`.
        window_s: Time before the onset from which changes count.
        usual: Changes of each kind in a long time, such as a day. By default those of `changes`.
    """
    counts = Counter(each.kind for each in changes) if usual is None else Counter(usual)
    ranked = []
    for change in changes:
        age_s = onset - change.at
        if not -MAX_ONSET_ERROR_S <= age_s <= window_s:
            continue
        recency = 1.0 / (1.0 + max(0.0, age_s) / RECENCY_HALF_S)
        rarity = 1.0 / (1.0 + max(0, counts[change.kind] - 1) / 4.0)
        score = _overlap(change.scope, scope) * recency * rarity
        ranked.append(RankedChange(change=change, score=score))
    ranked.sort(key=lambda each: (-each.score, -each.change.at))
    return ranked


def _overlap(changed: Mapping[str, str], affected: Mapping[str, str]) -> float:
    """Return how well two scopes fit. One that names another replica or tenant hardly does."""
    if not changed:
        return _FLEET_WEIGHT
    common = changed.keys() & affected.keys()
    if any(changed[name] != affected[name] for name in common):
        return _OTHER_WEIGHT
    return max((_SCOPE_WEIGHTS.get(name, _FLEET_WEIGHT) for name in common), default=_FLEET_WEIGHT)
