"""JSON types of the admin API: responses, query parameters and bodies. Times are seconds since the epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from argosy.gateway.model_registry import AdapterReplica
from argosy.gateway.principal import PrincipalFields
from argosy.policy import SizeAdvice
from argosy.policy.prompts import PromptContent
from argosy.policy.quality import SampleComparison
from argosy.policy.rollout import MetricVerdict
from argosy.policy.traffic import FeatureFlag, FlagState, VariantName
from argosy.store import (
    DEFAULT_STEP_S,
    PRODUCTION,
    Adapter,
    AdapterReplicas,
    AuditEntry,
    AuditVerification,
    ContentDigest,
    CostRow,
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
    Percent,
    Price,
    Project,
    PromptLabel,
    PromptName,
    QualityConsent,
    QualitySample,
    QualitySet,
    QuotaFailureMode,
    RecordOrder,
    Role,
    RoleScope,
    SampledTexts,
    SampleSummary,
    StepSeconds,
    Tier,
    Timestamp,
    TokenPrice,
    UsageReportRow,
    UsageStatus,
    User,
    Weight,
)

SortOrder = Literal["asc", "desc"]
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


class OrganisationView(
    Organisation, frozen=True, kw_only=True, tag_field="object", tag="organisation"
):
    """An organisation, which pays for usage."""


class ProjectView(Project, frozen=True, kw_only=True, tag_field="object", tag="project"):
    """A project, which is a tenant."""

    stored_bytes: int
    """Bytes of its responses and conversations."""
    max_stored_bytes: int
    """Bytes that it may store: its limit on `stored_bytes`, or `store.max_stored_bytes_per_project` of the settings."""
    unread_flags: list[str]
    """Flags of it that neither a rule nor the gateway reads now."""


class UserView(User, frozen=True, kw_only=True, tag_field="object", tag="user"):
    """A person."""


class LimitView(Limit, frozen=True, kw_only=True, tag_field="object", tag="limit"):
    """A limit of one owner."""


class PriceView(Price, frozen=True, kw_only=True, tag_field="object", tag="price"):
    """Token prices of a model from a time on."""


class AdapterView(Adapter, frozen=True, kw_only=True, tag_field="object", tag="adapter"):
    """An adapter of a base model under a name. Those of the fleet file have ids that begin with `declared`."""

    wanted_replicas: int
    """Number of replicas that keep it loaded; 0 if the next request loads it."""
    resident_replicas: int
    """Number of replicas that have it loaded, as this gateway knows."""
    size_bytes: int
    """Its memory at a replica; 0 if none has reported it."""
    replicas: tuple[AdapterReplica, ...]
    """Replicas that may load it. Empty for callers whose role does not hold in the whole gateway."""
    rollout_status: str
    """State of the rollout of the candidate, or why the last one was rolled back. Empty if there was none."""
    evidence: tuple[MetricVerdict, ...]
    """Result of the comparison of the candidate with the version that answers, by metric."""


class PromptView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="prompt"):
    """Version of a prompt. Those of the fleet file have ids that begin with `declared`."""

    id: str
    organisation: str | None
    """Id of the organisation whose requests may use it. Null for all callers of the gateway."""
    project: str | None
    """Id of the project whose requests may use it. Null for the whole organisation."""
    name: str
    version: int
    labels: list[str]
    """Movable names of the version."""
    content: PromptContent | None
    """Null if the version is deleted."""
    created_at: float
    created_by: str


class CheckedPromptView(PromptView, frozen=True, kw_only=True, tag_field="object", tag="prompt"):
    """Version of a prompt, with its variables and warnings."""

    variables: list[str]
    """Names of the variables that requests give."""
    warnings: list[str]
    """Variables that keep fixed text from being found in the KV cache, one sentence each."""


class QualitySetView(QualitySet, frozen=True, kw_only=True, tag_field="object", tag="golden_set"):
    """Version of a golden set."""


class QualitySampleView(
    QualitySample, frozen=True, kw_only=True, tag_field="object", tag="quality_sample"
):
    """Grade of a sampled answer, without its texts."""


class SampleTextsView(
    SampledTexts, frozen=True, kw_only=True, tag_field="object", tag="quality_sample.texts"
):
    """Texts of a sampled answer, without personal data."""


class SampleSummaries(msgspec.Struct, frozen=True, kw_only=True):
    """Grades of sampled answers by model, version and judge."""

    data: list[SampleSummary]
    comparisons: list[SampleComparison]
    """Latest version of each model beside the one before it."""


class QualityRunView(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="quality_run"
):
    """Result of a run of a golden set."""

    id: str
    organisation: str | None
    quality_set: str
    """Id of the version of the set."""
    model: str
    against: str
    """Model that it was compared with. Empty for none."""
    verdict: str
    """`worse`, `not_worse` or `undecided`. Empty without a comparison."""
    score: float
    """Mean score of the model, from 0 to 1."""
    result: msgspec.Raw
    """Figures of the run, as `argosy quality run --json` prints them."""
    created_at: float
    created_by: str


class RenderedPromptView(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="prompt.rendered"
):
    """A prompt with the values of its variables, which is not sent to a model."""

    id: str
    """Id of the version."""
    prompt: str
    """Its name and number, such as `support@3`."""
    text: str | None
    """The text; null for a chat."""
    messages: list[Any]
    """Messages of a chat with those of the request."""
    parameters: dict[str, Any]
    """Fields that a request gets if it has none of its own."""


class FlagView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="flag"):
    """A feature flag of the settings, as operators have switched it."""

    id: str
    """Its name."""
    flag: FeatureFlag
    """The flag as it is evaluated."""
    declared: FeatureFlag
    """The flag of the settings."""
    read_by: list[str]
    """Rules that read it."""
    reason: str
    """Why an operator switched it; empty if none did."""
    changed_at: float | None
    changed_by: str | None
    problem: str
    """Why a decision does not fit the declared flag, and is not applied. Empty if it does."""


class KeyView(KeyInfo, frozen=True, kw_only=True, tag_field="object", tag="key"):
    """An API key, without the plain key."""

    unread_flags: list[str]
    """Flags of it that neither a rule nor the gateway reads now."""


class NewKeyView(KeyView, frozen=True, kw_only=True, tag_field="object", tag="key"):
    """A new API key."""

    key: str
    """Plain key, which only this response contains."""


ListedRecord = (
    Organisation
    | Project
    | User
    | KeyInfo
    | Limit
    | Price
    | Adapter
    | PromptView
    | QualitySet
    | QualityRunView
    | QualitySample
)
V = TypeVar(
    "V",
    OrganisationView,
    ProjectView,
    UserView,
    KeyView,
    LimitView,
    PriceView,
    AdapterView,
    PromptView,
    QualitySetView,
    QualityRunView,
    QualitySampleView,
)


class AuditEntryView(AuditEntry, frozen=True, kw_only=True, tag_field="object", tag="audit.entry"):
    """An account change in the audit log, with a hash over all previous entries."""

    names: dict[str, str]
    """Names of the organisations, projects, keys and users whose ids it has, as far as the caller may know them."""


class AuditVerificationView(
    AuditVerification, frozen=True, kw_only=True, tag_field="object", tag="audit.verdict"
):
    """Result of the verification of the audit log."""


class UsageView(UsageReportRow, frozen=True, kw_only=True, tag_field="object", tag="usage"):
    """Usage of one group of requests."""


class CostView(CostRow, frozen=True, kw_only=True, tag_field="object", tag="cost"):
    """A project's bill for a model, beside the cost that it caused."""


class CostAdviceView(SizeAdvice, frozen=True, kw_only=True, tag_field="object", tag="cost.advice"):
    """Advice on the number of replicas of a model, and what they cost."""

    model: str
    replicas: int
    pools: list[str]
    """Its pools in the fleet file. Empty for replicas that no fleet declares."""
    owners: list[str]
    saved_nano_dollars: int
    """Saving of the advice in a month of 730 hours; negative if it adds replicas."""
    month_nano_dollars: int
    """Cost of the hardware in this month (UTC) until now."""
    expected_nano_dollars: int
    """Its cost at the end of the month, at the mean of the last 7 days."""


class BudgetView(Limit, frozen=True, kw_only=True, tag_field="object", tag="budget"):
    """A limit for a day or a month, and its use in the present period."""

    used: int
    starts_at: float
    ends_at: float
    expected: int
    """Use at the end of the period at the rate since it began."""
    exhausted_at: float | None
    """When it is used up at this rate. Null if the period ends first, or has just begun."""
    step_percent: Literal[0, 50, 80, 100]
    """Highest of these shares that is used."""


class CostOutlierView(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="cost.outlier"
):
    """A request that cost far more than others of its project and model."""

    request: str
    organisation: str
    project: str
    key: str
    user: str
    model: str
    ended_at: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    nano_dollars: int
    p99_nano_dollars: int
    """99th percentile of the cost of the requests of its project and model."""
    reason: str
    """The kind of token that makes it expensive."""


class RequestColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of ended requests, each as a list with one value for each request."""

    request: list[str]
    organisation: list[str]
    project: list[str]
    project_name: list[str]
    key: list[str]
    key_name: list[str]
    user: list[str]
    user_name: list[str]
    model: list[str]
    replica: list[str]
    status: list[UsageStatus]
    started_at: list[float]
    duration_s: list[float]
    input_tokens: list[int]
    cached_tokens: list[int]
    output_tokens: list[int]
    nano_dollars: list[int]
    findings: list[str]


class RequestTableView(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="request.table"
):
    """Page of the ledger's requests. Columns take a third of the bytes of a list of objects."""

    columns: RequestColumns
    next: str | None
    """Value for `before` of the next page, or null if this is the last. A page of a filter that few requests match may
    have less than `limit` rows, or none, although it is not the last."""
    searched_from: float | None
    """End time of the oldest request that was searched or sorted for this page, if older ones were not."""


class PrincipalView(PrincipalFields, frozen=True, kw_only=True, tag_field="object", tag="caller"):
    """Identity and role of the caller. Ids are null for an anonymous caller."""

    models: list[str] | None
    """Models that the caller may use, or null for all."""


class DeletedView(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="deleted"):
    """A deleted resource."""

    id: str


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Page of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None
    """Id to pass as `after` to get the next page."""


def build_page(data: list[T], *, has_more: bool = False) -> Page[T]:
    """Return a page of records that have no ids."""
    return Page(data=data, has_more=has_more, first_id=None, last_id=None)


def to_view(record: msgspec.Struct, view_type: type[S], **extra: object) -> S:
    """Convert a record to a view with those of its fields that the view has, and the fields in `extra`."""
    fields = msgspec.structs.asdict(record) | extra
    return view_type(**{name: fields[name] for name in view_type.__struct_fields__})


def get_given_fields(body: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a body except those that the client left out."""
    fields = msgspec.structs.asdict(body)
    return {name: value for name, value in fields.items() if value is not UNSET}


def to_page(records: Sequence[ListedRecord], view_type: type[V], query: PageQuery) -> Page[V]:
    """Build the page that the query requests. One record more than the page has means that more exist."""
    views = [to_view(record, view_type) for record in records[: query.limit]]
    return Page(
        data=views,
        has_more=len(records) > query.limit,
        first_id=views[0].id if views else None,
        last_id=views[-1].id if views else None,
    )


# --- parameters in the URL -----------------------------------------------------------------------


class PageQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a paged list."""

    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100

    @property
    def page_request(self) -> PageRequest:
        """Page to read from the store, with one record more to detect whether more exist."""
        return PageRequest(self.after, self.limit + 1)


class OrganisationFilter(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter and page of a list. Without an organisation it has the records of all."""

    organisation: str | None = None


class ProjectFilter(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter and page of a list. Without a project it has the records of all."""

    project: str | None = None


class OwnerFilter(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter and page of the list of limits, by owner or kind of owner. Without either it has all limits."""

    owner_kind: OwnerKind | None = None
    owner: str | None = None


class ModelFilter(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter and page of the list of prices. Without a model it has the prices of all."""

    model: str | None = None


class OwnReportQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter and groups of a report of the caller's own usage."""

    since: Timestamp | None = None
    """Only requests that ended at this time or later."""
    until: Timestamp | None = None
    """Only requests that ended before this time."""
    model: str | None = None
    asked: str | None = None
    route: str | None = None
    replica: str | None = None
    group_by: str = ""
    """Comma-separated list of day, organisation, project, key, user, model, asked, route and replica."""


class ReportQuery(OwnReportQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter and groups of a usage report. Ids restrict it to their owners."""

    organisation: str | None = None
    project: str | None = None
    key: str | None = None
    user: str | None = None


class CostQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Range of a comparison of costs, in whole UTC days."""

    since: Timestamp | None = None
    """Only days that contain this time or are later. By default the last 7 days."""
    until: Timestamp | None = None
    """Only days that begin before this time."""


class UsageExportQuery(ReportQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter, groups and format of an export."""

    format: Literal["argosy", "focus-1.2", "focus-1.3"] = "argosy"
    """`argosy` has the columns of the ledger. FOCUS, of the given version, has whole days and groups of its own."""


class UsageQuery(ReportQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter, groups, order and page of a usage report."""

    sort: (
        Literal["requests", "input_tokens", "cached_tokens", "output_tokens", "nano_dollars"] | None
    ) = None
    """Total to sort by. By default groups are sorted by their names."""
    order: SortOrder = "desc"
    after: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """Value of `last_id` of the previous page."""
    limit: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """Rows of a page. By default the page has all rows."""


class RequestsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter and page of the list of ended requests."""

    since: Timestamp | None = None
    """Only requests that ended at this time or later."""
    until: Timestamp | None = None
    """Only requests that ended before this time."""
    organisation: str | None = None
    project: str | None = None
    key: str | None = None
    user: str | None = None
    model: str | None = None
    replica: str | None = None
    status: UsageStatus | None = None
    min_duration_s: Annotated[float, Meta(ge=0)] = 0.0
    """Only requests that took at least this long."""
    sort: Literal["ended_at"] | RecordOrder = "ended_at"
    """Quantity to sort by, among the latest 100,000 requests. By default all are sorted by their end, latest first."""
    order: SortOrder = "desc"
    """Order of a quantity."""
    before: str | None = None
    """Value of `next` of the previous page."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter of audit log entries."""

    subject: str | None = None
    """Id of the changed record."""
    action: Annotated[str, Meta(max_length=1000)] = ""
    """Only actions that begin with one of these texts, separated by commas, such as `limit.,price.set`."""
    since: Timestamp | None = None
    """Only entries at this time or later."""
    until: Timestamp | None = None
    """Only entries before this time."""
    before: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    """Only entries with lower numbers. Pass `last_id` of a page to get the next page."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


def split_names(text: str) -> list[str]:
    """Return the names in a parameter that has several, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


# --- bodies --------------------------------------------------------------------------------------


class OrganisationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name of an organisation."""

    name: Name


class NewProject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A project to create."""

    organisation: str
    name: Name
    tier: Tier | UnsetType = UNSET
    """Tier, by default `standard`."""
    weight: Weight | UnsetType = UNSET
    """Share among projects of the same tier, by default 1."""
    share_cache: bool = False
    quota_failure_mode: QuotaFailureMode = "open"
    networks: Networks = ()
    flags: Names | UnsetType = UNSET
    quality: QualityConsent = "off"


class ProjectChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a project to change. Omitted fields keep their values."""

    name: Name | UnsetType = UNSET
    tier: Tier | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET
    share_cache: bool | UnsetType = UNSET
    quota_failure_mode: QuotaFailureMode | UnsetType = UNSET
    networks: Networks | UnsetType = UNSET
    flags: Names | UnsetType = UNSET
    quality: QualityConsent | UnsetType = UNSET


class ProjectErasure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Confirmation of an erasure, which cannot be undone."""

    project: str
    """Id of the project once more."""


class NewUser(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user to create."""

    organisation: str
    email: Name
    role: Role = "user"
    scope: RoleScope = "organisation"
    project: str | None = None


class UserChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a user to change. Omitted fields keep their values."""

    email: Name | UnsetType = UNSET
    role: Role | UnsetType = UNSET
    scope: RoleScope | UnsetType = UNSET
    project: str | UnsetType | None = UNSET


class NewKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key to create."""

    project: str
    name: Name
    user: str | None = None
    role: Role = "user"
    scope: RoleScope = "organisation"
    models: Names = ()
    networks: Networks = ()
    flags: Names = ()
    expires_at: Timestamp | None = None


class KeyRotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a key rotation."""

    overlap_s: Annotated[float, Meta(ge=0, le=366 * 86400)] = 86400.0
    """Seconds for which the old key stays valid."""


class NewLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A limit to set. It replaces the owner's limit for the same unit, window and model."""

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
    """Start time, by default now."""


class NewAdapterVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of an adapter to add. The first one answers at once, later ones are candidates."""

    name: Name
    """Model name of requests."""
    base_model: Name
    """Public name of the base model."""
    digest: ContentDigest
    """Digest of the adapter, as `argosy models pull` prints it."""
    organisation: str | None = None
    """Owner, by default the caller's organisation, or all callers for an operator of the whole gateway."""
    project: str | None = None
    """Project whose requests may name the adapter. By default all of the organisation's."""
    candidate_percent: Percent | UnsetType = UNSET
    """Share of the users whom a candidate answers until a person changes it. By default it is rolled out: its share
    grows while the evidence permits it."""
    step_s: StepSeconds = DEFAULT_STEP_S
    """Shortest time of a step of the rollout."""
    base_digest: ContentDigest | None = None
    """Digest of the base model that it was made for. By default it is served on any version of the base model."""
    pinned: bool | UnsetType = UNSET
    min_replicas: AdapterReplicas | UnsetType = UNSET
    replaces: bool = False
    """Whether a later version answers at once."""


class AdapterChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of an adapter to change. Omitted fields keep their values."""

    candidate_percent: Percent | UnsetType = UNSET
    """Share of the users whom the candidate answers. It ends the rollout; 0 takes all users away from the candidate."""
    pinned: bool | UnsetType = UNSET
    min_replicas: AdapterReplicas | UnsetType = UNSET


class NewPromptVersion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of a prompt to add. It gets the next number, and the first one the label `production`."""

    name: PromptName
    content: PromptContent
    organisation: str | None = None
    """Owner, by default the caller's organisation, or all callers for an operator of the whole gateway."""
    project: str | None = None
    """Project whose requests may use it. By default all of the organisation's."""
    labels: Annotated[tuple[PromptLabel, ...], Meta(max_length=20)] = ()
    """Labels that move to the version."""


class PromptLabelChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A label to move to a version of a prompt."""

    label: PromptLabel
    removes: bool = False
    """Whether the version loses the label."""


class PromptToRender(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt and the values of its variables, in the fields of a request."""

    prompt_id: Annotated[str, Meta(min_length=1, max_length=100)]
    """Name of a prompt that the caller's requests may use, or id of a version."""
    prompt_version: int | Annotated[str, Meta(min_length=1, max_length=40)] = PRODUCTION
    """Number or label of the version."""
    prompt_variables: dict[str, Any] = {}
    messages: list[dict[str, Any]] = []
    """Messages of the request."""


class FlagSwitch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parts of a feature flag to override. Omitted ones keep their values, and null is as declared."""

    state: FlagState | UnsetType | None = UNSET
    default_variant: VariantName | UnsetType | None = msgspec.field(
        default=UNSET, name="defaultVariant"
    )
    targeting: dict[str, Any] | UnsetType | None = UNSET
    reason: Annotated[str, Meta(max_length=500)] = ""
    """Why, for the audit log."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to load, as for vLLM."""

    lora_name: Name
    lora_path: Annotated[str, Meta(max_length=2000)]
    """Digest of the adapter."""
    load_inplace: bool = False
    """Whether a new version replaces the one that answers."""
    base_model_name: Name | None = None
    """Public name of the base model, which may be left out if there is only one."""


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter to unload, as for vLLM."""

    lora_name: Name
