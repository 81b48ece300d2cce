"""The models that a gateway serves: public names and aliases, who may use them, and their pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import structlog

from argosy.gateway.auth import can_use_model, check_model_access
from argosy.gateway.model_routes import ModelRoute, RouteConfig, compile_routes
from argosy.gateway.pool import Pool
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError, ModelCard, ModelList
from argosy.store import AccountSnapshot, Limit, Price

T = TypeVar("T", Limit, Price)
MAX_LOGGED_MODELS = 10
"""Of what is not there, so many are named in the log."""
log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class RouteTarget(NamedTuple):
    """Who answers a request."""

    pool: Pool
    route_name: str = ""
    """Name of the route that said so; empty: it is the model that was asked for."""


class ModelRouter:
    """All public names, each with the pool that answers for it, and the routes that lead elsewhere."""

    def __init__(
        self, pools_by_name: Mapping[str, Pool], routes: Sequence[RouteConfig] = ()
    ) -> None:
        """See `take`."""
        self._created_at = int(time.time())
        self._logged_unknown_tenants: dict[str, tuple[str, ...]] = {}
        """Tenants that routes name in vain, by the route's name, as the log was told."""
        self._logged_unknown_models: set[str] = set()
        """Models that limits and prices name in vain, as it was told, too."""
        self.replace_models(pools_by_name, routes)

    def replace_models(
        self, pools_by_name: Mapping[str, Pool], routes: Sequence[RouteConfig]
    ) -> None:
        """Serve these from now on, and no others; `routes` name only models of `named`.

        What is `meant` may be something else then, and tenants of routes are to be looked for again: see `update`.
        """
        self._pools_by_name = pools_by_name
        self._targets = {name: RouteTarget(pool) for name, pool in pools_by_name.items()}
        self.pools = list({pool.model: pool for pool in pools_by_name.values()}.values())
        self._configured = pools_by_name, routes
        self._routes = self._build_routes(AccountSnapshot())

    def apply_snapshot(self, snapshot: AccountSnapshot) -> None:
        """Look for the tenants of routes among these from now on, and say what names nothing here."""
        self.prepare_snapshot(snapshot)()

    def prepare_snapshot(self, snapshot: AccountSnapshot) -> Callable[[], None]:
        """What does as `update` does, at once: all work is done by then, in any thread.

        It is for no longer than until the next `take`.
        """
        routes = self._build_routes(snapshot)
        unknown = {route.name: route.unknown_tenants for route in routes if route.unknown_tenants}
        terms: tuple[Limit | Price, ...] = (*snapshot.limits, *snapshot.prices)
        strange = {term.model for term in terms if term.model} - self._pools_by_name.keys()

        def take() -> None:
            if unknown and unknown != self._logged_unknown_tenants:
                log.warning("unknown_tenant_in_config", routes=unknown)
            if strange - self._logged_unknown_models:
                some = sorted(strange)[:MAX_LOGGED_MODELS]
                log.warning("unknown_model_in_limits_or_prices", models=some, count=len(strange))
            self._routes, self._logged_unknown_tenants, self._logged_unknown_models = (
                routes,
                unknown,
                strange,
            )

        return take

    def resolve_target(
        self, name: str, principal: Principal, headers: Mapping[bytes, bytes]
    ) -> RouteTarget:
        """Who answers a caller who asks this model with these headers. Raises ApiError 404 or 403.

        They need leave for the model that they ask for, not for the one that a route leads to.
        """
        asked = self._targets.get(name)
        check_model_access(principal, name, name if asked is None else asked.pool.model)
        if asked is None:
            raise _model_not_found(name)
        for route in self._routes:
            if route.matches(asked.pool.model, principal, headers):
                log.info("request_routed", asked=name, model=route.target_model, route=route.name)
                return RouteTarget(self._pools_by_name[route.target_model], route.name)
        return asked

    def resolve_only_model(
        self, principal: Principal, headers: Mapping[bytes, bytes]
    ) -> RouteTarget:
        """Who answers those who name no model, where there is no choice. Raises ApiError 400."""
        if len(self.pools) == 1:
            return self.resolve_target(self.pools[0].model, principal, headers)
        message = "Missing parameter 'model'. Add it: there are several. See /v1/models."
        raise ApiError(400, "missing_required_parameter", message, param="model")

    def resolve_aliases(self, snapshot: AccountSnapshot) -> AccountSnapshot:
        """With limits and prices of an alias as those of the model that it stands for now."""
        return msgspec.structs.replace(
            snapshot,
            limits=tuple(map(self._resolve_alias, snapshot.limits)),
            prices=tuple(map(self._resolve_alias, snapshot.prices)),
        )

    def get_model(self, name: str, principal: Principal) -> ModelCard:
        """What is told of a model. Raises ApiError 404."""
        pool = self._pools_by_name.get(name)
        if pool is None or not can_use_model(principal, name, pool.model):
            raise _model_not_found(name)
        return self._model_card(name, pool)

    def list_models(self, principal: Principal) -> ModelList:
        """What is told of all that the caller may use."""
        cards = [
            self._model_card(name, pool)
            for name, pool in self._pools_by_name.items()
            if can_use_model(principal, name, pool.model)
        ]
        first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
        return ModelList(data=cards, first_id=first, last_id=last)

    def _model_card(self, name: str, pool: Pool) -> ModelCard:
        most = pool.max_model_len
        return ModelCard(id=name, created=self._created_at, root=pool.model, max_model_len=most)

    def _build_routes(self, snapshot: AccountSnapshot) -> tuple[ModelRoute, ...]:
        named, configs = self._configured  # one of each `take`, whatever thread this is
        models = {name: pool.model for name, pool in named.items()}
        return compile_routes(configs, models, snapshot)

    def _resolve_alias(self, term: T) -> T:
        pool = self._pools_by_name.get(term.model or "")  # None: of all models
        if pool is None or pool.model == term.model:
            return term
        return msgspec.structs.replace(term, model=pool.model)


def _model_not_found(name: str) -> ApiError:
    message = f"The model {name[:200]!r} is not served here. See /v1/models."
    return ApiError(404, "model_not_found", message, param="model")
