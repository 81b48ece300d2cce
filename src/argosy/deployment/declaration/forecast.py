"""Forecast of what a change of the declaration does to requests, as the twin makes it and the admin API returns it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from argosy.deployment.declaration.config import FleetConfig, PoolConfig
from argosy.policy import RoutingPolicyName

MAX_SEQS_OPTIONS = {
    "argosy": "max_seqs",
    "vllm": "max_num_seqs",
    "sglang": "max_running_requests",
    "llama-cpp": "parallel",
}
"""Options of the built-in engines that limit the sequences that a replica runs at once."""


class PoolVariation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Other settings of a pool and its model. None keeps a setting."""

    pool: Annotated[str, Meta(min_length=1, max_length=200)]
    replicas: Annotated[int, Meta(ge=1, le=1000)] | None = None
    """Number of replicas, which no autoscaler changes."""
    routing: RoutingPolicyName | None = None
    max_seqs: Annotated[int, Meta(ge=1, le=4096)] | None = None
    """Sequences that a replica runs at once."""

    def apply(self, config: FleetConfig) -> FleetConfig:
        """Return a declaration with these settings. Raises ValueError if there is no such pool."""
        pool = config.find_pool(self.pool)
        if pool is None:
            known = ", ".join(each.name for each in config.pools) or "none"
            raise ValueError(f"there is no pool {self.pool!r}; use one of: {known}")
        changes: dict[str, Any] = {}
        if self.replicas is not None:
            changes = {"replicas": self.replicas, "min_replicas": None, "max_replicas": None}
            changes["autoscaling"] = msgspec.structs.replace(pool.autoscaling, mode="off")
        if self.max_seqs is not None:
            changes["options"] = _set_max_seqs(pool, self.max_seqs)
        models = [
            msgspec.structs.replace(model, routing=self.routing)
            if self.routing is not None and model.name == pool.model
            else model
            for model in config.models
        ]
        changed = msgspec.structs.replace(pool, **changes)
        pools = tuple(changed if each is pool else each for each in config.pools)
        return msgspec.structs.replace(config, pools=pools, models=models)


def _set_max_seqs(pool: PoolConfig, value: int) -> dict[str, Any]:
    """Return the options of a pool with a limit of sequences. Raises ValueError if its engine's option is unknown."""
    option = MAX_SEQS_OPTIONS.get(pool.engine)
    if option is None:
        raise ValueError(f"the option of the engine {pool.engine!r} for max_seqs is not known")
    dashed = option.replace("_", "-")
    return {**pool.options, dashed if dashed in pool.options else option: value}


class ForecastRange(msgspec.Struct, frozen=True):
    """Value of a figure over the seeds."""

    mean: float
    low: float
    high: float


class ForecastFigure(msgspec.Struct, frozen=True, kw_only=True):
    """Figure of a pool at present and as declared."""

    name: str
    unit: str
    """Unit behind the number, such as `ms`; `$` stands before it."""
    present: ForecastRange | None
    """None if nothing runs at present."""
    declared: ForecastRange


class PoolForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of one pool."""

    pool: str
    model: str
    traffic: Literal["ledger", "statistics"]
    """Where the requests are from."""
    requests: int
    """Requests of each run."""
    duration_s: float
    """Time in which they arrive."""
    calibration: str
    """How the steps of the engine are priced, and how well the present pool agrees with the ledger."""
    figures: tuple[ForecastFigure, ...]
    sentence: str
    """The largest change."""


class ChangeForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of all changes of a declaration."""

    simulated: tuple[str, ...]
    """Paths of the changed settings that the runs differ in."""
    without_effect: tuple[str, ...]
    """Paths of the changed settings that change no figure."""
    seeds: int
    pools: tuple[PoolForecast, ...]
    sentence: str
    """The largest change of all pools, or that nothing changes."""
