"""The principal: the authenticated sender of a request, with its tenant, role and tier."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from argosy.store import GatewayFlag, QualityConsent, Role, RoleScope, Tier

TIERS: tuple[Tier, ...] = get_args(Tier)
"""Tiers by rank. Rank 0 is the highest priority."""

KEEP_ALIVE_FLAG: GatewayFlag = "keep-alive"
"""Flag of a project or key whose requests may say how long a model stays awake."""
NO_SPECULATION_FLAG: GatewayFlag = "no-speculation"
"""Flag of projects and keys whose requests are computed without drafts."""


class Principal(msgspec.Struct, frozen=True, array_like=True):
    """Sender of a request, by ids of the store. Ids are empty for anonymous clients."""

    organisation: str = ""
    project: str = ""
    key: str = ""
    user: str = ""
    role: Role = "user"
    role_scope: RoleScope = "organisation"
    """Level at which the role is held: the organisation or the whole gateway."""
    tier: int = 1
    """Rank in `TIERS`."""
    weight: float = 1.0
    cache_domain: str = ""
    """Domain within which its requests may share cached prompts."""
    allowed_models: frozenset[str] | None = None
    """Public names of the models that it may use. None allows all."""
    flags: frozenset[str] = frozenset()
    """Flags of its project and its key."""
    quality: QualityConsent = "off"
    """Consent of its project to samples of its answers."""

    @property
    def is_anonymous(self) -> bool:
        """Whether no key or token identifies the sender."""
        return not (self.key or self.user or self.organisation)

    @property
    def tenant(self) -> str:
        """Id by which fair queuing groups requests: the project, or the organisation for users without one."""
        return self.project or self.organisation


ANONYMOUS = Principal(role="admin", role_scope="gateway")
"""Principal of requests without authentication: a single user on the local machine."""


class PrincipalFields(msgspec.Struct, frozen=True, kw_only=True):
    """Identity and role of a principal, as the admin API and the console answer them. Ids are null without a key."""

    organisation: str | None
    project: str | None
    key: str | None
    user: str | None
    role: Role
    scope: RoleScope
    """Where the role is held."""


def describe_principal(principal: Principal) -> dict[str, Any]:
    """Return the values of `PrincipalFields`."""
    ids = {name: getattr(principal, name) or None for name in PrincipalFields.__struct_fields__[:4]}
    return ids | {"role": principal.role, "scope": principal.role_scope}
