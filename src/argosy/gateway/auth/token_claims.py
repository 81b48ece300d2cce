"""Claims of a verified token."""

from __future__ import annotations

import msgspec

from argosy.store import Role


class TokenClaims(msgspec.Struct, frozen=True, kw_only=True):
    """Claims that the gateway uses. Missing claims are empty."""

    subject: str
    email: str
    organisation: str
    project: str
    role: Role
    expires_at: float
