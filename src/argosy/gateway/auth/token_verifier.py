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

MAX_CACHED_TOKENS = 8192
"""Most tokens whose signature is not checked again while they last."""
MAX_TOKEN_LENGTH = 16 * 1024
MAX_EXPIRY_S = 2**53
"""Seconds: later times, which may be beyond any float, are the same."""


class TokenClaims(msgspec.Struct, frozen=True, kw_only=True):
    """What the issuer says; empty where it says nothing."""

    subject: str
    email: str
    organisation: str
    project: str
    role: Role
    expires_at: float


class TokenVerifier:
    """Checks tokens and remembers those that were good. Belongs to one thread."""

    def __init__(self, config: JwtConfig, clock: Callable[[], float]) -> None:
        self._config = config
        self._clock = clock
        self._signing_keys = SigningKeys(config, SteadyClock(clock))
        self._verified_claims: dict[bytes, TokenClaims] = {}
        self._verified_with = self._signing_keys.published

    def cached_claims(self, token: str) -> TokenClaims | None:
        """The claims of a token that was found good before, and still is, as far as the issuer's keys are known."""
        self._signing_keys.refresh_if_stale()
        if self._verified_with is not self._signing_keys.published:
            self._verified_claims.clear()
            self._verified_with = self._signing_keys.published
        digest = _token_digest(token)
        claims = self._verified_claims.get(digest)
        if claims is not None and claims.expires_at <= self._clock():
            del self._verified_claims[digest]
            return None
        return claims

    def verify(self, token: str) -> TokenClaims:
        """Check signature and claims. Raises ApiError 401, or 503 when the keys are not at hand."""
        config = self._config
        try:
            claims: dict[str, Any] = jwt.decode(
                token,
                self._find_signing_key(token),
                algorithms=list(config.algorithms),
                audience=config.audience,
                issuer=config.issuer,
                leeway=config.leeway_s,
                options={"require": ["exp"], "enforce_minimum_key_length": True},
            )
        except jwt.PyJWTError as error:
            raise ApiError(401, "invalid_token", _error_message(error)) from error
        known = self._verified_claims
        while len(known) >= MAX_CACHED_TOKENS:
            del known[next(iter(known))]
        known[_token_digest(token)] = read = self._parse_claims(claims)
        return read

    def _find_signing_key(self, token: str) -> jwt.PyJWK:
        if len(token) > MAX_TOKEN_LENGTH:
            raise jwt.DecodeError(f"it is longer than {MAX_TOKEN_LENGTH} characters")
        header = jwt.get_unverified_header(token)
        algorithm, key_id = header.get("alg"), header.get("kid", "")
        if algorithm not in self._config.algorithms:
            raise jwt.InvalidAlgorithmError
        return self._signing_keys.find(key_id, algorithm)

    def _parse_claims(self, claims: dict[str, Any]) -> TokenClaims:
        config = self._config
        verified = claims.get("email_verified", True)
        return TokenClaims(
            subject=_claim_text(claims, "sub"),
            email=_claim_text(claims, config.email_claim).lower() if verified is True else "",
            organisation=_claim_text(claims, config.organisation_claim),
            project=_claim_text(claims, config.project_claim),
            role=_highest_role(claims.get(config.role_claim)) if config.role_claim else "caller",
            expires_at=min(int(claims["exp"]), MAX_EXPIRY_S) + config.leeway_s,
        )


def _token_digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("latin-1")).digest()


def _claim_text(claims: dict[str, Any], name: str) -> str:
    """What a claim says; a question mark where that cannot be written down: half a character, say."""
    value = claims.get(name)
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() else "?" for c in value)


def _highest_role(claimed: object) -> Role:
    """The highest role that is claimed."""
    names = claimed if isinstance(claimed, list) else [claimed]
    return next((cast("Role", role) for role in get_args(Role) if role in names), "caller")


def _error_message(error: jwt.PyJWTError) -> str:
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
