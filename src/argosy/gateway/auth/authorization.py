"""What a caller may do: by their role, by where it is held, and by the models their key names."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

from argosy.gateway.principal import Caller
from argosy.protocol import ApiError
from argosy.store import Role, RoleScope

_RANKS: dict[Role, int] = {role: rank for rank, role in enumerate(reversed(get_args(Role)))}


def allows(caller: Caller, role: Role, scope: RoleScope = "organisation") -> bool:
    """Whether the caller may do what `role` may: in their organisation, or in the whole gateway."""
    return _RANKS[caller.role] >= _RANKS[role] and (
        scope == "organisation" or caller.scope == "gateway" or role == "caller"
    )


def check_role(caller: Caller, role: Role, scope: RoleScope = "organisation") -> None:
    """Raise ApiError 403 unless the caller may do what `role` may, there where `scope` says."""
    if not allows(caller, role, scope):
        yours = _told(caller.role, caller.scope)
        if scope == "gateway" and caller.scope == "organisation" and caller.role != "caller":
            yours += " of your organisation only"
        message = f"This takes the role {_told(role, scope)}; yours is {yours}. Use another key."
        raise ApiError(403, "insufficient_role", message)


def check_grant(caller: Caller, role: Role, scope: RoleScope, models: Collection[str] = ()) -> None:
    """Raise ApiError 403 unless the caller may do all that they would let others do; no models: all of them."""
    check_role(caller, role, scope)
    if caller.models is not None and not (models and caller.models.issuperset(models)):
        known = ", ".join(sorted(caller.models))
        message = f"Your key may use {known}: it gives others no more. Name models of these."
        raise ApiError(403, "model_not_allowed", message)


def reach(caller: Caller) -> str | None:
    """Id of the organisation that the caller's role is held in; None: the whole gateway."""
    return None if caller.scope == "gateway" else caller.organisation


def may_use(caller: Caller, *names: str) -> bool:
    """Whether the caller may ask the model that has these names: the public one, and an alias."""
    return caller.models is None or not caller.models.isdisjoint(names)


def check_model(caller: Caller, *names: str) -> None:
    """Raise ApiError 403 unless the caller may ask models, and this one; `names` begin with the one asked for.

    The answer is the same whether there is such a model or not.
    """
    if caller.role not in {"caller", "admin"}:
        message = f"Keys with the role {caller.role} ask no models. Use one with the role caller."
        raise ApiError(403, "insufficient_role", message)
    if not may_use(caller, *names):
        known = ", ".join(sorted(caller.models or ()))
        message = f"This key may not use the model {names[0][:200]!r}. It may use: {known}."
        raise ApiError(403, "model_not_allowed", message, param="model")


def _told(role: Role, scope: RoleScope) -> str:
    return f"{role} of the whole gateway" if scope == "gateway" else role
