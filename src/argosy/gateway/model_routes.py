"""Routes: which model answers a request, where that is not the one that was asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.gateway.principal import TIERS, Caller
from argosy.store import Directory, Tier

ANY = "*"
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
    to: str
    """The model that answers; none of its own routes is looked at."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route, ready to be compared with requests; None: whatever there is."""

    name: str
    to: str
    model: str | None
    """The model's own name."""
    headers: tuple[tuple[bytes, bytes | None], ...]
    """By name in lower case; None: any value."""
    tenants: frozenset[str] | None
    """Ids of organisations and projects."""
    tiers: frozenset[int] | None
    """Ranks."""
    flags: frozenset[str] | None
    unknown: tuple[str, ...]
    """Tenants that it names, and that are not there."""

    def fits(self, model: str, caller: Caller, headers: Mapping[bytes, bytes]) -> bool:
        """Whether it decides what the caller asks this model (by its own name) with these headers."""
        if not (
            (self.model is None or self.model == model)
            and (self.tiers is None or caller.tier in self.tiers)
            and (self.flags is None or not self.flags.isdisjoint(caller.flags))
            and (
                self.tenants is None
                or caller.project in self.tenants
                or caller.organisation in self.tenants
            )
        ):
            return False
        for name, value in self.headers:
            found = headers.get(name)
            if found is None or (value is not None and found != value):
                return False
        return True


def read_routes(
    configs: Sequence[RouteConfig], models: Mapping[str, str], directory: Directory
) -> tuple[Route, ...]:
    """The routes in their order; `models`: the own name of each model by each of its names."""
    ids = _ids(directory) if any(config.tenants for config in configs) else {}
    return tuple(_read(config, place, models, ids) for place, config in enumerate(configs))


def check_route(config: RouteConfig, served: Collection[str], *, accounts: bool) -> None:
    """Raise ValueError, saying what to change, when it can never be meant; `accounts`: there is a store of them."""
    for key, model in (("model", config.model), ("to", config.to)):
        if model is not None and model not in served:
            known = ", ".join(sorted(served))
            raise ValueError(f"{key}: {model!r} is not served here; name one of {known}")
    if not accounts and (config.tenants or config.tiers or config.flags):
        raise ValueError("tenants, tiers and flags are those of accounts; add a store")
    names = [name.lower() for name in config.headers or ()]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"headers: {min(twice)!r} is there twice (case does not matter); keep one")


def route_name(config: RouteConfig, place: int) -> str:
    """What it is called."""
    return f"routes[{place}]" if config.name is None else config.name


def _read(
    config: RouteConfig, place: int, models: Mapping[str, str], ids: Mapping[str, set[str]]
) -> Route:
    tenants, tiers = config.tenants, config.tiers
    return Route(
        name=route_name(config, place),
        to=models[config.to],
        model=None if config.model is None else models[config.model],
        headers=tuple(
            (name.lower().encode(), None if value == ANY else value.encode())
            for name, value in (config.headers or {}).items()
        ),
        tenants=None
        if tenants is None
        else frozenset[str]().union(*(ids.get(name, ()) for name in tenants)),
        tiers=None if tiers is None else frozenset(map(TIERS.index, tiers)),
        flags=None if config.flags is None else frozenset(config.flags),
        unknown=tuple(name for name in tenants or () if name not in ids),
    )


def _ids(directory: Directory) -> Mapping[str, set[str]]:
    """Ids of organisations by what they may be called in a route, and of projects."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    owners: dict[str, tuple[str, str]] = {}
    for organisation in directory.organisations:
        if organisation.archived_at is None:
            owners[organisation.id] = organisation.id, organisation.name
            for owner in owners[organisation.id]:
                found[owner].add(organisation.id)
    for project in directory.projects:
        if project.archived_at is None:
            for owner in owners.get(project.organisation, ()):
                for name in (project.id, project.name):
                    found[f"{owner}/{name}"].add(project.id)
    return found
