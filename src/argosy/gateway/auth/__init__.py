"""Who asks: from a request's headers and address to a caller, or to a refusal."""

from argosy.gateway.auth.auth_config import AuthConfig, JwtConfig
from argosy.gateway.auth.authenticator import (
    Authenticator,
    ConnectionInfo,
    check_exposure,
    is_loopback,
)
from argosy.gateway.auth.authorization import (
    can_use_model,
    check_grant,
    check_model_access,
    check_role,
    has_role,
    organisation_scope,
)
from argosy.gateway.auth.client_address import is_local_origin

__all__ = [
    "AuthConfig",
    "Authenticator",
    "ConnectionInfo",
    "JwtConfig",
    "can_use_model",
    "check_exposure",
    "check_grant",
    "check_model_access",
    "check_role",
    "has_role",
    "is_local_origin",
    "is_loopback",
    "organisation_scope",
]
