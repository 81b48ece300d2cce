"""Rules for requests as they are matched: routes, content, cache and prompt rules, and the sender of a request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from argosy.deployment import (
    ANY_HEADER_VALUE,
    CacheRule,
    ContentMatchers,
    ContentRule,
    PromptRule,
    RequestConditions,
    RouteConfig,
    TruncationRule,
    parse_flag_condition,
    rule_name,
)
from argosy.gateway.feature_flags import FeatureFlags, FlagTest
from argosy.gateway.principal import TIERS, Principal
from argosy.gateway.request_fields import RequestFields
from argosy.policy.traffic import TrafficSubject, detect_language
from argosy.store import AccountSnapshot

SESSION_HEADER = b"x-session-affinity"
"""Request header that names the session."""


RULE_SETTINGS: Mapping[type[RequestConditions], str] = {
    RouteConfig: "routes",
    ContentRule: "content_rules",
    CacheRule: "cache_rules",
    TruncationRule: "truncation_rules",
    PromptRule: "prompt_rules",
}
"""Name of the setting of each kind of rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRule:
    """A rule in the form in which requests are matched. A condition that is None matches every request."""

    config: RequestConditions
    name: str
    model: str | None
    """The model's primary name."""
    headers: tuple[tuple[bytes, bytes | None], ...]
    """Pairs of lower-case name and value. The value None matches any value."""
    tenants: frozenset[str] | None
    """Ids of organisations and projects."""
    tiers: frozenset[int] | None
    """Ranks of tiers (indices of `TIERS`)."""
    unknown_tenants: tuple[str, ...]
    """Tenants in the settings that do not exist in the store."""
    flag: FlagTest | None = None
    """Condition about a feature flag."""
    target_model: str = ""
    """Primary name of the model that answers, for a route with one."""
    matchers: ContentMatchers | None = None
    """Compiled detectors of a content rule."""

    @property
    def restores(self) -> bool:
        """Whether what is redacted in prompts is put back in answers."""
        return isinstance(self.config, ContentRule) and self.config.restore

    def matches(
        self,
        model: str | None,
        principal: Principal,
        subject: TrafficSubject,
        headers: Mapping[bytes, bytes],
        now: float,
        fields: RequestFields | None,
    ) -> bool:
        """Return whether all conditions hold for a request to a model (by its primary name) at a Unix time.

        Conditions of fields hold for no request whose fields are unknown. Without a model, which is a request that only
        stores something for later ones, conditions of models and fields hold.
        """
        windows, flags = self.config.windows, self.config.flags
        if not (
            (self.model is None or model is None or self.model == model)
            and (self.tiers is None or principal.tier in self.tiers)
            and (flags is None or not principal.flags.isdisjoint(flags))
            and (
                self.tenants is None
                or principal.project in self.tenants
                or principal.organisation in self.tenants
            )
            and (windows is None or any(window.contains(now) for window in windows))
            and (self.flag is None or self.flag.holds(principal, subject))
            and (model is None or self._matches_fields(fields))
        ):
            return False
        for name, value in self.headers:
            actual = headers.get(name)
            if actual is None or (value is not None and actual != value):
                return False
        return True

    def _matches_fields(self, fields: RequestFields | None) -> bool:
        """Return whether the conditions of a request's fields hold."""
        config = self.config
        least, most = config.min_prompt_tokens, config.max_prompt_tokens
        if config.languages is None and least is most is config.tools is config.media is None:
            return True
        return fields is not None and (
            (least is None or fields.estimated_prompt_tokens >= least)
            and (most is None or fields.estimated_prompt_tokens <= most)
            and (config.tools is None or fields.has_tools == config.tools)
            and (config.media is None or fields.has_media == config.media)
            and (config.languages is None or _find_language(fields) in config.languages)
        )


def compile_rules(
    configs: Sequence[tuple[RequestConditions, ContentMatchers | None]],
    models: Mapping[str, str],
    snapshot: AccountSnapshot,
    flags: FeatureFlags | None = None,
) -> tuple[RequestRule, ...]:
    """Compile rules, in their order.

    Args:
        configs: The settings of each rule, and what it filters.
        models: The primary name of each model by each of its names.
        snapshot: The accounts that conditions may name.
        flags: The feature flags that they may read.
    """
    flags = flags or FeatureFlags()
    ids = find_tenant_ids(snapshot) if any(config.tenants for config, _ in configs) else {}
    return tuple(
        _compile_rule(config, matchers, index, models, ids, flags)
        for index, (config, matchers) in enumerate(configs)
    )


def _compile_rule(
    config: RequestConditions,
    matchers: ContentMatchers | None,
    index: int,
    models: Mapping[str, str],
    tenant_ids: Mapping[str, set[str]],
    flags: FeatureFlags,
) -> RequestRule:
    tenants, tiers = config.tenants, config.tiers
    return RequestRule(
        config=config,
        name=rule_name(config, RULE_SETTINGS[type(config)], index),
        target_model=models.get(getattr(config, "target_model", None) or "", ""),
        matchers=matchers,
        flag=None if config.flag is None else flags.test(*parse_flag_condition(config.flag)),
        model=None if config.model is None else models[config.model],
        headers=tuple(
            (name.lower().encode(), None if value == ANY_HEADER_VALUE else value.encode())
            for name, value in (config.headers or {}).items()
        ),
        tenants=None
        if tenants is None
        else frozenset[str]().union(*(tenant_ids.get(name, ()) for name in tenants)),
        tiers=None if tiers is None else frozenset(map(TIERS.index, tiers)),
        unknown_tenants=tuple(name for name in tenants or () if name not in tenant_ids),
    )


def find_tenant_ids(snapshot: AccountSnapshot) -> Mapping[str, set[str]]:
    """Return the ids of organisations and projects by each name that a rule may use for them."""
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


def find_subject(
    principal: Principal,
    headers: Mapping[bytes, bytes],
    fields: RequestFields | None,
    request_id: str,
) -> TrafficSubject:
    """Return the sender of a request as traffic is divided: its tenant, and its user, session or request.

    The id divides requests that name neither a user nor a session.
    """
    header = headers.get(SESSION_HEADER, b"").decode("latin-1")
    user, session = principal.user, header
    if fields is not None:
        user = _find_user(fields.raw) or user
        session = fields.session_id or header
    return TrafficSubject(tenant=principal.tenant, user=user, session=session, request=request_id)


def _find_language(fields: RequestFields) -> str | None:
    """Return the language of the user's last message; None if it is unknown."""
    sample = fields.sample_prompt()
    return None if sample is None else detect_language(sample.text)


def _find_user(raw: Mapping[str, Raw]) -> str:
    for name in ("safety_identifier", "user"):
        if name in raw:
            value = msgspec.json.decode(raw[name])
            if value and isinstance(value, str):
                return value
    return ""
