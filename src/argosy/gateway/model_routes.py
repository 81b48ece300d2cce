"""Model routes: rules that let another model than the requested one answer a request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.gateway.principal import TIERS, Principal
from argosy.policy.traffic import (
    DailyWindow,
    PercentageFlag,
    TrafficSubject,
)
from argosy.store import AccountSnapshot, Tier

ANY_VALUE = "*"
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


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A route in the form in which requests are matched. A condition that is None matches every request."""

    name: str
    target_model: str
    model: str | None
    """The model's primary name."""
    headers: tuple[tuple[bytes, bytes | None], ...]
    """Pairs of lower-case name and value. The value None matches any value."""
    tenants: frozenset[str] | None
    """Ids of organisations and projects."""
    windows: tuple[DailyWindow, ...] | None
    """At least one of them must be open."""
    percentage_flag: PercentageFlag | None
    tiers: frozenset[int] | None
    """Ranks of tiers (indices of `TIERS`)."""
    flags: frozenset[str] | None
    unknown_tenants: tuple[str, ...]
    """Tenants in the settings that do not exist in the store."""

    def matches(
        self,
        model: str,
        principal: Principal,
        subject: TrafficSubject,
        headers: Mapping[bytes, bytes],
        now: float,
    ) -> bool:
        """Return whether all conditions hold for a request.

        Args:
            model: Primary name of the requested model.
            principal: Authenticated sender of the request.
            subject: The sender as traffic is divided.
            headers: Headers of the request, by lower-case name.
            now: Seconds since the epoch.
        """
        if not (
            (self.model is None or self.model == model)
            and (self.tiers is None or principal.tier in self.tiers)
            and (self.flags is None or not self.flags.isdisjoint(principal.flags))
            and (
                self.tenants is None
                or principal.project in self.tenants
                or principal.organisation in self.tenants
            )
            and (self.windows is None or any(window.contains(now) for window in self.windows))
            and (self.percentage_flag is None or self.percentage_flag.is_on(subject))
        ):
            return False
        for name, value in self.headers:
            actual = headers.get(name)
            if actual is None or (value is not None and actual != value):
                return False
        return True


def compile_routes(
    configs: Sequence[RouteConfig], models: Mapping[str, str], snapshot: AccountSnapshot
) -> tuple[ModelRoute, ...]:
    """Compile routes, in their order.

    Args:
        configs: Settings of the routes.
        models: Primary name of each model by each of its names.
        snapshot: Accounts, to resolve the names of tenants.
    """
    ids = _tenant_ids(snapshot) if any(config.tenants for config in configs) else {}
    return tuple(_compile_route(config, index, models, ids) for index, config in enumerate(configs))


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


def _compile_route(
    config: RouteConfig, index: int, models: Mapping[str, str], tenant_ids: Mapping[str, set[str]]
) -> ModelRoute:
    tenants, tiers = config.tenants, config.tiers
    return ModelRoute(
        name=route_name(config, index),
        target_model=models[config.target_model],
        model=None if config.model is None else models[config.model],
        headers=tuple(
            (name.lower().encode(), None if value == ANY_VALUE else value.encode())
            for name, value in (config.headers or {}).items()
        ),
        tenants=None
        if tenants is None
        else frozenset[str]().union(*(tenant_ids.get(name, ()) for name in tenants)),
        windows=config.windows,
        percentage_flag=config.percentage_flag,
        tiers=None if tiers is None else frozenset(map(TIERS.index, tiers)),
        flags=None if config.flags is None else frozenset(config.flags),
        unknown_tenants=tuple(name for name in tenants or () if name not in tenant_ids),
    )


def _tenant_ids(snapshot: AccountSnapshot) -> Mapping[str, set[str]]:
    """Return the ids of organisations and projects by each name that a route may use for them."""
    ids_by_name: defaultdict[str, set[str]] = defaultdict(set)
    organisation_names: dict[str, tuple[str, str]] = {}
    for organisation in snapshot.organisations:
        if organisation.archived_at is None:
            organisation_names[organisation.id] = organisation.id, organisation.name
            for organisation_name in organisation_names[organisation.id]:
                ids_by_name[organisation_name].add(organisation.id)
    for project in snapshot.projects:
        if project.archived_at is None:
            for organisation_name in organisation_names.get(project.organisation, ()):
                for name in (project.id, project.name):
                    ids_by_name[f"{organisation_name}/{name}"].add(project.id)
    return ids_by_name
