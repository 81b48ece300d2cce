"""Records of the store as immutable values. Times are seconds since the epoch and money is in nano-dollars."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Role = Literal["admin", "operator", "viewer", "user"]
"""Permission level of a key, token or user, highest first.

`admin` may do everything, `operator` runs the fleet, `viewer` reads, `user` sends requests to models. Each role
includes the later ones, except that only `user` and `admin` may send requests to models.
"""

RoleScope = Literal["organisation", "gateway"]
"""Where a role is held: in the organisation of the key or user, or for the whole gateway.

For the role `user` both mean the same.
"""

Tier = Literal["premium", "standard", "free"]
"""Priority class of a project, in the order of service."""

GatewayFlag = Literal[
    "no-speculation", "keep-alive", "stream-pacing-tokens", "stream-pacing-interval"
]
"""Flags of projects and keys that gateways read themselves. Rules may read any others."""

UsageStatus = Literal["completed", "cancelled", "failed", "stopped", "interrupted", "refused"]
"""How a request ended.

- `completed`: the response was sent in full.
- `cancelled`: the client disconnected.
- `failed`: no replica could answer.
- `stopped`: a limit or the deadline ended the response.
- `interrupted`: the gateway died.
- `refused`: the request was rejected, either as invalid or at that moment.

`usage_slots.py` stores the index of a status on disk, so new values go at the end only.
"""

LimitUnit = Literal[
    "requests",
    "tokens",
    "input_tokens",
    "output_tokens",
    "concurrency",
    "nano_dollars",
    "stored_bytes",
]

OwnerKind = Literal["organisation", "project", "user", "key"]

QuotaFailureMode = Literal["open", "closed"]

QualityConsent = Literal["off", "automatic", "judged"]
"""Consent of a project: to nothing, to samples of its answers that fixed checks grade, or to samples that a model may
grade as well."""

LimitWindow = Literal["second", "minute", "hour", "day", "month"]
"""Window of a limit. `day` and `month` are calendar periods in UTC; the others are sliding windows."""

ReplicaState = Literal["active", "cordoned", "draining"]
"""State that an operator gives a replica (`policy.AdminState`)."""

ReplicaWeight = Annotated[float, Meta(ge=0.001, le=1000)]

Name = Annotated[str, Meta(min_length=1, max_length=200)]
ContentDigest = Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}$(?!\n)")]
"""Digest of the files of a model or an adapter, as the model store computes it."""
MAX_ADAPTER_REPLICAS = 1000
AdapterReplicas = Annotated[int, Meta(ge=0, le=MAX_ADAPTER_REPLICAS)]
StepSeconds = Annotated[float, Meta(ge=1, le=86_400)]
DEFAULT_STEP_S = 120.0
"""Shortest time of a step of an adapter's rollout."""
Percent = Annotated[int, Meta(ge=0, le=100)]
PromptName = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,99}$(?!\n)", examples=["support"])
]
PRODUCTION = "production"
"""Label of the version of a prompt that requests get which name none."""
LATEST = "latest"
"""Stands for the version of a prompt with the highest number."""
PromptLabel = Annotated[
    str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$(?!\n)", examples=["staging"])
]
PromptVersionNumber = Annotated[int, Meta(ge=1, le=1_000_000)]
SwitchState = Literal["ENABLED", "DISABLED"]
"""State of a feature flag. The default variant of a disabled one answers all requests."""
MAX_TARGETING_BYTES = 1 << 14
MAX_RUN_BYTES = 1 << 20
"""Maximum size of the result of a run of a golden set as JSON."""
MAX_PROMPT_BYTES = 1 << 18
"""Maximum size of one version of a prompt as JSON."""
Names = Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(max_length=1000)]
Networks = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=100)]
"""Networks in CIDR notation. The client address of each request is compared with every one of them."""
LimitAmount = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenPrice = Annotated[int, Meta(ge=0, le=10**9)]
"""Nano-dollars for a token. The maximum of one dollar keeps sums of the ledger within 64 bits."""
Weight = Annotated[float, Meta(ge=1e-6, le=1e6)]
Timestamp = Annotated[float, Meta(ge=0, le=253_402_300_799)]
"""Seconds since the epoch, up to the year 9999."""


class AccountRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records that accounts consist of."""

    id: str


class Organisation(AccountRecord, frozen=True, kw_only=True):
    """An organisation, which pays for usage. Projects and users belong to it."""

    name: Name
    """Unique among organisations that are not archived."""
    created_at: float
    archived_at: float | None = None
    """Time of archiving, which also archives all projects and disables all users of the organisation."""


class Project(AccountRecord, frozen=True, kw_only=True):
    """A project. Projects are the tenants to which fairness, limits and isolation apply."""

    organisation: str
    """Id of the organisation."""
    name: Name
    """Unique in the organisation among projects that are not archived."""
    tier: Tier = "standard"
    weight: Weight = 1.0
    """Relative share of service among the projects of the same tier."""
    share_cache: bool = False
    """Whether the project shares cached prompts with other sharing projects of its organisation."""
    quota_failure_mode: QuotaFailureMode = "open"
    """Behaviour of limits while the quota backend is unreachable: `open` counts locally, `closed` rejects."""
    networks: Networks = ()
    """Networks from which clients may connect. If empty, clients may connect from any address."""
    flags: Names = ()
    """Flags that the gateway's route rules can match."""
    quality: QualityConsent = "off"
    """Whether gateways may keep and grade samples of its answers."""
    created_at: float
    archived_at: float | None = None


class User(AccountRecord, frozen=True, kw_only=True):
    """A person, who may sign in by JWT and by whom usage is reported."""

    organisation: str
    email: Name
    """Email address in lower case, unique in the organisation among users that are not disabled."""
    role: Role = "user"
    scope: RoleScope = "organisation"
    project: str | None = None
    """Id of the project that the user's requests are charged to if the token names none."""
    created_at: float
    disabled_at: float | None = None


class KeyInfo(AccountRecord, frozen=True, kw_only=True):
    """Public fields of an API key."""

    project: str
    user: str | None = None
    name: Name
    """Unique in the project among keys that are valid and have not been rotated."""
    prefix: str
    """First characters of the key, for people to recognise it. Not secret."""
    role: Role = "user"
    scope: RoleScope = "organisation"
    models: Names = ()
    """Public names of the models that the key may use. If empty, it may use all."""
    networks: Networks = ()
    flags: Names = ()
    """Route flags in addition to those of the project."""
    created_at: float
    expires_at: Timestamp | None = None
    revoked_at: float | None = None
    replaced_by: str | None = None
    """Id of the key that replaced this one by rotation. Both are valid until this one expires."""


class Key(KeyInfo, frozen=True, kw_only=True):
    """An API key as stored. The plain key is shown once at creation, and only its digest is stored."""

    digest: bytes
    """SHA-256 of the plain key."""


class Limit(AccountRecord, frozen=True, kw_only=True):
    """A limit: at most `amount` units of `unit` for one owner in each window, or concurrently."""

    owner_kind: OwnerKind
    owner: str
    """Id of the owner."""
    unit: LimitUnit
    amount: LimitAmount
    window: LimitWindow | None = None
    """None for a limit on concurrency or stored bytes, which has no window."""
    model: Name | None = None
    """Public name of a model. None for all models together."""


class Price(AccountRecord, frozen=True, kw_only=True):
    """Token prices of a model, valid from the time `since`."""

    id: str = ""
    """Set by the store."""
    model: Name
    """Public name of the model."""
    tier: Tier | None = None
    """None for every tier without a price of its own."""
    input: TokenPrice
    """Price of a prompt token that was not cached."""
    cached_input: TokenPrice
    output: TokenPrice
    since: Timestamp = 0.0


class ReplicaSetting(AccountRecord, frozen=True, kw_only=True):
    """Decision of an operator about a replica of a model. It overrides the settings file of every gateway."""

    model: Name
    """Public name of the model."""
    replica: Annotated[str, Meta(min_length=1, max_length=500)]
    """Name of the replica in the settings of the gateways."""
    state: ReplicaState | None = None
    """None leaves the state to the settings file."""
    weight: ReplicaWeight | None = None
    """Share of the requests relative to other replicas. None leaves it to the settings file."""
    grace_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    """How long streams of a draining replica may continue there before they move."""
    reason: Annotated[str, Meta(max_length=500)] = ""
    """Why the operator decided so."""
    changed_at: float
    changed_by: str


class Adapter(AccountRecord, frozen=True, kw_only=True):
    """Name under which an adapter (LoRA) of a base model is served, with the version that answers."""

    organisation: str | None = None
    """Id of the organisation whose requests may name it. None for all callers of the gateway."""
    project: str | None = None
    """Id of the project whose requests may name it. None for the whole organisation."""
    name: Name
    """Model name of requests, unique among the adapters of the same organisation and project."""
    base_model: Name
    """Public name of the base model."""
    digest: ContentDigest
    """Version that answers."""
    candidate: ContentDigest | None = None
    """Version that `promote` lets answer. None if there is no newer one."""
    candidate_percent: Percent = 0
    """Share of the users whom the candidate answers, in percent."""
    rollout: str = ""
    """Id of the comparison of the candidate with the version that answers. Empty if there never was a candidate."""
    step_s: StepSeconds | None = None
    """Shortest time of a step, after which gateways raise the candidate's share if the evidence permits it. None if a
    person sets the share."""
    rejected: ContentDigest | None = None
    """Version that was rolled back last, which no rollout tries again."""
    rejection: str = ""
    """Why it was rolled back."""
    base_digest: ContentDigest | None = None
    """Digest of the base model that it was made for. None serves it on any version of the base model."""
    pinned: bool = False
    """Whether all replicas keep it loaded."""
    min_replicas: AdapterReplicas = 0
    """Number of replicas that keep it loaded without requests."""
    created_at: float

    @property
    def min_homes(self) -> int:
        """Fewest replicas that keep it loaded."""
        return MAX_ADAPTER_REPLICAS if self.pinned else self.min_replicas


class Prompt(AccountRecord, frozen=True, kw_only=True):
    """Version of a prompt, whose content never changes."""

    organisation: str | None = None
    """Id of the organisation whose requests may use it. None for all callers of the gateway."""
    project: str | None = None
    """Id of the project whose requests may use it. None for the whole organisation."""
    name: PromptName
    version: PromptVersionNumber
    """Number, unique among the versions of the same organisation, project and name, and never used again."""
    labels: Annotated[tuple[PromptLabel, ...], Meta(max_length=20)] = ()
    """Movable names of the version, each unique among the same versions."""
    content: Annotated[str, Meta(max_length=MAX_PROMPT_BYTES)]
    """A `PromptContent` as JSON; empty once it is deleted."""
    created_at: float
    created_by: str
    deleted_at: float | None = None

    @property
    def reference(self) -> str:
        """Name and number, such as `support@3`."""
        return f"{self.name}@{self.version}"


class QualitySet(AccountRecord, frozen=True, kw_only=True):
    """Version of a golden set, whose content never changes. It is kept beside the record."""

    organisation: str | None = None
    """Id of the organisation that it belongs to. None for the whole gateway."""
    name: PromptName
    version: PromptVersionNumber
    """Number, unique among the versions of the same organisation and name, and never used again."""
    digest: str
    """SHA-256 of the content, as hexadecimal digits."""
    items: int
    judge: Annotated[str, Meta(max_length=200)] = ""
    """Model that grades by rubrics. Empty for none."""
    created_at: float
    created_by: str
    deleted_at: float | None = None

    @property
    def reference(self) -> str:
        """Name and number, such as `support@3`."""
        return f"{self.name}@{self.version}"


class QualityRun(AccountRecord, frozen=True, kw_only=True):
    """Result of one run of a golden set."""

    organisation: str | None = None
    quality_set: str
    """Id of the version of the set."""
    model: Name
    against: Annotated[str, Meta(max_length=200)] = ""
    """Model that it was compared with. Empty for none."""
    verdict: Annotated[str, Meta(max_length=40)] = ""
    """Verdict of the comparison. Empty for none."""
    score: float
    """Mean score of the model, from 0 to 1."""
    result: Annotated[str, Meta(max_length=MAX_RUN_BYTES)]
    """Figures as JSON, without prompts and answers."""
    created_at: float
    created_by: str


class QualitySample(AccountRecord, frozen=True, kw_only=True):
    """Grade of a sampled answer. The texts are kept beside the record, without personal data."""

    id: str
    """Id of the response."""
    organisation: str
    project: str
    model: Name
    version: str = ""
    """Version of the model that answered. Empty without rollouts."""
    judge: str = ""
    """Model that graded it. Empty for fixed checks."""
    score: float
    """From 0 to 1."""
    has_passed: bool
    created_at: float


class SampledTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Texts of a sampled answer, without personal data."""

    reason: str
    """Why the answer has its score. It may quote the answer."""
    question: str
    """Last text of the user."""
    answer: str


class Flag(AccountRecord, frozen=True, kw_only=True):
    """Decision of an operator about a feature flag. It overrides the settings of every gateway."""

    id: Annotated[str, Meta(min_length=1, max_length=100)]
    """Name of the flag."""
    state: SwitchState | None = None
    """None leaves it to the settings, as with the next two fields."""
    default_variant: Annotated[str, Meta(max_length=40)] | None = None
    targeting: Annotated[str, Meta(max_length=MAX_TARGETING_BYTES)] | None = None
    """Rules in JsonLogic as JSON."""
    reason: Annotated[str, Meta(max_length=500)] = ""
    """Why the operator decided so."""
    changed_at: float
    changed_by: str


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the ledger: how an admitted request ended and what it used. Written once."""

    request: str
    """Id of the request, which identifies the record so that it counts once.

    Never an id chosen by the client, because two requests with one id would count as one.
    """
    organisation: str = ""
    project: str = ""
    key: str = ""
    user: str = ""
    model: str = ""
    """Public name of the model that answered."""
    asked: str = ""
    """Model name in the client's request."""
    route: str = ""
    """Name of the route that chose the model. Empty if no route matched."""
    replica: str = ""
    """Name of the replica that ended the request."""
    started_at: float
    ended_at: float
    status: UsageStatus
    input_tokens: int = 0
    """Prompt tokens, including cached ones."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """Tokens delivered to the client."""
    nano_dollars: int = 0
    digest: str = ""
    """Digest of the adapter that answered, or else of the model, if the replica has verified its files against one."""
    is_capped: bool = False
    """Whether the replica reported more tokens than the request can have had, or none of a text that is there.

    The record has the most that it can have had, or the gateway's count.
    """
    findings: str = ""
    """Matches of its content rule, without any text: `SIDE DETECTOR ACTION COUNT`, joined by `; `.

    Those that were found most often come first. The rest is left out.
    """
    service_tier: str = ""
    """`batch` for a line of a batch, which costs half; empty for other requests."""


class AccountSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All accounts that a gateway needs to admit requests, as of one version. Small enough to be held in memory.

    Revoked keys are excluded. Archived, disabled, and in the last 30 days expired records are included, so that the
    gateway can explain why it rejects a request.
    """

    version: int = 0
    """Number that each change increments."""
    audit_entries: int = 0
    """Number of entries in the audit log."""
    audit_head: bytes = b""
    """Hash of the last entry of the audit log."""
    organisations: tuple[Organisation, ...] = ()
    projects: tuple[Project, ...] = ()
    users: tuple[User, ...] = ()
    renamed_at: dict[str, float] = {}
    """Ids of renamed projects and users, with the time when the current name or email was set."""
    keys: tuple[Key, ...] = ()
    limits: tuple[Limit, ...] = ()
    prices: tuple[Price, ...] = ()
    replica_settings: tuple[ReplicaSetting, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    flags: tuple[Flag, ...] = ()
    """Versions of prompts, among them deleted ones."""
    successors: dict[str, str] = {}
    """Ids of all keys that were ever rotated, with the ids of the keys that replaced them."""
    has_had_keys: bool = False
    """Whether any key was ever created, including keys that are revoked now."""
    read_at: float = 0.0
    """Time when reading began, on the monotonic clock."""

    @property
    def requires_keys(self) -> bool:
        """Whether clients need keys. Revoking the last key does not open the gateway."""
        return self.has_had_keys or bool(self.keys)
