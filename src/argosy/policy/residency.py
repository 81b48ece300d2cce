"""Residency: which models of a node are awake, if its memory does not hold all of them.

The model with the most waiting seconds per second of its reload wakes up next. For it, the models with the least rate
times reload time fall asleep.

**Hysteresis.** A model that has requests stays awake for `MIN_AWAKE_RELOADS` times its reload time, and one that has
none for `MIN_IDLE_RELOADS`. So in memory for n models of reload time r, at most n / (1 + MIN_IDLE_RELOADS) / r wake up
in a second, whatever arrives. All requests that wait for a model share one waking.

**Tiers.** Higher tiers wake their models first, and a model that a higher tier has used lately stays awake. As in the
queue, requests that have waited for `PROMOTE_AFTER_S` for a model that has slept as long count as of the highest tier.
For them, a model of a higher tier falls asleep only while it has no requests, and after it has been awake as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from argosy.policy.fair_queue import PROMOTE_AFTER_S

MIN_AWAKE_RELOADS = 3.0
"""Multiple of its reload time for which a model that has requests stays awake."""
MIN_IDLE_RELOADS = 1.0
"""Multiple of its reload time for which a model stays awake without requests. With 1, waiting for the next request in
vain costs at most what reloading the model too early would."""
MIN_RELOAD_S = 0.1
"""Reload time of a model that reloads faster, so that its waiting seconds do not count for too much."""


class Residency(StrEnum):
    """Whether a model can serve."""

    AWAKE = "awake"
    WAKING = "waking"
    FALLING_ASLEEP = "falling asleep"
    """The model finishes its running requests, or frees its memory."""
    ASLEEP = "asleep"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentModel:
    """Model of a node, with the demand for it. Times are monotonic seconds."""

    name: str
    residency: Residency
    since: float
    """Time since which it has its residency."""
    awake_bytes: int
    """Memory that it needs at most while it is not asleep."""
    asleep_bytes: int
    reload_s: float
    """How long it takes to wake up."""
    waiting_s: float = 0.0
    """Sum of the times that its requests have waited. 0 if none waits."""
    longest_wait_s: float = 0.0
    """How long the oldest of them has waited."""
    waiting_tier: int = 0
    """Rank of the highest tier of which a request waits, 0 for the highest of all."""
    served_tier: int | None = None
    """Rank of the highest tier that has sent it requests lately; None if none has."""
    rate: float = 0.0
    """Requests per second."""
    idle_since: float | None = None
    """Time since which it has no requests; None if it has some."""
    keep_alive_s: float | None = None
    """Time without requests after which it falls asleep. None keeps it awake until its memory is needed."""
    is_pinned: bool = False
    """Whether it stays awake whatever happens."""

    @property
    def bytes_in_use(self) -> int:
        """Memory that it has at most in its residency."""
        return self.asleep_bytes if self.residency is Residency.ASLEEP else self.awake_bytes

    @property
    def urgency(self) -> float:
        """Waiting seconds per second of its reload."""
        return self.waiting_s / max(self.reload_s, MIN_RELOAD_S)

    def is_promoted(self, now: float) -> bool:
        """Whether its requests count as of the highest tier, after a sleep and a wait of `PROMOTE_AFTER_S`."""
        return min(self.longest_wait_s, now - self.since) > PROMOTE_AFTER_S[self.waiting_tier]

    def has_expired(self, now: float) -> bool:
        """Whether it falls asleep because it has had no requests for long enough."""
        return (
            self.keep_alive_s is not None
            and self.idle_since is not None
            and now - max(self.idle_since, self.since) >= self.keep_alive_s
        )

    def may_fall_asleep(self, now: float) -> bool:
        """Whether it may fall asleep for the sake of another model now."""
        if self.residency is not Residency.AWAKE or self.is_pinned:
            return False
        reload_s = max(self.reload_s, MIN_RELOAD_S)
        if now - self.since >= MIN_AWAKE_RELOADS * reload_s:
            return True
        idle_since = self.idle_since
        return (
            idle_since is not None
            and now - max(idle_since, self.since) >= MIN_IDLE_RELOADS * reload_s
        )

    def yields_to(self, other: ResidentModel, now: float) -> bool:
        """Whether it falls asleep, now or soon, for the requests that wait for another model."""
        if self.residency in {Residency.ASLEEP, Residency.FALLING_ASLEEP} or self.is_pinned:
            return False
        if self.served_tier is None or self.served_tier >= other.waiting_tier or other.is_pinned:
            return True
        awake_s = now - self.since
        is_rested = self.idle_since is not None and awake_s > PROMOTE_AFTER_S[other.waiting_tier]
        return other.is_promoted(now) and is_rested


@dataclass(frozen=True, slots=True)
class ResidencyDecision:
    """Changes to begin now. Decide again when a model has changed its residency."""

    wakes: Sequence[str] = ()
    sleeps: Sequence[str] = ()
    misfits: Mapping[str, int] = field(default_factory=dict)
    """Models that do not fit into the memory even if all others sleep that may, with the bytes that these leave. They
    sleep until that changes."""


def decide_residency(
    models: Sequence[ResidentModel], memory_bytes: int | None, now: float
) -> ResidencyDecision:
    """Decide which models begin to wake up and to fall asleep.

    The memory of models that are awake, wake up or fall asleep never exceeds `memory_bytes` by a decision. None sets no
    limit, so that models sleep only when they have had no requests for long enough.
    """
    sleeps = [
        model
        for model in models
        if model.residency is Residency.AWAKE and not model.is_pinned and model.has_expired(now)
    ]
    waiting = [
        model
        for model in models
        if model.residency is Residency.ASLEEP and (model.waiting_s > 0.0 or model.is_pinned)
    ]
    if memory_bytes is None:
        return ResidencyDecision([each.name for each in waiting], [each.name for each in sleeps])
    misfits: dict[str, int] = {}
    for model in models:
        available_bytes = memory_bytes - _least_bytes(models, model)
        if model.awake_bytes > available_bytes and not _is_kept(model):
            misfits[model.name] = available_bytes
    sleeps += [
        model
        for model in models
        if model.name in misfits and model.residency is Residency.AWAKE and model not in sleeps
    ]
    waiting = [model for model in waiting if model.name not in misfits]
    waiting.sort(key=lambda model: _wake_key(model, now))
    others = [model for model in models if model not in sleeps]
    others.sort(key=_eviction_key)
    free_bytes = memory_bytes - sum(model.bytes_in_use for model in models)
    freeing_bytes = sum(
        _freed_bytes(model)
        for model in models
        if model in sleeps or model.residency is Residency.FALLING_ASLEEP
    )
    victims = [model for model in others if model.may_fall_asleep(now)]
    while free_bytes + freeing_bytes < 0 and victims:
        sleeps.append(victims.pop(0))
        freeing_bytes += _freed_bytes(sleeps[-1])
    wakes: list[str] = []
    for model in waiting:
        needed_bytes = _freed_bytes(model)
        if needed_bytes <= free_bytes:
            wakes.append(model.name)
            free_bytes -= needed_bytes
            continue
        missing_bytes = needed_bytes - free_bytes - freeing_bytes
        yielding = [each for each in others if each not in sleeps and each.yields_to(model, now)]
        if _choose_victims(yielding, missing_bytes) is None:
            continue  # higher tiers keep the memory, in which a model behind it may find room
        chosen = _choose_victims([each for each in yielding if each in victims], missing_bytes)
        sleeps += chosen or ()
        break  # it is first in line, so that models that need less memory do not overtake it for ever
    return ResidencyDecision(wakes, [model.name for model in sleeps], misfits)


def _is_kept(model: ResidentModel) -> bool:
    """Return whether a model is awake and may not fall asleep, whether it fits or not."""
    return model.is_pinned and model.residency is not Residency.ASLEEP


def _wake_key(model: ResidentModel, now: float) -> tuple[bool, int, float, str]:
    """Return a key by which the models come first that wake up first."""
    tier = 0 if model.is_promoted(now) else model.waiting_tier
    return not model.is_pinned, tier, -model.urgency, model.name


def _eviction_key(model: ResidentModel) -> tuple[int, float, float, str]:
    """Return a key by which the models come first that cost the least if they sleep."""
    tier = len(PROMOTE_AFTER_S) if model.served_tier is None else model.served_tier
    idle_since = float("inf") if model.idle_since is None else model.idle_since
    return -tier, model.rate * max(model.reload_s, MIN_RELOAD_S), idle_since, model.name


def _freed_bytes(model: ResidentModel) -> int:
    """Return the memory that a model frees when it falls asleep, and needs to wake up."""
    return model.awake_bytes - model.asleep_bytes


def _least_bytes(models: Sequence[ResidentModel], excluded: ResidentModel) -> int:
    """Return the memory that the other models need if all of them sleep that may."""
    return sum(
        model.awake_bytes if model.is_pinned else model.asleep_bytes
        for model in models
        if model is not excluded
    )


def _choose_victims(
    victims: Sequence[ResidentModel], missing_bytes: int
) -> Sequence[ResidentModel] | None:
    """Return the first victims that free enough, without those that are not needed; None if all do not suffice."""
    chosen: list[ResidentModel] = []
    for victim in victims:
        if missing_bytes <= 0:
            break
        chosen.append(victim)
        missing_bytes -= _freed_bytes(victim)
    if missing_bytes > 0:
        return None
    for victim in tuple(chosen):
        if missing_bytes + _freed_bytes(victim) <= 0:
            chosen.remove(victim)
            missing_bytes += _freed_bytes(victim)
    return chosen
