"""On whose behalf a request comes, once the gateway knows."""

from __future__ import annotations

from typing import get_args

import msgspec

from argosy.store import Role, RoleScope, Tier

TIERS: tuple[Tier, ...] = get_args(Tier)
"""By rank: 0 is served first."""


class Principal(msgspec.Struct, frozen=True, array_like=True):
    """Ids as in the store; empty ones where nobody had to say who they are."""

    organisation: str = ""
    project: str = ""
    key: str = ""
    user: str = ""
    role: Role = "caller"
    role_scope: RoleScope = "organisation"
    """Where the role is held."""
    tier: int = 1
    """Rank in `TIERS`."""
    weight: float = 1.0
    cache_domain: str = ""
    """Whose cached prompts its requests may share."""
    allowed_models: frozenset[str] | None = None
    """Public names that it may use; None: all."""
    flags: frozenset[str] = frozenset()
    """Of its project and its key."""

    @property
    def tenant(self) -> str:
        """With whom it shares its turns: its project; users who have none, with those of their organisation."""
        return self.project or self.organisation


ANONYMOUS = Principal(role="admin", role_scope="gateway")
"""Where no keys are asked for: one person, on their own machine."""
