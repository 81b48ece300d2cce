"""Endpoints for feature flags: what is declared, what reads it, and how operators switch it while gateways run."""

from __future__ import annotations

from itertools import starmap

import msgspec

from argosy.deployment import DeclaredFlag
from argosy.gateway.admin.endpoints import AdminEndpoints, AdminRequest, AdminScope
from argosy.gateway.admin.schemas import DeletedView, FlagSwitch, FlagView, Page, build_page
from argosy.gateway.feature_flags import FeatureFlags, apply_switch
from argosy.policy.traffic import FlagRules
from argosy.store import AccountSnapshot, Flag, NotFoundError

endpoints = AdminEndpoints()

FLAGS = "/admin/flags"


@endpoints.register("GET", FLAGS, "viewer", "gateway")
def list_flags(scope: AdminScope, request: AdminRequest) -> Page[FlagView]:  # noqa: ARG001 - lists all
    """List the feature flags of the settings with what operators decided about them."""
    decided = [] if scope.store is None else scope.flags.list_flags()
    return build_page(_list_views(scope, decided))


@endpoints.register("PATCH", FLAGS + "/{id}", "operator", "gateway", body_type=FlagSwitch)
def switch_flag(scope: AdminScope, request: AdminRequest) -> FlagView:
    """Override the state, the default variant or the rules of a feature flag, for all gateways of the store."""
    name, body = request.resource_id, request.body
    declared = scope.replicas.models.flags.declared.get(name)
    if declared is None:
        raise NotFoundError(f"No feature flag of the settings has the name {name!r}.")
    targeting = body.targeting
    if isinstance(targeting, dict):
        targeting = msgspec.json.encode(targeting).decode()
    known = {each.id: each for each in scope.flags.list_flags()}
    fields = {
        "state": body.state,
        "default_variant": body.default_variant,
        "targeting": targeting,
    }
    given = {key: value for key, value in fields.items() if value is not msgspec.UNSET}
    before = known.get(name) or Flag(id=name, changed_at=0.0, changed_by="")
    FlagRules(name, apply_switch(declared, msgspec.structs.replace(before, **given)))
    changed = scope.flags.switch(name, **fields, reason=body.reason, actor=request.actor)
    (view,) = [each for each in _list_views(scope, [changed]) if each.id == name]
    return view


@endpoints.register("DELETE", FLAGS + "/{id}", "operator", "gateway")
def reset_flag(scope: AdminScope, request: AdminRequest) -> DeletedView:
    """Leave a feature flag to its declaration again."""
    scope.flags.reset(request.resource_id, actor=request.actor)
    return DeletedView(id=request.resource_id)


def _list_views(scope: AdminScope, decided: list[Flag]) -> list[FlagView]:
    models = scope.replicas.models
    flags = FeatureFlags(
        starmap(DeclaredFlag, models.flags.declared.items()), AccountSnapshot(flags=tuple(decided))
    )
    readers = models.list_flag_readers()
    views = []
    for rules in flags:
        switched = flags.switched.get(rules.name)
        views.append(
            FlagView(
                id=rules.name,
                flag=rules.flag,
                declared=flags.declared[rules.name],
                read_by=readers.get(rules.name, []),
                reason="" if switched is None else switched.reason,
                changed_at=None if switched is None else switched.changed_at,
                changed_by=None if switched is None else switched.changed_by,
                problem=flags.problems.get(rules.name, ""),
            )
        )
    return views
