"""Sticky assignment: a salted hash places each user or session at a fixed point of the unit interval."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

import msgspec

ALL_TENANTS = "*"
"""Stands for every tenant in `sticky_key`."""
_FRACTION_BITS = 53
"""Bits of a float's mantissa, so that a point is exact."""


class TrafficSubject(msgspec.Struct, frozen=True, kw_only=True):
    """Sender of a request. The id of the request is used only if nothing else distinguishes it from others."""

    tenant: str
    user: str = ""
    """End user, as named by the client. Empty if it names none."""
    session: str = ""
    """Session or conversation. Empty if the client names none."""
    request: str = ""


def sticky_key(subject: TrafficSubject, per_session_tenants: Collection[str]) -> tuple[str, str]:
    """Return what is assigned as one: the user, or the session for the tenants given.

    A tenant that sends a large part of the traffic is divided into its sessions. Otherwise its requests would all go
    to one version, and one tenant would decide the comparison.
    """
    user, session = subject.user, subject.session
    if subject.tenant in per_session_tenants or ALL_TENANTS in per_session_tenants:
        return subject.tenant, session or user or subject.request
    return subject.tenant, user or session or subject.request


def hash_point(salt: str, *parts: str) -> float:
    """Return a point in [0, 1) that is uniform over salts and parts."""
    hashed = hashlib.blake2b(digest_size=8)
    for part in (salt, *parts):
        encoded = part.encode("utf-8", "surrogatepass")
        hashed.update(len(encoded).to_bytes(8, "big") + encoded)
    return (int.from_bytes(hashed.digest(), "big") >> (64 - _FRACTION_BITS)) / (1 << _FRACTION_BITS)


def choose_weighted(
    salt: str, key: Sequence[str], shares: Sequence[tuple[str, float]]
) -> str | None:
    """Return the name whose share contains the key; None for the rest if the shares sum to less than 1.

    Each name has a hash of its own. So a key that a share contains stays with the name when the share grows.
    """
    rest = 1.0
    for name, share in shares:
        if share > 0.0 and hash_point(salt, name, *key) * rest < share:
            return name
        rest -= share
    return None
