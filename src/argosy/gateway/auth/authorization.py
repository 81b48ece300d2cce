"""What a caller may do: by their role, by where it is held, and by the models their key names."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from argosy.gateway.principal import Principal
from argosy.protocol import ApiError
from argosy.store import Role, RoleScope

_ROLE_RANKS: dict[Role, int] = {role: rank for rank, role in enumerate(reversed(get_args(Role)))}


def has_role(principal: Principal, role: Role, scope: RoleScope = "organisation") -> bool:
    """Whether the caller may do what `role` may: in their organisation, or in the whole gateway."""
    return _ROLE_RANKS[principal.role] >= _ROLE_RANKS[role] and (
        scope == "organisation" or principal.role_scope == "gateway" or role == "caller"
    )


def check_role(principal: Principal, role: Role, scope: RoleScope = "organisation") -> None:
    """Raise ApiError 403 unless the caller may do what `role` may, there where `scope` says."""
    if not has_role(principal, role, scope):
        yours = _describe_role(principal.role, principal.role_scope)
        if (
            scope == "gateway"
            and principal.role_scope == "organisation"
            and principal.role != "caller"
        ):
            yours += " of your organisation only"
        message = (
            f"This takes the role {_describe_role(role, scope)}; yours is {yours}. Use another key."
        )
        raise ApiError(403, "insufficient_role", message)


def check_grant(
    principal: Principal, role: Role, scope: RoleScope, models: Collection[str] = ()
) -> None:
    """Raise ApiError 403 unless the caller may do all that they would let others do; no models: all of them."""
    check_role(principal, role, scope)
    if principal.allowed_models is not None and not (
        models and principal.allowed_models.issuperset(models)
    ):
        known = ", ".join(sorted(principal.allowed_models))
        message = f"Your key may use {known}: it gives others no more. Name models of these."
        raise ApiError(403, "model_not_allowed", message)


def organisation_scope(principal: Principal) -> str | None:
    """Id of the organisation that the caller's role is held in; None: the whole gateway."""
    return None if principal.role_scope == "gateway" else principal.organisation


def can_use_model(principal: Principal, *names: str) -> bool:
    """Whether the caller may ask the model that has these names: the public one, and an alias."""
    return principal.allowed_models is None or not principal.allowed_models.isdisjoint(names)


def check_model_access(principal: Principal, *names: str) -> None:
    """Raise ApiError 403 unless the caller may ask models, and this one; `names` begin with the one asked for.

    The answer is the same whether there is such a model or not.
    """
    if principal.role not in {"caller", "admin"}:
        message = (
            f"Keys with the role {principal.role} ask no models. Use one with the role caller."
        )
        raise ApiError(403, "insufficient_role", message)
    if not can_use_model(principal, *names):
        known = ", ".join(sorted(principal.allowed_models or ()))
        message = f"This key may not use the model {names[0][:200]!r}. It may use: {known}."
        raise ApiError(403, "model_not_allowed", message, param="model")


def _describe_role(role: Role, scope: RoleScope) -> str:
    return f"{role} of the whole gateway" if scope == "gateway" else role
