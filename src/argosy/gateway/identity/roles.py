"""What a caller may do, by role and by the models its key names."""

from __future__ import annotations

from argosy.gateway.caller import Caller
from argosy.protocol import ApiError
from argosy.store import Role

_RANKS: dict[Role, int] = {"caller": 0, "viewer": 1, "operator": 2, "admin": 3}


def allows(caller: Caller, role: Role) -> bool:
    """Whether the caller may do what `role` may."""
    return _RANKS[caller.role] >= _RANKS[role]


def check_role(caller: Caller, role: Role) -> None:
    """Raise ApiError 403 unless the caller may do what `role` may."""
    if not allows(caller, role):
        message = f"This takes the role {role}; yours is {caller.role}. Use another key."
        raise ApiError(403, "insufficient_role", message)


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
