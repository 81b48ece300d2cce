"""Routing of a requested model name to a pool, through adapters, aliases and routes, and the list of models."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

import msgspec
import structlog

from argosy.deployment import (
    MAX_MODEL_NAME_LENGTH,
    ContentRule,
    DeclaredFlag,
    PromptConfig,
    RequestConditions,
    RequestSetting,
    RouteConfig,
    compile_content_rule,
)
from argosy.gateway.auth import can_use_model, check_model_access, has_role
from argosy.gateway.feature_flags import FeatureFlags
from argosy.gateway.model_registry.adapter_index import (
    AdapterIndex,
    AdapterReplica,
    DeclaredAdapter,
    resolve_owners,
    select_version,
)
from argosy.gateway.model_registry.prompt_index import PromptIndex, resolve_prompt_owners
from argosy.gateway.model_registry.prompt_router import (
    PromptRouter,
    RouteDecision,
    degrade,
    describe_load,
)
from argosy.gateway.model_routes import RULE_SETTINGS, RequestRule, compile_rules, find_subject
from argosy.gateway.pool import Pool, PoolVersions, ReplicaEndpoint
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import MODEL_VERSION_HEADER, AssignedVersion
from argosy.gateway.request_fields import RequestFields
from argosy.policy import count_homes, select_homes
from argosy.policy.traffic import TrafficRoute, TrafficSubject, sticky_key
from argosy.protocol import ApiError, ModelCard, ModelList, TaskName
from argosy.store import AccountSnapshot, Adapter, GatewayFlag, Limit, Price, ReplicaSetting

T = TypeVar("T", Limit, Price)
CANDIDATE = b"candidate"
"""Value of the header `MODEL_VERSION_HEADER` by which administrators ask for the candidate of a rollout."""
WILDCARD = "*"
"""Character of an alias that stands for any text."""
WEIGHTS = "traffic"
"""Route name of requests whose model was selected by weight."""
FALLBACK = "fallback_models"
"""Route name of requests that a fallback model answers."""
CACHE_MISS = "\0cache"
"""Stands in `failed` for the cache, which has no answer of the age that a route permits."""
MAX_LOGGED_MODELS = 10
"""Maximum number of unknown models that one log event names."""
MAX_LISTED_MODELS = 20
"""Maximum number of models that an error lists."""
MAX_ROLLOUTS = 100
"""Rollouts of adapters that are measured at a time. The others wait."""
MAX_LOADED_ADAPTERS = 200
"""Maximum number of adapters that a server of another engine keeps loaded."""
log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class RouteTarget(NamedTuple):
    """Pool that answers a request."""

    pool: Pool
    route_name: str = ""
    """Name of the route that selected the pool, `WEIGHTS` or `FALLBACK`. Empty if it is that of the requested model."""
    reason: str = ""
    """Why the traffic settings of the requested model, or of the route's, selected the pool, for explanations."""
    version: AssignedVersion | None = None
    """Version of the model that the request is assigned to. None without rollouts."""
    passed_over: Pool | None = None
    """Pool that a fallback model answers for."""
    has_fallbacks: bool = False
    """Whether another model may answer if this one cannot."""
    adapter: Adapter | None = None
    """Adapter that answers, with the selected version as its digest. None if the model itself answers."""
    decisions: tuple[tuple[RequestRule, RouteDecision], ...] = ()
    """Decisions of the routes that depend on more than conditions of the request."""
    max_cached_age_s: float = 0.0
    """Age of the oldest cached answer that a route permits."""
    refusal: str = ""
    """Message with which a route refuses the request."""


class _Decision(NamedTuple):
    """Operator's decision about a replica."""

    setting: ReplicaSetting
    stored_at: float


class ModelRouter:
    """Maps public model names and aliases to pools, and applies routes to other models, which must all have a pool."""

    def __init__(
        self,
        pools_by_name: Mapping[str, Pool],
        rules: Sequence[RequestSetting] = (),
        adapters: Sequence[DeclaredAdapter] = (),
    ) -> None:
        self._created_at = int(time.time())
        self._logged_unknown_tenants: dict[str, tuple[str, ...]] = {}
        """Unknown tenants by the name of a rule, as last logged."""
        self._logged_unknown_models: set[str] = set()
        """Unknown models in limits and prices, as last logged."""
        self._snapshot_read_at = -math.inf
        self._registries_read_at = -math.inf
        self._decisions = dict[tuple[str, str], _Decision]()
        """Decisions that the last applied snapshot may lack, by model and replica."""
        self._prompts = PromptRouter()
        self.read_budget_used: Callable[[Principal, str], float] = lambda _principal, _model: 0.0
        """Returns the used part of the sender's budgets for a model, from 0 to 1. The server sets it."""
        self.replace_models(pools_by_name, rules, adapters)

    def replace_models(
        self,
        pools_by_name: Mapping[str, Pool],
        rules: Sequence[RequestSetting],
        adapters: Sequence[DeclaredAdapter] = (),
    ) -> None:
        """Replace all models, rules for requests and declared adapters.

        Call `resolve_aliases` and `apply_snapshot` again afterwards, since aliases may have changed and the tenants of
        rules are unresolved.
        """
        self._pools_by_name = pools_by_name
        self._targets = {name: RouteTarget(pool) for name, pool in pools_by_name.items()}
        self._wildcards = sorted((name for name in pools_by_name if WILDCARD in name), key=len)
        """Aliases with a wildcard, shortest first."""
        self.pools = list({pool.model: pool for pool in pools_by_name.values()}.values())
        """Pools of the stable versions."""
        self._configured = (
            pools_by_name,
            [
                (rule, compile_content_rule(rule) if isinstance(rule, ContentRule) else None)
                for rule in rules
                if isinstance(rule, RequestConditions)
            ],
            [rule for rule in rules if isinstance(rule, DeclaredFlag)],
        )
        self._declared_prompts = [rule for rule in rules if isinstance(rule, PromptConfig)]
        self.prompts = PromptIndex()
        """Prompts of the settings and the store."""
        self.rules, self.flags = self._build_rules(AccountSnapshot())
        """Rules for requests by their kind, in their order, and the feature flags that they read."""
        self._prompts.keep_routes({rule.name for rule in self.rules[RouteConfig]})
        self._declared_adapters = adapters
        self._registries_read_at = -math.inf
        self.declared_adapters: list[Adapter] = []
        """Adapters in the settings, with the ids of their owners."""
        self.prepare_registries(AccountSnapshot(read_at=-math.inf))()

    @property
    def all_pools(self) -> list[Pool]:
        """The pools of all versions of all models."""
        return [version for pool in self.pools for version in pool.all_versions]

    def apply_snapshot(self, snapshot: AccountSnapshot) -> None:
        """Resolve the tenants of rules in this snapshot, and log names that do not exist."""
        self.prepare_snapshot(snapshot)()

    def prepare_snapshot(self, snapshot: AccountSnapshot) -> Callable[[], None]:
        """Resolve a snapshot, and return a function that applies it and the replica settings in it. Thread-safe.

        The returned function is valid until the next `replace_models`.
        """
        rules, flags = self._build_rules(snapshot)
        unknown_tenants = {
            rule.name: rule.unknown_tenants
            for rule in itertools.chain.from_iterable(rules.values())
            if rule.unknown_tenants
        }
        _, unknown_owners = resolve_owners(self._declared_adapters, snapshot)
        unknown_tenants |= {f"adapter {name}": (owner,) for name, owner in unknown_owners.items()}
        _, unknown_owners = resolve_prompt_owners(self._declared_prompts, snapshot)
        unknown_tenants |= {f"prompt {name}": (owner,) for name, owner in unknown_owners.items()}
        terms: tuple[Limit | Price, ...] = (*snapshot.limits, *snapshot.prices)
        apply_registries = self.prepare_registries(snapshot)
        known_models = self._pools_by_name.keys() | {each.name for each in snapshot.adapters}
        unknown_models = {term.model for term in terms if term.model} - known_models
        replica_settings: dict[str, dict[str, ReplicaSetting]] = {}
        for setting in snapshot.replica_settings:
            replica_settings.setdefault(setting.model, {})[setting.replica] = setting

        def apply() -> None:
            if unknown_tenants and unknown_tenants != self._logged_unknown_tenants:
                log.warning("unknown_tenant_in_config", rules=unknown_tenants)
            if unknown_models - self._logged_unknown_models:
                logged_models = sorted(unknown_models)[:MAX_LOGGED_MODELS]
                log.warning(
                    "unknown_model_in_limits_or_prices",
                    models=logged_models,
                    count=len(unknown_models),
                )
            self.rules, self.flags = rules, flags
            self._logged_unknown_tenants = unknown_tenants
            self._logged_unknown_models = unknown_models
            apply_registries()
            self._snapshot_read_at = snapshot.read_at
            self._decisions = {
                key: decision
                for key, decision in self._decisions.items()
                if decision.stored_at > snapshot.read_at
            }
            for (model, replica), decision in self._decisions.items():
                replica_settings.setdefault(model, {})[replica] = decision.setting
            for pool in self.all_pools:
                settings = replica_settings.get(pool.model, {})
                pool.apply_settings(settings, time.monotonic(), time.time())

        return apply

    def prepare_registries(self, snapshot: AccountSnapshot) -> Callable[[], None]:
        """Index adapters and prompts of a snapshot, and return a function that applies them in order. Thread-safe."""
        declared, _ = resolve_owners(self._declared_adapters, snapshot)
        adapters = AdapterIndex([*snapshot.adapters, *declared])
        declared_prompts, _ = resolve_prompt_owners(self._declared_prompts, snapshot)
        prompts = PromptIndex(snapshot.prompts, declared_prompts)

        def apply() -> None:
            if snapshot.read_at >= self._registries_read_at:
                self._adapters, self._registries_read_at = adapters, snapshot.read_at
                self.declared_adapters, self.prompts = declared, prompts

        return apply

    def find_missing_adapters(self, now: float) -> list[tuple[ReplicaEndpoint, str]]:
        """Return the replicas that lack an adapter that they shall keep, with its digest."""
        missing = []
        compared = {adapter.id for adapter in self.list_rollouts()}
        for adapter in self._adapters:
            pool = self._pools_by_name.get(adapter.base_model)
            if pool is None:
                continue
            versions = [(adapter.digest, adapter.min_homes)]
            is_rolled_out = adapter.step_s is not None and adapter.id in compared
            if adapter.candidate is not None and (adapter.candidate_percent or is_rolled_out):
                versions.append((adapter.candidate, max(adapter.min_homes, 1)))
            for digest, min_homes in versions:
                rate = pool.adapter_rates.per_minute(digest, now)
                if count_homes(rate, min_homes) > 1 or min_homes:
                    missing += [
                        (replica, digest)
                        for replica in pool.find_homes(digest, min_homes, now)
                        if replica.may_load_adapters
                        and not (replica.has_adapter(digest) or replica.health.is_down)
                    ]
        return missing

    def find_unwanted_adapters(self) -> list[tuple[ReplicaEndpoint, str]]:
        """Return the servers of other engines that have loaded an adapter which they need not keep, with its digest.

        No name stands for its version any more. Or more than `MAX_LOADED_ADAPTERS` are loaded, of which those go that
        were used longest ago.
        """
        known = {digest for each in self._adapters for digest in (each.digest, each.candidate)}
        unwanted: list[tuple[ReplicaEndpoint, str]] = []
        for pool in self.all_pools:
            for replica in pool.replicas.values():
                loaded = replica.loaded_adapters
                surplus = loaded[: max(0, len(loaded) - MAX_LOADED_ADAPTERS)]
                unwanted += [
                    (replica, digest)
                    for digest in loaded
                    if digest not in known or digest in surplus
                ]
        return unwanted

    def list_rollouts(self) -> list[Adapter]:
        """Return the adapters whose candidates are compared, at most `MAX_ROLLOUTS`: the oldest of each owner first.

        So one organisation cannot keep the rollouts of the others waiting.
        """
        compared = [each for each in self._adapters if each.candidate is not None and each.rollout]
        ranks: Counter[str | None] = Counter()
        ranked: list[tuple[int, int, Adapter]] = []
        for adapter in sorted(compared, key=lambda each: (each.created_at, each.id)):
            ranked.append((ranks[adapter.organisation], len(ranked), adapter))
            ranks[adapter.organisation] += 1
        return [adapter for _, _, adapter in sorted(ranked)[:MAX_ROLLOUTS]]

    def count_loaded(self, base_model: str, digest: str) -> int:
        """Return how many replicas have a version of an adapter loaded. Thread-safe."""
        pool = self._pools_by_name.get(base_model)
        if pool is None:
            return 0
        return sum(replica.has_adapter(digest) for replica in [*pool.replicas.values()])

    def list_adapter_replicas(self, adapter: Adapter) -> list[AdapterReplica]:
        """Return the replicas that may load an adapter, and which of them keep and have it. Thread-safe."""
        pool = self._pools_by_name.get(adapter.base_model)
        if pool is None:
            return []
        replicas = [each for each in [*pool.replicas.values()] if each.may_load_adapters]
        rate, wanted = pool.adapter_rates.per_minute(adapter.digest, time.monotonic()), 0
        if rate or adapter.min_homes:
            wanted = count_homes(rate, adapter.min_homes)
        loads = {each.name: each.load.slots_in_use / each.load.weight for each in replicas}
        homes = select_homes(adapter.digest, loads, wanted) if wanted else ()
        return [
            AdapterReplica(
                replica=each.name,
                is_wanted=each.name in homes or wanted >= len(replicas),
                is_loaded=each.has_adapter(adapter.digest),
                has_candidate=adapter.candidate is not None and each.has_adapter(adapter.candidate),
                size_bytes=each.adapter_size(adapter.digest),
            )
            for each in replicas
        ]

    def apply_decision(self, setting: ReplicaSetting, stored_at: float) -> None:
        """Apply an operator's decision at once. Snapshots that may have been read before it do not undo it.

        Args:
            setting: The decision.
            stored_at: Time on the monotonic clock at which the store had it. It is ignored if a snapshot that was read
                later is applied, since that has it or a newer one.
        """
        if stored_at <= self._snapshot_read_at:
            return
        self._decisions[setting.model, setting.replica] = _Decision(setting, stored_at)
        for pool in self.all_pools:
            if pool.model == setting.model:
                pool.apply_setting(setting, time.monotonic(), time.time())

    def resolve_target(
        self,
        name: str,
        principal: Principal,
        headers: Mapping[bytes, bytes],
        fields: RequestFields | None = None,
        request_id: str = "",
        failed: Collection[str] = (),
    ) -> RouteTarget:
        """Return the pool that answers a request, as `find_target`, and record that the request was routed."""
        target = self.find_target(name, principal, headers, fields, request_id, failed)
        if target.passed_over is not None:
            target.passed_over.record_unserved(time.monotonic())
        for rule, decision in target.decisions:
            self._prompts.record(rule, decision)
        if target.route_name not in {"", WEIGHTS}:
            log.info(
                "request_routed",
                requested_model=name,
                model=target.pool.model,
                route=target.route_name,
                reason=target.reason,
            )
        return target

    def keep_conversation(self, conversation: bytes) -> None:
        """Let later requests of a conversation go to the requested model, because a cascade escalated one."""
        self._prompts.keep_conversation(conversation)

    def find_target(
        self,
        name: str,
        principal: Principal,
        headers: Mapping[bytes, bytes],
        fields: RequestFields | None = None,
        request_id: str = "",
        failed: Collection[str] = (),
    ) -> RouteTarget:
        """Return the pool that answers a request.

        The first route that matches selects a model, then the model's traffic settings select one that answers for it.
        The principal needs access to the requested model, but not to the selected ones.

        Args:
            name: Requested model.
            principal: Sender of the request.
            headers: Request headers, which routes may match.
            fields: Fields of the request, which may name its user and session. Without them it is served by the stable
                version.
            request_id: Id of the request.
            failed: Models that could not answer the request, so that fallbacks do. If none can, the result is the pool
                of one of these.

        Raises:
            ApiError: 404 if the model does not exist. 403 if the principal may not use it.
        """
        if name not in self._pools_by_name and (
            (adapter := self._adapters.find(name, principal)) is not None
        ):
            return self._target_adapter(adapter, principal, headers, fields, request_id)
        alias = self._match_alias(name)
        requested_target = self._targets.get(alias)
        check_model_access(
            principal, alias, alias if requested_target is None else requested_target.pool.model
        )
        if requested_target is None:
            raise _model_not_found(name)
        pool = requested_target.pool
        if not self.rules[RouteConfig] and pool.traffic is None and pool.versions is None:
            return requested_target
        subject = find_subject(principal, headers, fields, request_id)
        target = self._follow_routes(requested_target, principal, subject, headers, fields, failed)
        routed = target
        if target.pool.traffic is not None:
            target = self._divide_traffic(
                target, target.pool.traffic, subject, principal.tier, failed
            )
        if routed.decisions:
            target = _add_decisions(target, routed)
        versions = target.pool.versions
        if versions is None or fields is None:
            return target
        prefers_candidate = _prefers_candidate(principal, headers)
        return _assign_version(target, versions, subject, prefers_candidate=prefers_candidate)

    def _follow_routes(
        self,
        requested: RouteTarget,
        principal: Principal,
        subject: TrafficSubject,
        headers: Mapping[bytes, bytes],
        fields: RequestFields | None,
        failed: Collection[str],
    ) -> RouteTarget:
        """Return the model that the first route selects whose conditions hold; the requested one if there is none."""
        target, now = requested, time.time()
        decisions: list[tuple[RequestRule, RouteDecision]] = []
        for route in self.rules[RouteConfig]:
            if not route.matches(requested.pool.model, principal, subject, headers, now, fields):
                continue
            config, pressure = route.config, ""
            assert isinstance(config, RouteConfig)  # noqa: S101 - the kind of the rules
            if config.has_pressure:
                pressure = self._find_pressure(config, requested.pool, principal)
                if not pressure:
                    continue
            if config.target_model is None:
                if config.max_cached_age_s is not None and CACHE_MISS in failed:
                    continue
                decision = degrade(route, config, requested.pool, pressure)
                decisions.append((route, decision))
                if config.dry_run:
                    continue
                target = requested._replace(
                    route_name=route.name,
                    refusal=config.refuse or "",
                    max_cached_age_s=config.max_cached_age_s or 0.0,
                )
                break
            pool = self._pools_by_name[route.target_model]
            if config.decides_by_prompt or pressure:
                decision = self._prompts.decide(
                    route,
                    requested.pool,
                    pool,
                    subject,
                    fields,
                    tier=principal.tier,
                    failed=failed,
                    pressure=pressure,
                )
                decisions.append((route, decision))
                if not decision.is_taken:
                    continue
            target = RouteTarget(pool, route.name)
            break
        if not decisions:
            return target
        return target._replace(decisions=tuple(decisions))

    def _find_pressure(self, config: RouteConfig, pool: Pool, principal: Principal) -> str:
        """Return the load and the budget that a route is for; empty if they do not hold."""
        found = []
        if config.min_wait_s is not None:
            found.append(describe_load(pool, principal.tier, config.min_wait_s))
        if config.min_budget_used is not None:
            used = self.read_budget_used(principal, pool.model)
            is_used = used >= config.min_budget_used
            found.append(f"{used:.0%} of a budget are used" if is_used else "")
        return "; ".join(found) if all(found) else ""

    def has_model(self, name: str) -> bool:
        """Whether a model or an alias has exactly this name, so that no adapter can."""
        return name in self._pools_by_name

    def _target_adapter(
        self,
        adapter: Adapter,
        principal: Principal,
        headers: Mapping[bytes, bytes],
        fields: RequestFields | None,
        request_id: str,
    ) -> RouteTarget:
        """Return the pool of the base model. Routes, weights and fallbacks would let a model answer without it.

        Raises:
            ApiError: 403 if the principal may not use the adapter. 404 if there is no such base model. 409 if it is
                another version than the adapter was made for.
        """
        check_model_access(principal, adapter.name)
        pool = self._pools_by_name.get(adapter.base_model)
        if pool is None:
            raise _model_not_found(adapter.name)
        served = pool.model_digest
        if adapter.base_digest is not None and served not in {None, adapter.base_digest}:
            message = (
                f"The adapter {adapter.name!r} was made for {adapter.base_digest} of {pool.model!r}, which serves "
                f"{served} now. Its operator can add a version that was made for this one, or remove base_digest."
            )
            raise ApiError(409, "other_base_model", message, param="model")
        version, reason, is_randomised = adapter, "", False
        subject = find_subject(principal, headers, fields, request_id)
        if adapter.candidate is not None:
            prefers_candidate = _prefers_candidate(principal, headers)
            version = select_version(adapter, subject, prefers_candidate=prefers_candidate)
            is_randomised = adapter.candidate_percent > 0 and not prefers_candidate
            is_candidate = version is not adapter
            reason = f"adapter {version.digest}: {'candidate' if is_candidate else 'stable'}"
        assigned = AssignedVersion(
            version.digest, is_randomised, sticky_key(subject, per_session_tenants=())
        )
        return RouteTarget(pool, reason=reason, version=assigned, adapter=version)

    def find_rule(
        self,
        kind: type[RequestConditions],
        principal: Principal,
        headers: Mapping[bytes, bytes],
        fields: RequestFields | None,
        request_id: str,
        answering: Pool | None = None,
    ) -> RequestRule | None:
        """Return the first rule of a kind that matches a request; None if none does.

        A rule for a model holds for requests to it, and for those that `answering`, its pool, answers: by a route, or
        as the base model of an adapter. Without a known model, only rules without a model hold. Requests that only
        store something have no fields.
        """
        rules = self.rules[kind]
        if not rules:
            return None
        models: set[str | None] = {None}
        if fields is not None:
            pools = (self._pools_by_name.get(self._match_alias(fields.model)), answering)
            models = {pool.model for pool in pools if pool is not None} or {""}
        subject, now = find_subject(principal, headers, fields, request_id), time.time()
        return next(
            (
                each
                for each in rules
                if any(
                    each.matches(model, principal, subject, headers, now, fields)
                    for model in models
                )
            ),
            None,
        )

    def explain_flags(
        self,
        principal: Principal,
        headers: Mapping[bytes, bytes],
        fields: RequestFields,
        request_id: str,
    ) -> list[dict[str, Any]]:
        """Return the variants of the feature flags for a request, as explanations show them."""
        subject = find_subject(principal, headers, fields, request_id)
        return self.flags.describe_decisions(principal, subject)

    def list_flag_readers(self) -> Mapping[str, list[str]]:
        """Return the names of the rules that read each feature flag."""
        readers: dict[str, list[str]] = {}
        for rule in itertools.chain.from_iterable(self.rules.values()):
            if rule.flag is not None:
                readers.setdefault(rule.flag.rules.name, []).append(rule.name)
        return readers

    def find_unread_flags(self, flags: Iterable[str]) -> list[str]:
        """Return those of a project's or key's flags that neither a rule nor the gateway reads."""
        read = set[str](get_args(GatewayFlag)).union(
            *(
                rule.config.flags or ()
                for rule in itertools.chain.from_iterable(self.rules.values())
            )
        )
        return [flag for flag in flags if flag not in read]

    def _divide_traffic(
        self,
        target: RouteTarget,
        traffic: TrafficRoute,
        subject: TrafficSubject,
        tier: int,
        failed: Collection[str],
    ) -> RouteTarget:
        """Return the model that answers for that of `target`: one selected by weight, or else a fallback."""
        selected, route_name = traffic.select_by_weight(subject), target.route_name
        reasons = [f"route {route_name}"] if route_name else []
        if selected.pool != traffic.model or len(traffic.pools) > 1:
            route_name = route_name or WEIGHTS
            reasons.append(f"weight {selected.weight:g} of {traffic.total_weight:g}")
        answering, passed_over = selected.pool, None
        if traffic.fallback_pools:
            now = time.monotonic()
            serving = traffic.select_serving_pool(
                selected.pool,
                {
                    name: self._pools_by_name[name].expected_wait_s(tier, now)
                    for name in (selected.pool, *traffic.fallback_pools)
                },
                failed,
            )
            reasons += serving.skipped
            if serving.pool is not None and serving.skipped:
                answering, route_name = serving.pool, FALLBACK
                passed_over = self._pools_by_name[selected.pool]
        return RouteTarget(
            self._pools_by_name[answering],
            route_name,
            "; ".join(reasons),
            passed_over=passed_over,
            has_fallbacks=bool(traffic.fallback_pools),
        )

    def has_task(self, name: str, task: TaskName) -> bool:
        """Return whether all replicas of a model, by any of its names, are known to have a task or others that do."""
        pool = self._pools_by_name.get(self._match_alias(name))
        return pool is not None and pool.tasks is not None and task in pool.tasks

    def find_only_model(self, principal: Principal, tasks: frozenset[TaskName]) -> str:
        """Return the name of the model for a request that names none: the only one that the principal may use.

        Models that have none of the tasks count only if all are such. Those whose tasks are unknown may have them.

        Raises:
            ApiError: 400 if there are several models, or none.
        """
        permitted: dict[str, tuple[str, Pool]] = {}
        for name, pool in self._pools_by_name.items():
            if WILDCARD not in name and can_use_model(principal, name, pool.model):
                permitted.setdefault(pool.model, (name, pool))
        suitable = [
            name
            for name, pool in permitted.values()
            if pool.tasks is None or not pool.tasks.isdisjoint(tasks)
        ]
        names = suitable or [name for name, _ in permitted.values()]
        if len(names) == 1:
            return names[0]
        advice = "There is no model that you may use. Ask for access to one."
        if names:
            listed = ", ".join(names[:MAX_LISTED_MODELS])
            advice = f"Add it. There are {len(names)} models: {listed}. See /v1/models."
        message = f"Missing parameter 'model'. {advice}"
        raise ApiError(400, "missing_required_parameter", message, param="model")

    def resolve_aliases(self, snapshot: AccountSnapshot) -> AccountSnapshot:
        """Return the snapshot with aliases in limits and prices replaced by the names of their models."""
        return msgspec.structs.replace(
            snapshot,
            limits=tuple(map(self._resolve_alias, snapshot.limits)),
            prices=tuple(map(self._resolve_alias, snapshot.prices)),
        )

    def get_model(self, name: str, principal: Principal) -> ModelCard:
        """Return the description of a model.

        Raises:
            ApiError: 404 if the model does not exist or the principal may not use it.
        """
        adapter = None if self.has_model(name) else self._adapters.find(name, principal)
        if adapter is not None and (card := self._adapter_card(adapter, principal)) is not None:
            return card
        alias = self._match_alias(name)
        pool = self._pools_by_name.get(alias)
        if pool is None or not can_use_model(principal, alias, pool.model):
            raise _model_not_found(name)
        return self._model_card(name, pool)

    def list_models(self, principal: Principal) -> ModelList:
        """Return the descriptions of all models that the principal may use."""
        cards = [
            self._model_card(name, pool)
            for name, pool in self._pools_by_name.items()
            if WILDCARD not in name and can_use_model(principal, name, pool.model)
        ]
        for adapter in self._adapters.list(principal):
            card = self._adapter_card(adapter, principal)
            if card is not None and adapter.name not in self._pools_by_name:
                cards.append(card)
        first, last = (cards[0].id, cards[-1].id) if cards else (None, None)
        return ModelList(data=cards, first_id=first, last_id=last)

    def _match_alias(self, name: str) -> str:
        """Return the longest alias with a wildcard that matches a name; the name itself if it is known or none does."""
        if name in self._pools_by_name or len(name) > MAX_MODEL_NAME_LENGTH:
            return name
        return next((alias for alias in reversed(self._wildcards) if _matches(alias, name)), name)

    def _model_card(self, name: str, pool: Pool) -> ModelCard:
        tasks = pool.tasks
        return ModelCard(
            id=name,
            created=self._created_at,
            root=pool.model,
            max_model_len=pool.max_model_len,
            tasks=None if tasks is None else sorted(tasks),
            digest=pool.model_digest,
        )

    def _adapter_card(self, adapter: Adapter, principal: Principal) -> ModelCard | None:
        """Return the description of an adapter; None if the principal may not use it or its base model is gone."""
        pool = self._pools_by_name.get(adapter.base_model)
        if pool is None or not can_use_model(principal, adapter.name):
            return None
        card = self._model_card(adapter.name, pool)
        return msgspec.structs.replace(
            card, root=adapter.digest, parent=pool.model, digest=adapter.digest
        )

    def _build_rules(
        self, snapshot: AccountSnapshot
    ) -> tuple[Mapping[type[RequestConditions], tuple[RequestRule, ...]], FeatureFlags]:
        """Return the rules of each kind, and the flags that they read."""
        # Read all values at once, since another thread may call `replace_models`.
        pools_by_name, rules, declared = self._configured
        models = {name: pool.model for name, pool in pools_by_name.items()}
        flags = FeatureFlags(declared, snapshot)
        compiled = {
            kind: compile_rules(
                [rule for rule in rules if type(rule[0]) is kind], models, snapshot, flags
            )
            for kind in RULE_SETTINGS
        }
        return compiled, flags

    def _resolve_alias(self, term: T) -> T:
        pool = self._pools_by_name.get(term.model or "")  # None applies to all models
        if pool is None or pool.model == term.model:
            return term
        return msgspec.structs.replace(term, model=pool.model)


def _add_decisions(target: RouteTarget, routed: RouteTarget) -> RouteTarget:
    """Return the target with the decisions of routes. The requested model answers if the selected one cannot."""
    reasons = [
        f"route {each.route}{' (dry run)' if each.is_dry_run else ''}: {each.reason}"
        for _, each in routed.decisions
    ]
    return target._replace(
        decisions=routed.decisions,
        max_cached_age_s=routed.max_cached_age_s,
        refusal=routed.refusal,
        reason="; ".join(filter(None, (*reasons, target.reason))),
        has_fallbacks=target.has_fallbacks or any(each.is_taken for _, each in routed.decisions),
    )


def _assign_version(
    target: RouteTarget, versions: PoolVersions, subject: TrafficSubject, *, prefers_candidate: bool
) -> RouteTarget:
    route = versions.route
    choice = route.select_version(subject, prefers_candidate=prefers_candidate)
    key = sticky_key(subject, route.per_session_tenants)
    # The stable version serves the users of one whose replicas are not known here yet.
    pool = versions.pools.get(choice.digest, target.pool)
    share = f"{100 * route.share_of(pool.version):g} % of the users"
    cause = "requested by its sender" if prefers_candidate else share
    reason = f"version {pool.version_label}: {cause}"
    return target._replace(
        pool=pool,
        reason=f"{target.reason}; {reason}" if target.reason else reason,
        version=AssignedVersion(choice.digest, choice.is_randomised, key),
    )


def _prefers_candidate(principal: Principal, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the request asks for the candidate, and its sender may choose."""
    return headers.get(MODEL_VERSION_HEADER) == CANDIDATE and has_role(principal, "admin")


def _matches(alias: str, name: str) -> bool:
    """Whether a name is that of an alias, in which each wildcard stands for any text.

    Each part is searched once, from the end of the one before it, so that a long name costs no more than its length.
    """
    first, *parts, last = alias.split(WILDCARD)
    position, end = len(first), len(name) - len(last)
    if not (name.startswith(first) and name.endswith(last) and position <= end):
        return False
    for part in parts:
        position = name.find(part, position, end) + len(part)
        if position < len(part):  # not found
            return False
    return True


def _model_not_found(name: str) -> ApiError:
    message = f"The model {name[:200]!r} does not exist. See /v1/models."
    return ApiError(404, "model_not_found", message, param="model")
