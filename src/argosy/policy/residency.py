"""Residency: which models of a node are awake, if its memory does not hold all of them.

The model with the most waiting seconds per second of its reload wakes up next. For it, the models with the least rate
times reload time fall asleep. A model that has just woken up stays awake for a multiple of its reload time, unless it
has no requests. So models cannot evict each other all the time, and yet none waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MIN_AWAKE_RELOADS = 3.0
"""Multiple of its reload time for which a model that has requests stays awake."""
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
    """Sum of the times that its requests have waited, weighted as in their queue. 0 if none waits."""
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

    def has_expired(self, now: float) -> bool:
        """Whether it falls asleep because it has had no requests for long enough."""
        return (
            self.keep_alive_s is not None
            and self.idle_since is not None
            and now - max(self.idle_since, self.since) >= self.keep_alive_s
        )

    def may_fall_asleep(self, now: float) -> bool:
        """Whether it may fall asleep for the sake of another model."""
        if self.residency is not Residency.AWAKE or self.is_pinned:
            return False
        min_awake_s = MIN_AWAKE_RELOADS * max(self.reload_s, MIN_RELOAD_S)
        return self.idle_since is not None or now - self.since >= min_awake_s


@dataclass(frozen=True, slots=True)
class ResidencyDecision:
    """Changes to begin now. Decide again when a model has changed its residency."""

    wakes: Sequence[str] = ()
    sleeps: Sequence[str] = ()
    misfits: Sequence[str] = ()
    """Models with waiting requests that do not fit into the memory even if all others sleep that may."""


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
    waiting.sort(key=lambda model: (-model.is_pinned, -model.urgency, model.name))
    victims = [model for model in models if model.may_fall_asleep(now) and model not in sleeps]
    victims.sort(key=_eviction_key)
    free_bytes = memory_bytes - sum(model.bytes_in_use for model in models)
    freeing_bytes = sum(
        _freed_bytes(model)
        for model in models
        if model in sleeps or model.residency is Residency.FALLING_ASLEEP
    )
    while free_bytes + freeing_bytes < 0 and victims:
        sleeps.append(victims.pop(0))
        freeing_bytes += _freed_bytes(sleeps[-1])
    wakes: list[str] = []
    misfits: list[str] = []
    for model in waiting:
        needed_bytes = model.awake_bytes - model.asleep_bytes
        if not _can_ever_fit(model, models, memory_bytes):
            misfits.append(model.name)
            continue
        if needed_bytes <= free_bytes:
            wakes.append(model.name)
            free_bytes -= needed_bytes
            continue
        missing_bytes = needed_bytes - free_bytes - freeing_bytes
        chosen = _choose_victims(victims, missing_bytes)
        if chosen is not None:
            sleeps += chosen
        break  # it is first in line, so that models that need less memory do not overtake it for ever
    return ResidencyDecision(wakes, [model.name for model in sleeps], misfits)


def _eviction_key(model: ResidentModel) -> tuple[float, float, str]:
    """Return a key by which the models come first that cost the least if they sleep."""
    idle_since = float("inf") if model.idle_since is None else model.idle_since
    return model.rate * max(model.reload_s, MIN_RELOAD_S), idle_since, model.name


def _freed_bytes(model: ResidentModel) -> int:
    return model.awake_bytes - model.asleep_bytes


def _can_ever_fit(model: ResidentModel, models: Sequence[ResidentModel], memory_bytes: int) -> bool:
    """Return whether a model fits if all others sleep that are not pinned."""
    others = (other for other in models if other is not model)
    needed_bytes = sum(
        other.awake_bytes if other.is_pinned else other.asleep_bytes for other in others
    )
    return model.awake_bytes + needed_bytes <= memory_bytes


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
