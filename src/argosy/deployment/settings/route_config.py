"""Settings of model routes: rules that let another model than the requested one answer a request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.policy.traffic import DailyWindow, PercentageFlag
from argosy.store import Tier

ANY_HEADER_VALUE = "*"
"""Matches any value of a header."""

HeaderName = Annotated[str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]
HeaderValue = Annotated[str, Meta(pattern=r"^([!-~]([ -~]*[!-~])?)?$")]
"""A header's value without surrounding spaces."""


class RouteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one route: conditions that must all hold, and the model that answers then."""

    name: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """Name in explanations and logs. Defaults to the position, for example `routes[0]`."""
    model: str | None = None
    """Requested model, by any of its names. None matches every model."""
    headers: Annotated[dict[HeaderName, HeaderValue], Meta(min_length=1)] | None = None
    """Headers that the request must have. The value `*` matches any value."""
    tenants: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """Organisations, or projects as organisation/project, by name or id. The request must belong to one of them."""
    tiers: Annotated[tuple[Tier, ...], Meta(min_length=1)] | None = None
    """Tiers. The tenant must be in one of them."""
    flags: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """Feature flags. The project or the key must have one of them."""
    percentage_flag: PercentageFlag | None = None
    """Feature flag of a part of the tenants or users. It must be on for the request's."""
    windows: Annotated[tuple[DailyWindow, ...], Meta(min_length=1)] | None = None
    """Times of the day or week. One of them must contain the request's arrival."""
    target_model: str
    """The model that answers. Its own routes are not applied, but its `traffic` and `fallback_models` are."""


def validate_route(
    config: RouteConfig, model_names: Collection[str], *, has_accounts: bool
) -> None:
    """Check a route for conditions that can never hold.

    Args:
        config: Settings of the route.
        model_names: All names and aliases of models.
        has_accounts: Whether the gateway has a store.

    Raises:
        ValueError: The route is invalid. The message says what to change.
    """
    for key, model in (("model", config.model), ("target_model", config.target_model)):
        if model is not None and model not in model_names:
            known = ", ".join(sorted(model_names))
            raise ValueError(f"{key}: no model has the name {model!r}. Use one of {known}.")
    if not has_accounts and (config.tenants or config.tiers or config.flags):
        raise ValueError(
            "tenants, tiers and flags belong to accounts, which need a store. Add `store`, or remove them."
        )
    names = [name.lower() for name in config.headers or ()]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
        raise ValueError(
            f"headers: {min(duplicates)!r} is defined twice (names are case-insensitive). Keep one."
        )


def route_name(config: RouteConfig, index: int) -> str:
    """Return the configured name of a route, or its position such as `routes[0]`."""
    return f"routes[{index}]" if config.name is None else config.name
