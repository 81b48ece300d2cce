"""Authorization checks of a principal by its role, the scope of the role, and the models that its key allows."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from argosy.gateway.principal import Principal
from argosy.protocol import ApiError
from argosy.store import Role, RoleScope

_ROLE_RANKS: dict[Role, int] = {role: rank for rank, role in enumerate(reversed(get_args(Role)))}


def has_role(principal: Principal, role: Role, scope: RoleScope = "organisation") -> bool:
    """Return whether the principal has the permissions of `role`, in its organisation or in the whole gateway."""
    return _ROLE_RANKS[principal.role] >= _ROLE_RANKS[role] and (
        scope == "organisation" or principal.role_scope == "gateway"
    )


def check_role(principal: Principal, role: Role, scope: RoleScope = "organisation") -> None:
    """Check that the principal has the permissions of `role` in `scope`.

    Raises:
        ApiError: 403 if the principal lacks them.
    """
    if not has_role(principal, role, scope):
        own_role = _describe_role(principal.role, principal.role_scope)
        if (
            scope == "gateway"
            and principal.role_scope == "organisation"
            and principal.role != "user"
        ):
            own_role += " of your organisation only"
        message = f"This request needs the role {_describe_role(role, scope)}; yours is {own_role}. Use another key."
        raise ApiError(403, "insufficient_role", message)


def check_grant(
    principal: Principal, role: Role, scope: RoleScope, models: Collection[str] = ()
) -> None:
    """Check that the principal itself has all permissions that it grants. An empty `models` grants all models.

    Raises:
        ApiError: 403 if a granted permission exceeds the principal's own.
    """
    check_role(principal, role, scope)
    if principal.allowed_models is not None and not (
        models and principal.allowed_models.issuperset(models)
    ):
        allowed_names = ", ".join(sorted(principal.allowed_models))
        message = f"Your key may only use {allowed_names}, so it cannot grant more. Name models of this list."
        raise ApiError(403, "model_not_allowed", message)


def organisation_scope(principal: Principal) -> str | None:
    """Return the id of the organisation in which the role applies, or None for the whole gateway."""
    return None if principal.role_scope == "gateway" else principal.organisation


def can_use_model(principal: Principal, *names: str) -> bool:
    """Return whether the principal may use the model with these names: the public name and possibly an alias."""
    return principal.allowed_models is None or not principal.allowed_models.isdisjoint(names)


def check_model_access(principal: Principal, *names: str) -> None:
    """Check that the principal may call models, and this model.

    The error is the same whether the model exists or not.

    Args:
        principal: Sender of the request.
        names: Names of the model. The first is the name in the request.

    Raises:
        ApiError: 403 if the principal may not.
    """
    if principal.role not in {"user", "admin"}:
        message = (
            f"Keys with the role {principal.role} cannot call models. Use a key with the role user."
        )
        raise ApiError(403, "insufficient_role", message)
    if not can_use_model(principal, *names):
        allowed_names = ", ".join(sorted(principal.allowed_models or ()))
        message = f"This key may not use the model {names[0][:200]!r}. It may use: {allowed_names}."
        raise ApiError(403, "model_not_allowed", message, param="model")


def _describe_role(role: Role, scope: RoleScope) -> str:
    return f"{role} of the whole gateway" if scope == "gateway" else role
