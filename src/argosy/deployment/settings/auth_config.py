"""Settings of authentication and of the console: the sections `auth` and `console` of a gateway's configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

AuthMode = Literal["auto", "required", "disabled"]
"""Whether requests need keys or tokens. `auto` requires none from clients on this machine until the first key exists.
`required` always requires them. `disabled` accepts every request."""

RsaAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]
SigningAlgorithm = Literal[RsaAlgorithm, "ES256", "ES384", "ES512", "EdDSA"]
"""Asymmetric algorithms only, since anyone who can verify a signature with a shared secret can also sign with it."""


class JwtConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trusted issuer of tokens: an OpenID Connect issuer, or the holder of the keys in a JWKS."""

    audience: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)]
    """Accepted values of the `aud` claim. A token for another service is rejected."""
    issuer: str | None = None
    """Required value of the `iss` claim. The issuer's keys are found by discovery unless `jwks` is set."""
    jwks: str | None = None
    """File or URL of the public keys (JSON Web Key Set)."""
    algorithms: Annotated[tuple[SigningAlgorithm, ...], Meta(min_length=1)] = (
        "RS256",
        "ES256",
        "EdDSA",
    )
    """Signature algorithms that are accepted."""
    leeway_s: Annotated[float, Meta(ge=0, le=300)] = 10.0
    """Tolerated difference in seconds between the issuer's clock and the gateway's."""
    email_claim: str = "email"
    """Claim with the user's email. A user is also found if `sub` is the user's id."""
    issuer_verifies_emails: bool = False
    """Whether an email counts although the token has no claim `email_verified`. Set it only for an issuer that lets no
    user choose an address without proving it; otherwise a user could take over another one's account."""
    organisation_claim: str = "organisation"
    """Claim with the organisation's id or name. A token that names an unknown organisation is rejected.

    The claim selects among users with the same email, or among projects with the same name. Without the claim, the user
    or project that has had the email or name for the longest time is selected. The admin of another organisation can
    therefore not take over an existing name, but could have been the first to use it.
    """
    project_claim: str = "project"
    """Claim with the id or name of the project that the request counts for. The default is the user's own project."""
    role_claim: str | None = None
    """Claim with one role or several, for bearers who are not users of the store. Without it they may only call models.

    The role applies in the organisation that the token names. Only users and keys have roles for the whole gateway.
    """


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Authentication mode, trusted token issuer, and allowed networks and origins."""

    mode: AuthMode = "auto"
    """`auto` requires a key once one exists, `required` always, `disabled` never."""
    jwt: JwtConfig | None = None
    """Accept JSON Web Tokens of an issuer."""
    trusted_proxies: tuple[str, ...] = ()
    """CIDR networks of proxies whose X-Forwarded-For header is trusted. A Unix socket counts as 127.0.0.1."""
    allowed_networks: tuple[str, ...] = ()
    """CIDR networks from which clients may connect. If empty, all networks are allowed."""
    allowed_origins: tuple[str, ...] = ("localhost",)
    """Origins of web pages that may call the gateway from a browser (CORS). Example: `https://app.example.com`.

    Apps and browser extensions have origins too, such as `app://obsidian.md` or `chrome-extension://ID`.
    `localhost` allows pages that the browser's own machine serves, at any port. `*` allows all origins.
    """


class OidcConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sign-in with the issuer in `auth.jwt`, whose `audience` must have the `client_id`."""

    client_id: str
    """Id of the console at the issuer."""
    client_secret_env: str | None = None
    """Environment variable with the secret of a confidential client. None for a public client."""
    redirect_uri: str
    """Address of `/console/sign-in/callback` as browsers reach it, exactly as the issuer knows it."""
    scopes: tuple[str, ...] = ("openid", "email", "profile")
    """Scopes that are requested."""


class ConsoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The web application that the gateway serves at `/`."""

    enabled: bool = True
    """Whether the gateway serves the console."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names under which browsers may open the console, besides addresses, `host` and the names of the machine
    itself. Example: `llm.example.com`. A browser that was given another name for the gateway is refused."""
    oidc: OidcConfig | None = None
    """Sign-in with an OpenID Connect issuer, beside sign-in with a key."""
    insecure_http: bool = False
    """Allow to sign in over plain HTTP from other machines. Anyone in between can then read the key."""
