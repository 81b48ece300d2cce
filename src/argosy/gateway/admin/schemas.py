"""JSON of the admin API: what is answered, and what is sent to it. Times are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from argosy.store import (
    AuditEntry,
    AuditVerification,
    Key,
    KeyInfo,
    Limit,
    LimitAmount,
    LimitUnit,
    LimitWindow,
    Name,
    Names,
    Networks,
    Organisation,
    OwnerKind,
    PageRequest,
    Price,
    Project,
    QuotaFailureMode,
    Role,
    RoleScope,
    Tier,
    Timestamp,
    TokenPrice,
    UsageReportRow,
    User,
    Weight,
)

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class OrganisationView(
    Organisation, frozen=True, kw_only=True, tag_field="object", tag="organisation"
):
    """An organisation: who pays."""


class ProjectView(Project, frozen=True, kw_only=True, tag_field="object", tag="project"):
    """A project: a tenant."""


class UserView(User, frozen=True, kw_only=True, tag_field="object", tag="user"):
    """A person."""


class LimitView(Limit, frozen=True, kw_only=True, tag_field="object", tag="limit"):
    """A limit of one owner."""


class PriceView(Price, frozen=True, kw_only=True, tag_field="object", tag="price"):
    """What a model's tokens cost from a moment on."""


class KeyView(KeyInfo, frozen=True, kw_only=True, tag_field="object", tag="key"):
    """An API key, by its beginning."""


class NewKeyView(KeyView, frozen=True, kw_only=True, tag_field="object", tag="key"):
    """A key that was just made."""

    key: str
    """The key itself: it is told this once."""


ListedRecord = Organisation | Project | User | Key | Limit | Price
V = TypeVar("V", OrganisationView, ProjectView, UserView, KeyView, LimitView, PriceView)


class AuditEntryView(AuditEntry, frozen=True, kw_only=True, tag_field="object", tag="audit.entry"):
    """One change, sealed by a hash over all before it."""


class AuditVerificationView(
    AuditVerification, frozen=True, kw_only=True, tag_field="object", tag="audit.verdict"
):
    """Whether the audit log is whole."""


class UsageView(UsageReportRow, frozen=True, kw_only=True, tag_field="object", tag="usage"):
    """What one group of requests used."""


class PrincipalView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="caller"):
    """Whoever asks; null where it is nobody in particular."""

    organisation: str | None
    project: str | None
    key: str | None
    user: str | None
    role: Role
    scope: RoleScope
    """Where the role is held."""
    models: list[str] | None
    """Those it may use; null: all."""


class DeletedView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="deleted"):
    """What is no longer there."""

    id: str


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None
    """For `after`, to get the next part."""


def to_view(record: msgspec.Struct, view_type: type[S], **extra: object) -> S:
    """The record as it is shown: those of its fields that the view has, and `more`."""
    fields = msgspec.structs.asdict(record) | extra
    return view_type(**{name: fields[name] for name in view_type.__struct_fields__})


def get_given_fields(body: msgspec.Struct) -> dict[str, Any]:
    """The fields of a body, without those that were left out of a change."""
    fields = msgspec.structs.asdict(body)
    return {name: value for name, value in fields.items() if value is not UNSET}


def to_page(records: Sequence[ListedRecord], view_type: type[V], query: PageQuery) -> Page[V]:
    """The part of a list that the query asks for; one record more than that says that there are more."""
    part = [to_view(record, view_type) for record in records[: query.limit]]
    return Page(
        data=part,
        has_more=len(records) > query.limit,
        first_id=part[0].id if part else None,
        last_id=part[-1].id if part else None,
    )


# --- parameters in the URL -----------------------------------------------------------------------


class PageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of a list."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100

    @property
    def page_request(self) -> PageRequest:
        """What is to be found of the list, see `page`."""
        return PageRequest(self.after, self.limit + 1)


class OrganisationFilter(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A list of what one organisation has; by default of what all have."""

    organisation: str | None = None


class ProjectFilter(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A list of what one project has; by default of what all have."""

    project: str | None = None


class OwnerFilter(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one owner, or of one kind of owners; by default all."""

    owner_kind: OwnerKind | None = None
    owner: str | None = None


class ModelFilter(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prices of one model; by default all."""

    model: str | None = None


class OwnReportQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of the caller's own rows of the ledger are summed, and by what. Whose they are cannot be asked for."""

    since: Timestamp | None = None
    """Ended at this moment or later."""
    until: Timestamp | None = None
    """Ended before."""
    model: str | None = None
    asked: str | None = None
    route: str | None = None
    replica: str | None = None
    group_by: str = ""
    """Of day, organisation, project, key, user, model, asked, route and replica, with commas between."""


class ReportQuery(OwnReportQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same of all rows; ids say whose."""

    organisation: str | None = None
    project: str | None = None
    key: str | None = None
    user: str | None = None


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which entries of the audit log."""

    subject: str | None = None
    """Id of what was changed."""
    before: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    """Only entries with lower numbers: `last_id` of a part gives the next one."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


# --- bodies --------------------------------------------------------------------------------------


class OrganisationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An organisation."""

    name: Name


class NewProject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A project to make."""

    organisation: str
    name: Name
    tier: Tier | UnsetType = UNSET
    """By default standard."""
    weight: Weight | UnsetType = UNSET
    """By default 1."""
    share_cache: bool = False
    when_unsure: QuotaFailureMode = "open"
    networks: Networks = ()
    flags: Names | UnsetType = UNSET


class ProjectChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change of a project; what is left out stays."""

    name: Name | UnsetType = UNSET
    tier: Tier | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET
    share_cache: bool | UnsetType = UNSET
    when_unsure: QuotaFailureMode | UnsetType = UNSET
    networks: Networks | UnsetType = UNSET
    flags: Names | UnsetType = UNSET


class NewUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user to make."""

    organisation: str
    email: Name
    role: Role = "caller"
    scope: RoleScope = "organisation"
    project: str | None = None


class UserChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change of a user; what is left out stays."""

    email: Name | UnsetType = UNSET
    role: Role | UnsetType = UNSET
    scope: RoleScope | UnsetType = UNSET
    project: str | UnsetType | None = UNSET


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to make."""

    project: str
    name: Name
    user: str | None = None
    role: Role = "caller"
    scope: RoleScope = "organisation"
    models: Names = ()
    networks: Networks = ()
    flags: Names = ()
    expires_at: Timestamp | None = None


class KeyRotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to rotate a key."""

    overlap_s: Annotated[float, Meta(ge=0, le=366 * 86400)] = 86400.0
    """How long the old one still works."""


class NewLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A limit to set, in place of the one that the owner has for the same unit, window and model."""

    owner_kind: OwnerKind
    owner: str
    unit: LimitUnit
    amount: LimitAmount
    window: LimitWindow | None = None
    model: Name | None = None


class NewPrice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price to set, in nano-dollars for each token."""

    model: Name
    tier: Tier | None = None
    input: TokenPrice
    cached_input: TokenPrice
    output: TokenPrice
    since: Timestamp | None = None
    """By default from now on."""
