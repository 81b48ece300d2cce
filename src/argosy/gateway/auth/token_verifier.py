"""Verification of JSON Web Tokens (RFC 7519), with a cache of verified tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, cast, get_args

import jwt

from argosy.deployment import JwtConfig
from argosy.gateway.auth.credential_index import TokenClaims
from argosy.gateway.auth.signing_keys import SigningKeys
from argosy.protocol import ApiError
from argosy.store import Role

MAX_CACHED_TOKENS = 8192
"""Maximum number of verified tokens kept, whose signatures are not checked again until they expire."""
MAX_TOKEN_LENGTH = 16 * 1024
MAX_EXPIRY_S = 2**53
"""Latest expiry in seconds since the epoch. Later times, which may exceed a float's range, are reduced to it."""


class TokenVerifier:
    """Verifies tokens and caches the claims of valid ones. Not thread-safe."""

    def __init__(
        self, config: JwtConfig, clock: Callable[[], float], steady_clock: Callable[[], float]
    ) -> None:
        self._config = config
        self._clock = clock
        self._signing_keys = SigningKeys(config, steady_clock)
        self._verified_claims: dict[bytes, TokenClaims] = {}
        self._verified_with = self._signing_keys.published

    def cached_claims(self, token: str) -> TokenClaims | None:
        """Return the claims of a token verified before, unless it has expired or the issuer's keys have changed."""
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
        """Verify the signature and the claims.

        Raises:
            ApiError: 401 if the token is invalid. 503 if the signing keys are not loaded yet.
        """
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
        cached = self._verified_claims
        while len(cached) >= MAX_CACHED_TOKENS:
            del cached[next(iter(cached))]
        cached[_token_digest(token)] = token_claims = self._parse_claims(claims)
        return token_claims

    def verify_nonce(self, token: str, nonce: str) -> TokenClaims:
        """Verify a token that answers a sign-in with this nonce.

        Raises:
            ApiError: 401 if the token is invalid or answers another sign-in. 503 if the keys are not loaded yet.
        """
        claims = self.verify(token)
        unverified = jwt.decode(token, options={"verify_signature": False})
        if not nonce or unverified.get("nonce") != nonce:
            message = "The token answers another sign-in. Sign in again."
            raise ApiError(401, "invalid_token", message)
        return claims

    def _find_signing_key(self, token: str) -> jwt.PyJWK:
        if len(token) > MAX_TOKEN_LENGTH:
            raise jwt.DecodeError(f"the token is longer than {MAX_TOKEN_LENGTH} characters")
        header = jwt.get_unverified_header(token)
        algorithm, key_id = header.get("alg"), header.get("kid", "")
        if algorithm not in self._config.algorithms:
            raise jwt.InvalidAlgorithmError
        return self._signing_keys.find(key_id, algorithm)

    def _parse_claims(self, claims: dict[str, Any]) -> TokenClaims:
        config = self._config
        verified = claims.get("email_verified", config.issuer_verifies_emails)
        return TokenClaims(
            subject=_claim_text(claims, "sub"),
            email=_claim_text(claims, config.email_claim).lower() if verified is True else "",
            organisation=_claim_text(claims, config.organisation_claim),
            project=_claim_text(claims, config.project_claim),
            role=_highest_role(claims.get(config.role_claim)) if config.role_claim else "user",
            expires_at=min(int(claims["exp"]), MAX_EXPIRY_S) + config.leeway_s,
        )


def _token_digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("latin-1")).digest()


def _claim_text(claims: dict[str, Any], name: str) -> str:
    """Return a text claim with unprintable characters replaced by question marks, for example lone surrogates."""
    value = claims.get(name)
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() else "?" for c in value)


def _highest_role(claimed: object) -> Role:
    """Return the highest of the claimed roles, or the role user if none is known."""
    names = claimed if isinstance(claimed, list) else [claimed]
    return next((cast("Role", role) for role in get_args(Role) if role in names), "user")


def _error_message(error: jwt.PyJWTError) -> str:
    match error:
        case jwt.ExpiredSignatureError():
            return "The token has expired. Sign in again."
        case jwt.ImmatureSignatureError():
            return (
                "The token is not valid yet, because the issuer's clock and the gateway's differ."
            )
        case jwt.InvalidAudienceError():
            return "The token is for another service. Request one with this gateway's audience."
        case jwt.InvalidIssuerError():
            return "The token is from an issuer that this gateway does not trust."
        case jwt.MissingRequiredClaimError():
            return f"The token lacks the claim {error.claim!r}. Ask its issuer to add it."
        case jwt.InvalidAlgorithmError():
            return "The token is signed with an algorithm that this gateway does not allow."
        case _:
            return "The token is not valid. Sign in again."
