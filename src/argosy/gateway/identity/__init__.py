"""Who asks: from a request's headers and address to a caller, or to a refusal."""

from argosy.gateway.identity.addresses import is_local_page
from argosy.gateway.identity.callers import Asking, Identity, check_exposure, is_loopback
from argosy.gateway.identity.config import AuthConfig, JwtConfig
from argosy.gateway.identity.roles import (
    allows,
    check_grant,
    check_model,
    check_role,
    may_use,
    reach,
)

__all__ = [
    "Asking",
    "AuthConfig",
    "Identity",
    "JwtConfig",
    "allows",
    "check_exposure",
    "check_grant",
    "check_model",
    "check_role",
    "is_local_page",
    "is_loopback",
    "may_use",
    "reach",
]
