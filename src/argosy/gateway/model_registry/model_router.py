"""The models that a gateway serves: public names and aliases, who may use them, and their pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from argosy.gateway.auth import check_model, may_use
from argosy.gateway.model_routes import Route, RouteConfig, read_routes
from argosy.gateway.pool import Pool
from argosy.gateway.principal import Caller
from argosy.protocol import ApiError, ModelCard, ModelList
from argosy.store import Directory, Limit, Price

T = TypeVar("T", Limit, Price)
TOLD = 10
"""Of what is not there, so many are named in the log."""
log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class Target(NamedTuple):
    """Who answers a request."""

    pool: Pool
    route: str = ""
    """Name of the route that said so; empty: it is the model that was asked for."""


class Models:
    """All public names, each with the pool that answers for it, and the routes that lead elsewhere."""

    def __init__(self, named: Mapping[str, Pool], routes: Sequence[RouteConfig] = ()) -> None:
        """See `take`."""
        self._created = int(time.time())
        self._unknown: dict[str, tuple[str, ...]] = {}
        """Tenants that routes name in vain, by the route's name, as the log was told."""
        self._strange: set[str] = set()
        """Models that limits and prices name in vain, as it was told, too."""
        self.take(named, routes)

    def take(self, named: Mapping[str, Pool], routes: Sequence[RouteConfig]) -> None:
        """Serve these from now on, and no others; `routes` name only models of `named`.

        What is `meant` may be something else then, and tenants of routes are to be looked for again: see `update`.
        """
        self._named = named
        self._targets = {name: Target(pool) for name, pool in named.items()}
        self.pools = list({pool.model: pool for pool in named.values()}.values())
        self._offered = named, routes
        self._routes = self._read(Directory())

    def update(self, directory: Directory) -> None:
        """Look for the tenants of routes among these from now on, and say what names nothing here."""
        self.prepare(directory)()

    def prepare(self, directory: Directory) -> Callable[[], None]:
        """What does as `update` does, at once: all work is done by then, in any thread.

        It is for no longer than until the next `take`.
        """
        routes = self._read(directory)
        unknown = {route.name: route.unknown for route in routes if route.unknown}
        terms: tuple[Limit | Price, ...] = (*directory.limits, *directory.prices)
        strange = {term.model for term in terms if term.model} - self._named.keys()

        def take() -> None:
            if unknown and unknown != self._unknown:
                log.warning("tenants_unknown", routes=unknown)
            if strange - self._strange:
                some = sorted(strange)[:TOLD]
                log.warning("models_of_terms_unknown", models=some, count=len(strange))
            self._routes, self._unknown, self._strange = routes, unknown, strange

        return take

    def target(self, name: str, caller: Caller, headers: Mapping[bytes, bytes]) -> Target:
        """Who answers a caller who asks this model with these headers. Raises ApiError 404 or 403.

        They need leave for the model that they ask for, not for the one that a route leads to.
        """
        asked = self._targets.get(name)
        check_model(caller, name, name if asked is None else asked.pool.model)
        if asked is None:
            raise _not_served(name)
        for route in self._routes:
            if route.fits(asked.pool.model, caller, headers):
                log.info("routed", asked=name, model=route.to, route=route.name)
                return Target(self._named[route.to], route.name)
        return asked

    def only(self, caller: Caller, headers: Mapping[bytes, bytes]) -> Target:
        """Who answers those who name no model, where there is no choice. Raises ApiError 400."""
        if len(self.pools) == 1:
            return self.target(self.pools[0].model, caller, headers)
        message = "Missing parameter 'model'. Add it: there are several. See /v1/models."
        raise ApiError(400, "missing_required_parameter", message, param="model")

    def meant(self, directory: Directory) -> Directory:
        """With limits and prices of an alias as those of the model that it stands for now."""
        return msgspec.structs.replace(
            directory,
            limits=tuple(map(self._meant, directory.limits)),
            prices=tuple(map(self._meant, directory.prices)),
        )

    def card(self, name: str, caller: Caller) -> ModelCard:
        """What is told of a model. Raises ApiError 404."""
        pool = self._named.get(name)
        if pool is None or not may_use(caller, name, pool.model):
            raise _not_served(name)
        return self._card(name, pool)

    def cards(self, caller: Caller) -> ModelList:
        """What is told of all that the caller may use."""
        cards = [
            self._card(name, pool)
            for name, pool in self._named.items()
            if may_use(caller, name, pool.model)
        ]
        first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
        return ModelList(data=cards, first_id=first, last_id=last)

    def _card(self, name: str, pool: Pool) -> ModelCard:
        most = pool.max_model_len
        return ModelCard(id=name, created=self._created, root=pool.model, max_model_len=most)

    def _read(self, directory: Directory) -> tuple[Route, ...]:
        named, configs = self._offered  # one of each `take`, whatever thread this is
        models = {name: pool.model for name, pool in named.items()}
        return read_routes(configs, models, directory)

    def _meant(self, term: T) -> T:
        pool = self._named.get(term.model or "")  # None: of all models
        if pool is None or pool.model == term.model:
            return term
        return msgspec.structs.replace(term, model=pool.model)


def _not_served(name: str) -> ApiError:
    message = f"The model {name[:200]!r} is not served here. See /v1/models."
    return ApiError(404, "model_not_found", message, param="model")
