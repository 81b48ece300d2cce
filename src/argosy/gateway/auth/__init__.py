"""Who asks: from a request's headers and address to a caller, or to a refusal."""

from argosy.gateway.auth.auth_config import AuthConfig, JwtConfig
from argosy.gateway.auth.authenticator import Asking, Identity, check_exposure, is_loopback
from argosy.gateway.auth.authorization import (
    allows,
    check_grant,
    check_model,
    check_role,
    may_use,
    reach,
)
from argosy.gateway.auth.client_address import is_local_page

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
