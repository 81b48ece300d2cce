"""The models that a gateway serves: public names and aliases, who may use them, and their pools."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from argosy.gateway.caller import Caller
from argosy.gateway.identity import check_model, may_use
from argosy.gateway.replicas import Pool
from argosy.protocol import ApiError, ModelCard, ModelList
from argosy.store import Directory, Limit, Price

T = TypeVar("T", Limit, Price)


class Models:
    """All public names, each with the pool that answers for it."""

    def __init__(self, named: Mapping[str, Pool]) -> None:
        self._named = named
        self._created = int(time.time())
        self.pools = list({pool.model: pool for pool in named.values()}.values())

    def pool(self, name: str, caller: Caller) -> Pool:
        """The pool for a model that the caller asked for. Raises ApiError 404 or 403."""
        pool = self._named.get(name)
        check_model(caller, name, name if pool is None else pool.model)
        if pool is None:
            raise _not_served(name)
        return pool

    def only(self, caller: Caller) -> Pool:
        """The pool for who names no model, where there is no choice. Raises ApiError 400."""
        if len(self.pools) == 1:
            return self.pool(self.pools[0].model, caller)
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
        return ModelCard(
            id=name,
            created=self._created,
            root=pool.model,
            max_model_len=pool.max_model_len or 0,
        )

    def cards(self, caller: Caller) -> ModelList:
        """What is told of all that the caller may use."""
        cards = [
            self.card(name, caller)
            for name, pool in self._named.items()
            if may_use(caller, name, pool.model)
        ]
        first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
        return ModelList(data=cards, first_id=first, last_id=last)

    def _meant(self, term: T) -> T:
        pool = self._named.get(term.model or "")  # None: of all models
        return term if pool is None else msgspec.structs.replace(term, model=pool.model)


def _not_served(name: str) -> ApiError:
    message = f"The model {name[:200]!r} is not served here. See /v1/models."
    return ApiError(404, "model_not_found", message, param="model")
