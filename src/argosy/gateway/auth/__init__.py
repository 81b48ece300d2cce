"""Authentication and authorization: who sends a request, from where, and what the principal may do.

The `Authenticator` checks the client's address, extracts the API key or token from the headers, and returns a
`Principal`. API keys are looked up in the `CredentialIndex`, which is built from the store's latest account snapshot.
JSON Web Tokens are verified by the `TokenVerifier` with the issuer's `SigningKeys`, and their claims are matched with
users and projects of the same index. Failed attempts are limited per address. The functions of `authorization` then
check the principal's role and the models that it may use.
"""

from argosy.deployment import AuthConfig, JwtConfig
from argosy.gateway.auth.authenticator import (
    Authenticator,
    AuthFailureLimiter,
    ConnectionInfo,
    check_exposure,
    describe_key_command,
    has_credential,
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
from argosy.gateway.auth.client_address import (
    IpAddress,
    is_local_origin,
    parse_address,
    parse_authority,
)
from argosy.gateway.auth.credential_index import TokenClaims
