"""From a JSON Web Token (RFC 7519) to what its issuer says of the bearer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast, get_args

import jwt
import msgspec

from argosy.gateway.auth.auth_config import JwtConfig
from argosy.gateway.auth.signing_keys import SigningKeys
from argosy.protocol import ApiError
from argosy.store import Role, SteadyClock

REMEMBERED = 8192
"""Most tokens whose signature is not checked again while they last."""
LONGEST = 16 * 1024
FOREVER = 2**53
"""Seconds: later times, which may be beyond any float, are the same."""


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What the issuer says; empty where it says nothing."""

    subject: str
    email: str
    organisation: str
    project: str
    role: Role
    expires_at: float


class Tokens:
    """Checks tokens and remembers those that were good. Belongs to one thread."""

    def __init__(self, config: JwtConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._keys = SigningKeys(config, SteadyClock(clock))
        self._known: dict[bytes, Claims] = {}
        self._published = self._keys.published

    def known(self, token: str) -> Claims | None:
        """The claims of a token that was found good before, and still is, as far as the issuer's keys are known."""
        self._keys.refresh()
        if self._published is not self._keys.published:
            self._known.clear()
            self._published = self._keys.published
        digest = _digest(token)
        claims = self._known.get(digest)
        if claims is not None and claims.expires_at <= self._clock():
            del self._known[digest]
            return None
        return claims

    def check(self, token: str) -> Claims:
        """Check signature and claims. Raises ApiError 401, or 503 when the keys are not at hand."""
        config = self._config
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key(token),
                algorithms=list(config.algorithms),
                audience=config.audience,
                issuer=config.issuer,
                leeway=config.leeway_s,
                options={"require": ["exp"], "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as error:
            raise ApiError(401, "invalid_token", _reason(error)) from error
        known = self._known
        while len(known) >= REMEMBERED:
            del known[next(iter(known))]
        known[_digest(token)] = read = self._read(claims)
        return read

    def _key(self, token: str) -> jwt.PyJWK:
        if len(token) > LONGEST:
            raise jwt.DecodeError(f"it is longer than {LONGEST} characters")
        header = jwt.get_unverified_header(token)
        algorithm, key_id = header.get("alg"), header.get("kid", "")
        if algorithm not in self._config.algorithms:
            raise jwt.InvalidAlgorithmError
        return self._keys.find(key_id, algorithm)

    def _read(self, claims: dict[str, Any]) -> Claims:
        config = self._config
        verified = claims.get("email_verified", True)
        return Claims(
            subject=_text(claims, "sub"),
            email=_text(claims, config.email_claim).lower() if verified is True else "",
            organisation=_text(claims, config.organisation_claim),
            project=_text(claims, config.project_claim),
            role=_role(claims.get(config.role_claim)) if config.role_claim else "caller",
            expires_at=min(int(claims["exp"]), FOREVER) + config.leeway_s,
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("latin-1")).digest()


def _text(claims: dict[str, Any], name: str) -> str:
    """What a claim says; a question mark where that cannot be written down: half a character, say."""
    value = claims.get(name)
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() else "?" for c in value)


def _role(claimed: object) -> Role:
    """The highest role that is claimed."""
    names = claimed if isinstance(claimed, list) else [claimed]
    return next((cast("Role", role) for role in get_args(Role) if role in names), "caller")


def _reason(error: jwt.PyJWTError) -> str:
    match error:
        case jwt.ExpiredSignatureError():
            return "The token has expired. Sign in again."
        case jwt.ImmatureSignatureError():
            return "The token is not valid yet: the issuer's clock and ours differ."
        case jwt.InvalidAudienceError():
            return "The token is for another service. Ask for one with this gateway's audience."
        case jwt.InvalidIssuerError():
            return "The token is of an issuer that is not trusted here."
        case jwt.MissingRequiredClaimError():
            return f"The token lacks the claim {error.claim!r}. Ask its issuer to add it."
        case jwt.InvalidAlgorithmError():
            return "The token is signed with an algorithm that is not allowed here."
        case _:
            return "The token is not valid. Sign in again."
