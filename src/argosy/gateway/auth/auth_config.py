"""How callers say who they are: the `auth` part of the gateway's settings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

AuthMode = Literal["auto", "required", "disabled"]
"""`auto`: keys, or nothing at all for clients on this machine until the first is made. `keys`: always keys or
tokens. `off`: nobody is asked."""

RsaAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]
SigningAlgorithm = Literal[RsaAlgorithm, "ES256", "ES384", "ES512", "EdDSA"]
"""All with a public key: a shared secret could sign what it should only check."""


class JwtConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose tokens are taken: an OpenID Connect issuer's, or those signed with the keys of a JWKS."""

    audience: Annotated[tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1)]
    """What `aud` must be, one of these: a token for another service is no token for this one."""
    issuer: str | None = None
    """What `iss` must be. Its keys are found by discovery, unless `jwks` says where they are."""
    jwks: str | None = None
    """File or URL of the public keys."""
    algorithms: Annotated[tuple[SigningAlgorithm, ...], Meta(min_length=1)] = (
        "RS256",
        "ES256",
        "EdDSA",
    )
    leeway_s: Annotated[float, Meta(ge=0, le=300)] = 10.0
    """How far the issuer's clock may be from ours."""
    email_claim: str = "email"
    """Finds the user; `sub` does too, when it is the id of one."""
    organisation_claim: str = "organisation"
    """Id or name; a token that names an unknown one is refused. Of several users with one email, or projects with one
    name, it says which is meant; without it, it is the one that has had it the longest: admins of another organisation
    take none of yours by naming theirs so, but they could have been first."""
    project_claim: str = "project"
    """Id or name of the project that the request counts for; by default the user's own."""
    role_claim: str | None = None
    """A role or several, for whoever is no user here; None: they only ask models. It is held in the organisation that
    the token names: only users and keys have roles for the whole gateway."""


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who is let in."""

    mode: AuthMode = "auto"
    jwt: JwtConfig | None = None
    trusted_proxies: tuple[str, ...] = ()
    """CIDR networks whose X-Forwarded-For is believed. A Unix socket counts as 127.0.0.1."""
    allowed_networks: tuple[str, ...] = ()
    """CIDR networks that anybody at all may come from; none: from anywhere."""
    allowed_origins: tuple[str, ...] = ("localhost",)
    """Origins of the web pages that browsers let ask (CORS): `https://app.example.com`; `localhost`: of those that the
    browser's own machine serves, at any port; `*`: of all."""
