"""Routes: which model answers a request, where that is not the one that was asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.gateway.principal import TIERS, Principal
from argosy.store import AccountSnapshot, Tier

ANY_VALUE = "*"
"""Stands for any value of a header."""

HeaderName = Annotated[str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]
HeaderValue = Annotated[str, Meta(pattern=r"^([!-~]([ -~]*[!-~])?)?$")]
"""As it arrives: without spaces around it."""


class RouteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What must hold of a request, all of it, and which model answers it then."""

    name: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """What explanations and logs call it; by default its place, like `routes[0]`."""
    model: str | None = None
    """Asked for, by any of its names; None: whatever is asked for."""
    headers: Annotated[dict[HeaderName, HeaderValue], Meta(min_length=1)] | None = None
    """The request has all of these; `*`: with any value."""
    tenants: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """It comes from one of these: organisations, or projects as organisation/project, each by name or id."""
    tiers: Annotated[tuple[Tier, ...], Meta(min_length=1)] | None = None
    """Its tenant is in one of these."""
    flags: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None
    """Its project or its key has one of these."""
    target_model: str
    """The model that answers; none of its own routes is looked at."""


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """A route, ready to be compared with requests; None: whatever there is."""

    name: str
    target_model: str
    model: str | None
    """The model's own name."""
    headers: tuple[tuple[bytes, bytes | None], ...]
    """By name in lower case; None: any value."""
    tenants: frozenset[str] | None
    """Ids of organisations and projects."""
    tiers: frozenset[int] | None
    """Ranks."""
    flags: frozenset[str] | None
    unknown_tenants: tuple[str, ...]
    """Tenants that it names, and that are not there."""

    def matches(self, model: str, principal: Principal, headers: Mapping[bytes, bytes]) -> bool:
        """Whether it decides what the caller asks this model (by its own name) with these headers."""
        if not (
            (self.model is None or self.model == model)
            and (self.tiers is None or principal.tier in self.tiers)
            and (self.flags is None or not self.flags.isdisjoint(principal.flags))
            and (
                self.tenants is None
                or principal.project in self.tenants
                or principal.organisation in self.tenants
            )
        ):
            return False
        for name, value in self.headers:
            found = headers.get(name)
            if found is None or (value is not None and found != value):
                return False
        return True


def compile_routes(
    configs: Sequence[RouteConfig], models: Mapping[str, str], snapshot: AccountSnapshot
) -> tuple[ModelRoute, ...]:
    """The routes in their order; `models`: the own name of each model by each of its names."""
    ids = _tenant_ids(snapshot) if any(config.tenants for config in configs) else {}
    return tuple(_compile_route(config, place, models, ids) for place, config in enumerate(configs))


def validate_route(
    config: RouteConfig, model_names: Collection[str], *, has_accounts: bool
) -> None:
    """Raise ValueError, saying what to change, when it can never be meant; `accounts`: there is a store of them."""
    for key, model in (("model", config.model), ("target_model", config.target_model)):
        if model is not None and model not in model_names:
            known = ", ".join(sorted(model_names))
            raise ValueError(f"{key}: {model!r} is not served here; name one of {known}")
    if not has_accounts and (config.tenants or config.tiers or config.flags):
        raise ValueError("tenants, tiers and flags are those of accounts; add a store")
    names = [name.lower() for name in config.headers or ()]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"headers: {min(twice)!r} is there twice (case does not matter); keep one")


def route_name(config: RouteConfig, index: int) -> str:
    """What it is called."""
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
        tiers=None if tiers is None else frozenset(map(TIERS.index, tiers)),
        flags=None if config.flags is None else frozenset(config.flags),
        unknown_tenants=tuple(name for name in tenants or () if name not in tenant_ids),
    )


def _tenant_ids(snapshot: AccountSnapshot) -> Mapping[str, set[str]]:
    """Ids of organisations by what they may be called in a route, and of projects."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    owners: dict[str, tuple[str, str]] = {}
    for organisation in snapshot.organisations:
        if organisation.archived_at is None:
            owners[organisation.id] = organisation.id, organisation.name
            for owner in owners[organisation.id]:
                found[owner].add(organisation.id)
    for project in snapshot.projects:
        if project.archived_at is None:
            for owner in owners.get(project.organisation, ()):
                for name in (project.id, project.name):
                    found[f"{owner}/{name}"].add(project.id)
    return found
