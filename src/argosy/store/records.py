"""What the store keeps, as values. Times are seconds since the epoch; money is in nano-dollars."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Role = Literal["admin", "operator", "viewer", "caller"]
"""What a key or a token may do, the most first: everything; run the fleet; look; ask models. Each may do what the later
ones may, but only callers and admins ask models."""

RoleScope = Literal["organisation", "gateway"]
"""Where a role is held: in the organisation of its key or user, or for the whole gateway. For the role caller they are
the same."""

Tier = Literal["premium", "standard", "free"]
"""The first is served first."""

UsageStatus = Literal["completed", "cancelled", "failed", "stopped", "interrupted", "refused"]
"""How a request ended: as it should; the client left; it could not be answered; a limit or its deadline ended it; the
gateway died; it was not to be answered, as it was or then.

`slots.py` keeps their places: only ever add at the end.
"""

LimitUnit = Literal[
    "requests", "tokens", "input_tokens", "output_tokens", "concurrency", "nano_dollars"
]

OwnerKind = Literal["organisation", "project", "user", "key"]

QuotaFailureMode = Literal["open", "closed"]

LimitWindow = Literal["second", "minute", "hour", "day", "month"]
"""Day and month are the calendar's, in UTC; the others slide."""

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Names = Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(max_length=1000)]
Networks = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=100)]
"""In CIDR notation. Every request of whom they fence in is compared with each."""
LimitAmount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenPrice = Annotated[int, Meta(ge=0, le=10**9)]
"""Nano-dollars for a token: a dollar at most, so that what a ledger sums up stays within 64 bits."""
Weight = Annotated[float, Meta(ge=1e-6, le=1e6)]
Timestamp = Annotated[float, Meta(ge=0, le=253_402_300_799)]
"""Seconds since the epoch, until the year 9999."""


class AccountRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What accounts are made of."""

    id: str


class Organisation(AccountRecord, frozen=True, kw_only=True):
    """Who pays. Owns projects and users."""

    name: Name
    """Unique among those that are not archived."""
    created_at: float
    archived_at: float | None = None
    """Then all of its projects are archived and its users disabled as well."""


class Project(AccountRecord, frozen=True, kw_only=True):
    """A tenant: what fairness, limits and isolation are about."""

    organisation: str
    """Id of its organisation."""
    name: Name
    """Unique in its organisation, among those that are not archived."""
    tier: Tier = "standard"
    weight: Weight = 1.0
    """Its share, beside others of its tier."""
    share_cache: bool = False
    """Whether it shares cached prompts with its organisation's other projects that share."""
    when_unsure: QuotaFailureMode = "open"
    """What its limits do while the state that gateways share is down: go on locally, or refuse."""
    networks: Networks = ()
    """Those that its callers may come from; none: from anywhere."""
    flags: Names = ()
    """What a gateway's routes may go by."""
    created_at: float
    archived_at: float | None = None


class User(AccountRecord, frozen=True, kw_only=True):
    """A person, for sign-in by JWT and for usage by user."""

    organisation: str
    email: Name
    """In lower case; unique in its organisation, among those that are not disabled."""
    role: Role = "caller"
    scope: RoleScope = "organisation"
    project: str | None = None
    """The project that their requests count for when the token names none."""
    created_at: float
    disabled_at: float | None = None


class KeyInfo(AccountRecord, frozen=True, kw_only=True):
    """What may be told of an API key."""

    project: str
    user: str | None = None
    name: Name
    """Unique in its project, among the keys that still work and have not been rotated."""
    prefix: str
    """The beginning of the key, by which people know it; not secret."""
    role: Role = "caller"
    scope: RoleScope = "organisation"
    models: Names = ()
    """Public model names it may use; none: all."""
    networks: Networks = ()
    flags: Names = ()
    """Beside those of its project."""
    created_at: float
    expires_at: Timestamp | None = None
    revoked_at: float | None = None
    replaced_by: str | None = None
    """Id of the key that it was rotated into; both work until it expires."""


class Key(KeyInfo, frozen=True, kw_only=True):
    """An API key. The key itself is shown once; only its digest is kept."""

    digest: bytes
    """SHA-256 of the whole key."""


class Limit(AccountRecord, frozen=True, kw_only=True):
    """At most `amount` units of `unit` in each window (or at a time) for one owner."""

    owner_kind: OwnerKind
    owner: str
    """Id of the owner."""
    unit: LimitUnit
    amount: LimitAmount
    window: LimitWindow | None = None
    """None: concurrency has no window."""
    model: Name | None = None
    """Public model name; None: all models together."""


class Price(AccountRecord, frozen=True, kw_only=True):
    """What a model's tokens cost from a moment on."""

    id: str = ""
    """Given by the store."""
    model: Name
    """Public name."""
    tier: Tier | None = None
    """None: for every tier that has no price of its own."""
    input: TokenPrice
    """For each token that was not cached."""
    cached_input: TokenPrice
    output: TokenPrice
    since: Timestamp = 0.0


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the ledger: how one admitted request ended, and what it used. Written once."""

    request: str
    """By which it counts once. Never an id that the client chose: two requests with one id would count as one."""
    organisation: str = ""
    project: str = ""
    key: str = ""
    user: str = ""
    model: str = ""
    """Public name of the one that answered."""
    asked: str = ""
    """What the client called it; empty: it began before this was kept."""
    route: str = ""
    """Name of the one that decided which model answers; empty: none did."""
    replica: str = ""
    """The one that ended it."""
    started_at: float
    ended_at: float
    status: UsageStatus
    input_tokens: int = 0
    """Of the prompt, cached ones included."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """Delivered."""
    nano_dollars: int = 0


class AccountSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that a gateway must know to let requests in, as of one version. Small enough to be held in memory.

    Revoked keys have left it. What is archived, disabled, or has expired in the last 30 days is there and marked,
    so that whoever comes with it can be told why they are refused.
    """

    version: int = 0
    """Raised by each change."""
    audit_entries: int = 0
    """Those of the audit log."""
    audit_head: bytes = b""
    """Of the last change, as in the audit log."""
    organisations: tuple[Organisation, ...] = ()
    projects: tuple[Project, ...] = ()
    users: tuple[User, ...] = ()
    renamed_at: dict[str, float] = {}
    """Ids of projects and users that were given another name or email, and when they were given the one they have."""
    keys: tuple[Key, ...] = ()
    limits: tuple[Limit, ...] = ()
    prices: tuple[Price, ...] = ()
    successors: dict[str, str] = {}
    """Ids of all keys that were ever rotated, and of those that took their places."""
    has_had_keys: bool = False
    """Whether a key was ever made, one that is revoked by now too."""
    read_at: float = 0.0
    """When its reading began, on the monotonic clock."""

    @property
    def requires_keys(self) -> bool:
        """Whether callers need keys: revoking the last one opens nothing."""
        return self.has_had_keys or bool(self.keys)
