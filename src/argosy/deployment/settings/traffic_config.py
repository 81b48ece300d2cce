"""Traffic settings of a model: models that answer for it by weight, and models that answer if it cannot in time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.policy.traffic import TrafficRoute, WeightedPool


class TrafficTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that answers for a part of the users of another one."""

    model: str
    """The model, by any of its names. It may be the one to which the setting belongs."""
    weight: Annotated[float, Meta(ge=0, le=1e9)] = 1.0
    """Share of the users relative to the other models."""


def validate_traffic(
    model: str,
    traffic: Sequence[TrafficTarget],
    fallback_models: Sequence[str],
    max_wait_s: float | None,
    other_models: Mapping[str, bool],
) -> None:
    """Check the traffic settings of a model.

    Args:
        model: Name of the model.
        traffic: The models that answer for it.
        fallback_models: The models that answer if those cannot in time.
        max_wait_s: Longest time in the queue before that.
        other_models: Whether a model divides its own traffic, by each name of the other models.

    Raises:
        ValueError: The settings are invalid. The message says what to change.
    """
    for setting, names in (
        ("traffic", [target.model for target in traffic]),
        ("fallback_models", fallback_models),
    ):
        for name in names:
            if name == model:
                continue
            if name not in other_models:
                known = ", ".join(sorted(other_models)) or "none"
                raise ValueError(
                    f"{setting}: no other model has the name {name!r}. Use one of: {known}."
                )
            if other_models[name]:
                raise ValueError(
                    f"{setting}: the model {name!r} divides its own traffic. Name the models that answer for it."
                )
    if max_wait_s is not None and not fallback_models:
        raise ValueError("max_wait_s: no other model takes over. Add `fallback_models`.")
    build_traffic_route(model, traffic, fallback_models, max_wait_s)


def build_traffic_route(
    model: str,
    traffic: Sequence[TrafficTarget],
    fallback_models: Collection[str],
    max_wait_s: float | None,
) -> TrafficRoute | None:
    """Build the traffic route of a model from its settings; None if the model itself always answers.

    Raises:
        ValueError: The weights are invalid.
    """
    if not (traffic or fallback_models):
        return None
    pools = [WeightedPool(pool=target.model, weight=target.weight) for target in traffic]
    return TrafficRoute(
        model=model,
        pools=tuple(pools) or (WeightedPool(pool=model),),
        fallback_pools=tuple(fallback_models),
        max_wait_s=max_wait_s,
    )
