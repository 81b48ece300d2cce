"""Operators' decisions about replicas: found, stored or kept in memory, and applied to the pools."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import structlog
from msgspec import UNSET, UnsetType

from argosy.gateway.model_registry.model_router import ModelRouter
from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.process import run_in_daemon_thread
from argosy.store import NotFoundError, ReplicaSetting, ReplicaState, Store

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class ReplicaChange(msgspec.Struct, frozen=True, kw_only=True):
    """Change of replicas that an operator wants."""

    action: str
    """Verb for the audit log, such as `drain`."""
    state: ReplicaState | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    grace_s: float = 0.0
    reason: str = ""


class ReplicaAdmin:
    """Lists replicas and applies operators' decisions. Not thread-safe: use it from one event loop.

    Args:
        router: The pools.
        store: Where decisions are kept for all gateways. None keeps them in the memory of this one.
    """

    def __init__(self, router: ModelRouter, store: Store | None) -> None:
        self.models = router
        """The models with their pools."""
        self._store = store

    @property
    def is_persistent(self) -> bool:
        """Whether decisions survive this gateway and apply to all gateways of the store."""
        return self._store is not None

    def pools(self, model: str | None = None) -> list[Pool]:
        """Return the pools of all models, or of one, with one pool for each version.

        Raises:
            NotFoundError: No pool has this model.
        """
        pools = [pool for pool in self.models.all_pools if model in {None, pool.model}]
        if model is not None and not pools:
            names = ", ".join(pool.model for pool in self.models.pools)
            raise NotFoundError(f"There is no model {model[:200]!r}. Use one of: {names}.")
        return pools

    def replicas(self, model: str | None = None) -> Iterator[tuple[Pool, ReplicaEndpoint]]:
        """Yield the replicas of all pools, or of one model. Raises NotFoundError for an unknown model."""
        return ((pool, replica) for pool in self.pools(model) for replica in pool.replicas.values())

    def find(self, name: str, model: str | None) -> list[tuple[Pool, ReplicaEndpoint]]:
        """Return the replicas with this name, in one pool or in all. Raises NotFoundError if there is none."""
        found = [each for each in self.replicas(model) if each[1].name == name]
        if not found:
            known = sorted({replica.name for _, replica in self.replicas(model)})[:20]
            raise NotFoundError(
                f"There is no replica {name[:200]!r}. Use one of: {', '.join(known)}."
            )
        return found

    async def change(
        self, name: str, model: str | None, change: ReplicaChange, actor: str
    ) -> list[tuple[Pool, ReplicaEndpoint]]:
        """Apply a decision to the replicas with this name, in one pool or in all, and return them.

        Raises:
            NotFoundError: No replica has this name.
            ValueError: A field is invalid.
            StoreError: The decision cannot be stored. Nothing was changed.
        """
        changed = self.find(name, model)
        for pool, replica in changed:
            decision = await self._store_change(pool.model, replica, change, actor)
            self.models.apply_decision(*decision)
            log.info(
                "replica_setting_changed",
                model=pool.model,
                replica=name,
                action=change.action,
                actor=actor,
                reason=change.reason,
                persistent=self.is_persistent,
            )
        return changed

    async def record_sleep(
        self, model: str, replica: str, level: int, reason: str, actor: str
    ) -> None:
        """Record in the store that an operator changed the sleep of a replica. Raises StoreError."""
        if self._store is not None:
            settings = self._store.replica_settings
            await run_in_daemon_thread(settings.record_sleep, model, replica, level, reason, actor)

    async def _store_change(
        self, model: str, replica: ReplicaEndpoint, change: ReplicaChange, actor: str
    ) -> tuple[ReplicaSetting, float]:
        """Return the decision, and the time on the monotonic clock at which it is stored."""
        if self._store is not None:
            settings = self._store.replica_settings
            fields = msgspec.structs.asdict(change)
            action = fields.pop("action")

            def change_setting() -> tuple[ReplicaSetting, float]:
                setting = settings.change_setting(
                    model, replica.name, action, actor=actor, **fields
                )
                return setting, time.monotonic()

            return await run_in_daemon_thread(change_setting)
        current, state, weight = replica.admin.setting, change.state, change.weight
        setting = ReplicaSetting(
            id=f"{model}/{replica.name}",
            model=model,
            replica=replica.name,
            state=state if state is not UNSET else current.state if current else None,
            weight=weight if weight is not UNSET else current.weight if current else None,
            grace_s=change.grace_s,
            reason=change.reason,
            changed_at=time.time(),
            changed_by=actor,
        )
        return setting, time.monotonic()
