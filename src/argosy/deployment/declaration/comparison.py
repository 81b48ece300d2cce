"""Comparison of two declarations: each difference, and its effect on running gateways and replicas."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from argosy.deployment.declaration.config import FleetConfig, PoolConfig
from argosy.deployment.declaration.documents import fields_of, to_document
from argosy.deployment.declaration.replica_command import replica_digest
from argosy.deployment.declaration.validation import GATEWAY_POOL
from argosy.deployment.settings.gateway_config import RELOADABLE_SETTINGS

_CONTROLLER_SETTINGS = frozenset({"fleet", "controller", "objectives", "ray"})
_MODEL_IDENTITY = frozenset({"source", "revision", "digest"})
_POOL_COUNTS = ("replicas", "min_replicas", "max_replicas")


class ChangeAction(enum.StrEnum):
    """Kind of difference."""

    ADD = "add"
    CHANGE = "change"
    REMOVE = "remove"


class ChangeEffect(enum.StrEnum):
    """Effect of a difference on what runs."""

    NONE = "none"
    """Nothing that runs is disturbed."""
    GATEWAY_RELOAD = "gateway reload"
    """The gateways apply it while they run."""
    GATEWAY_RESTART = "gateway restart"
    """The gateways are restarted one after another."""
    GATEWAYS_STARTED = "gateways started"
    GATEWAYS_STOPPED = "gateways stopped"
    REPLICAS_STARTED = "replicas started"
    REPLICAS_STOPPED = "replicas stopped"
    REPLICAS_REPLACED = "replicas replaced"
    REPLICAS_ROLLED_OUT = "replicas rolled out"
    """New replicas are compared with the old ones, which stay until the rollout has ended."""


class PlannedChange(msgspec.Struct, frozen=True, kw_only=True):
    """A difference between the running declaration and a new one.

    Several changes may replace the same replicas. They are replaced once.
    """

    path: str
    """Path of the setting, with the names of list items: `pools[chat].options.max_seqs`."""
    action: ChangeAction
    old: Any = None
    """Old value, as in a declaration; None if there is none."""
    new: Any = None
    """New value; None if there is none."""
    effect: ChangeEffect
    pools: tuple[str, ...] = ()
    """Pools whose replicas are started, stopped or replaced."""
    count: int = 0
    """Number of replicas, or of gateways, that are started, stopped or replaced."""
    at_once: int = 0
    """How many of the replicas may be in replacement at the same time."""
    max_unavailable: int = 0
    """How many of the replicas may be missing from service at the same time."""
    rollout: tuple[str, ...] = ()
    """Steps of the rollout, and what a person should know before it starts, one sentence each."""


class _Difference(NamedTuple):
    path: tuple[str, ...]
    """Names of settings, and names of list items in brackets: `("pools", "[chat]", "options")`."""
    old: Any
    """None if there is no old value."""
    new: Any

    @property
    def item(self) -> str:
        """The name of the list's item, such as `chat` of `pools[chat].options.max_seqs`, or of the mapping's."""
        return self.path[1].removeprefix("[").removesuffix("]") if len(self.path) > 1 else ""

    @property
    def setting(self) -> str:
        """The setting below the item of a list, such as `options` of `pools[chat].options.max_seqs`."""
        return self.path[2] if len(self.path) > 2 else ""


def compare_fleets(
    old: FleetConfig | None, new: FleetConfig, scaled: Mapping[str, int] | None = None
) -> tuple[PlannedChange, ...]:
    """Return all differences between two declarations, in the order of the declaration.

    Both are valid. `old` is None if nothing runs. `scaled` are the numbers of replicas that autoscalers have decided
    on, by pool.
    """
    if old is None:
        return tuple(_plan_first_start(new))
    effects = _Effects(old, new, scaled or {})
    return tuple(effects.plan(difference) for difference in _find_differences(old, new, ()))


def plan_upgrade(
    config: FleetConfig, running: Mapping[str, str], installed: str, scaled: Mapping[str, int]
) -> Iterator[PlannedChange]:
    """Yield the replacement of gateways, and of pools with the same settings, by those of the installed version.

    `running` are the versions that run, by pool. `scaled` is as in `compare_fleets`.
    """
    pools = [name for name in running if name != GATEWAY_POOL]
    if GATEWAY_POOL in running:
        difference = _Difference(("version",), running[GATEWAY_POOL], installed)
        yield _build_change(difference, ChangeEffect.GATEWAY_RESTART)
    if pools:
        versions = ", ".join(dict.fromkeys(running[name] for name in pools))
        difference = _Difference(("version",), versions, installed)
        yield _Effects(config, config, scaled).plan_upgrade(difference, pools)


def _plan_first_start(new: FleetConfig) -> Iterator[PlannedChange]:
    """Yield every setting of a fleet of which nothing runs yet."""
    for field in fields_of(type(new)):
        value = getattr(new, field.name)
        if field.name == "pools":
            for pool in value:
                difference = _Difference(("pools", f"[{pool.name}]"), None, pool)
                yield _plan_count(difference, pool.name, count_replicas(pool))
        elif field.name == "models":
            for model in value:
                yield _build_change(
                    _Difference(("models", f"[{model.name}]"), None, model), ChangeEffect.NONE
                )
        elif field.name == "gateways":
            effect = ChangeEffect.GATEWAYS_STARTED if value else ChangeEffect.NONE
            yield _build_change(_Difference(("gateways",), None, value), effect, count=value)
        elif field.name in to_document(new):
            yield _build_change(_Difference((field.name,), None, value), ChangeEffect.NONE)


class _Effects:
    """Effects of the differences between two declarations."""

    def __init__(self, old: FleetConfig, new: FleetConfig, scaled: Mapping[str, int]) -> None:
        self._old = old
        self._new = new
        self._scaled = scaled
        self._counted_pools = set[str]()
        """Pools whose change of the number of replicas is planned. Several settings may declare it."""

    def plan(self, difference: _Difference) -> PlannedChange:
        """Return a difference with its effect."""
        section, name = difference.path[0], difference.item
        if section == "pools":
            return self._plan_pool(difference)
        if section == "models" and difference.setting in _MODEL_IDENTITY:
            models = [
                msgspec.structs.replace(model, **{difference.setting: difference.new})
                if model.name == name
                else model
                for model in self._old.models
            ]
            return self._plan_replacement(
                difference, self._replaced_pools("model", name, models=models)
            )
        if section == "kubernetes":
            settings = {name: getattr(self._new.kubernetes, name)}
            kubernetes = msgspec.structs.replace(self._old.kubernetes, **settings)
            pools = self._replaced_pools("launcher", "kubernetes", kubernetes=kubernetes)
            return self._plan_replacement(difference, pools)
        if section == "engines":
            return self._plan_engine(difference)
        if section == "gateways":
            count = difference.new - difference.old
            effect = ChangeEffect.GATEWAYS_STARTED if count > 0 else ChangeEffect.GATEWAYS_STOPPED
            return _build_change(difference, effect, count=abs(count))
        if section in _CONTROLLER_SETTINGS:
            return _build_change(difference, ChangeEffect.NONE)
        if section in RELOADABLE_SETTINGS:
            return _build_change(difference, ChangeEffect.GATEWAY_RELOAD)
        return _build_change(difference, ChangeEffect.GATEWAY_RESTART)

    def _plan_pool(self, difference: _Difference) -> PlannedChange:
        if not difference.item:
            return _build_change(difference, ChangeEffect.NONE)  # their order
        name, setting = difference.item, difference.setting
        old, new = self._old.find_pool(name), self._new.find_pool(name)
        if old is None or new is None:
            return _plan_count(
                difference, name, count_replicas(new) - count_replicas(old, self._scaled)
            )
        if setting == "spares":
            return _plan_count(difference, name, new.spares - old.spares)
        if setting == "sleep":
            return _build_change(difference, ChangeEffect.GATEWAY_RELOAD)
        if setting in _POOL_COUNTS and not new.is_autoscaled:
            present = count_serving(old, self._scaled)
            added = 0 if name in self._counted_pools else new.initial_replicas - present
            self._counted_pools.add(name)
            return _plan_count(difference, name, added)
        changed = msgspec.structs.replace(old, **{setting: getattr(new, setting)})
        if setting in {"model", "engine"} or (
            replica_digest(self._old, old) != replica_digest(self._old, changed)
        ):
            return self._plan_replacement(difference, [name])
        return _build_change(difference, ChangeEffect.NONE)

    def _plan_engine(self, difference: _Difference) -> PlannedChange:
        name = difference.item
        engine = self._new.engines.get(name)
        if engine is None or name not in self._old.engines:
            return _build_change(difference, ChangeEffect.NONE)  # no running replica uses it
        if difference.setting == "kind":
            return _build_change(difference, ChangeEffect.GATEWAY_RELOAD)
        engines = {**self._old.engines, name: engine}
        pools = self._replaced_pools("engine", name, engines=engines)
        return self._plan_replacement(difference, pools)

    def _replaced_pools(self, setting: str, value: str, **sections: object) -> list[str]:
        """Return the pools with a setting whose replicas differ if sections of the old declaration change."""
        changed = msgspec.structs.replace(self._old, **sections)
        return [
            pool.name
            for pool in self._old.pools
            if getattr(pool, setting) == value
            and replica_digest(self._old, pool) != replica_digest(changed, pool)
        ]

    def _plan_replacement(self, difference: _Difference, names: Sequence[str]) -> PlannedChange:
        """Plan the replacement of the replicas of those of the pools that remain."""
        new = [pool for pool in map(self._new.find_pool, names) if pool is not None]
        if not new:
            return _build_change(difference, ChangeEffect.NONE)
        old = [pool for pool in map(self._old.find_pool, names) if pool is not None]
        counts = {
            pool.name: count_replicas(self._old.find_pool(pool.name), self._scaled) for pool in new
        }
        if all(pool.rollout is not None for pool in (*old, *new)):
            return _build_change(
                difference,
                ChangeEffect.REPLICAS_ROLLED_OUT,
                pools=tuple(counts),
                count=sum(counts.values()),
                rollout=tuple(each for pool in new for each in self._describe_rollout(pool)),
            )
        return self._replace_one_by_one(difference, new, counts)

    def plan_upgrade(self, difference: _Difference, names: Sequence[str]) -> PlannedChange:
        """Plan the replacement of all replicas of pools, which is no rollout."""
        pools = [pool for pool in self._new.pools if pool.name in names]
        counts = {pool.name: count_replicas(pool, self._scaled) for pool in pools}
        return self._replace_one_by_one(difference, pools, counts)

    def _replace_one_by_one(
        self, difference: _Difference, new: Sequence[PoolConfig], counts: Mapping[str, int]
    ) -> PlannedChange:
        surges = {pool.name: pool.max_surge_count(pool.initial_replicas) for pool in new}
        out = {
            pool.name: pool.max_unavailable_count(pool.initial_replicas, pool.spares)
            for pool in new
        }
        return _build_change(
            difference,
            ChangeEffect.REPLICAS_REPLACED,
            pools=tuple(counts),
            count=sum(counts.values()),
            at_once=sum(min(count, surges[name] + out[name]) for name, count in counts.items()),
            max_unavailable=sum(min(count, out[name]) for name, count in counts.items()),
        )

    def _describe_rollout(self, pool: PoolConfig) -> tuple[str, ...]:
        if pool.rollout is None:
            return ()
        plan = pool.rollout.build_plan(has_objectives=self._new.objectives.has_latency)
        steps = f"The pool {pool.name} gets a rollout by {plan.describe_steps()}."
        return (steps, *plan.describe_risks(pool.initial_replicas))


def count_serving(pool: PoolConfig, scaled: Mapping[str, int]) -> int:
    """Return the number of a pool's replicas without spares. `scaled` has that of autoscaled pools."""
    count = pool.initial_replicas
    return scaled.get(pool.name, count) if pool.is_autoscaled else count


def count_replicas(pool: PoolConfig | None, scaled: Mapping[str, int] | None = None) -> int:
    """Return the number of a pool's replicas with spares."""
    if pool is None:
        return 0
    count = count_serving(pool, scaled or {})
    return count + pool.count_spares(count)


def _plan_count(difference: _Difference, pool: str, added: int) -> PlannedChange:
    """Plan the start of `added` replicas of a pool, or the stop of some if it is negative."""
    if added == 0:
        return _build_change(difference, ChangeEffect.NONE)
    effect = ChangeEffect.REPLICAS_STARTED if added > 0 else ChangeEffect.REPLICAS_STOPPED
    return _build_change(difference, effect, pools=(pool,), count=abs(added), at_once=abs(added))


def _build_change(
    difference: _Difference,
    effect: ChangeEffect,
    **fields: Any,  # noqa: ANN401 - of the change
) -> PlannedChange:
    path, old, new = difference
    action = ChangeAction.CHANGE
    if old is None or new is None:
        action = ChangeAction.ADD if old is None else ChangeAction.REMOVE
    return PlannedChange(
        path="".join(key if key.startswith("[") else f".{key}" for key in path).removeprefix("."),
        action=action,
        old=to_document(old),
        new=to_document(new),
        effect=effect,
        **fields,
    )


def _find_differences(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[_Difference]:  # noqa: ANN401
    """Yield the differences between two values, as deep in them as possible."""
    if old == new:
        return
    if isinstance(old, msgspec.Struct) and type(old) is type(new):
        names = {field.encode_name: field.name for field in fields_of(type(old))}
        for key, name in names.items():
            yield from _find_differences(getattr(old, name), getattr(new, name), (*path, key))
        return
    before, after = _entries(old), _entries(new)
    if before is None or after is None:
        yield _Difference(path, old, new)
        return
    for key in {**before, **after}:
        yield from _find_differences(before.get(key), after.get(key), (*path, key))
    if not isinstance(old, dict):
        kept = [
            [key[1:-1] for key in items if key in before and key in after]
            for items in (before, after)
        ]
        if kept[0] != kept[1]:
            yield _Difference(path, *kept)


def _entries(value: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Return the items of a mapping, or of a list by their names in brackets. None if it is neither."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, (list, tuple)):
        return None
    names = [getattr(item, "name", None) or getattr(item, "url", None) for item in value]
    entries = {f"[{name}]": item for name, item in zip(names, value, strict=True) if name}
    return entries if len(entries) == len(value) else None
