"""Settings of the console: the `console` section of the gateway's configuration."""

from __future__ import annotations

import msgspec


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
