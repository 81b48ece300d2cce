"""Endpoints of the admin API as data, from which routes, checks and the OpenAPI document are built."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar, get_type_hints

import msgspec

from argosy.alerting import STANDALONE_FLEET, AlertAdmin, IncidentRecords
from argosy.deployment import FleetControl, GatewayConfig, ObjectiveReader
from argosy.gateway.admin.answer_encoding import COLUMNS_MEDIA_TYPE, COLUMNS_SCHEMA, is_page
from argosy.gateway.admin.call_limiter import AdminCallLimiter
from argosy.gateway.admin.change_check import check_change
from argosy.gateway.auth import Authenticator, organisation_scope
from argosy.gateway.cache_admin import CacheAdmin
from argosy.gateway.lessons import Lesson
from argosy.gateway.model_registry import ReplicaAdmin
from argosy.gateway.prefix_doctor import PrefixDoctor
from argosy.gateway.principal import Principal
from argosy.gateway.proxy import RoutingPreviewer
from argosy.gateway.replica_logs import ReplicaLogs
from argosy.gateway.series_queries import SeriesQueries
from argosy.gateway.simulation_runner import SimulationRunner
from argosy.policy.objectives import Objective
from argosy.process import run_in_daemon_thread
from argosy.protocol import JSON_MEDIA_TYPE, TEXT_SCHEMA, ApiError, Operation
from argosy.store import (
    Accounts,
    Adapters,
    AuditLog,
    ChangeCheck,
    Erasure,
    Flags,
    FleetStore,
    HardwareCosts,
    Ledger,
    LimitsAndPrices,
    Prompts,
    Quality,
    Role,
    RoleScope,
    Store,
    StoredBytes,
)

T = TypeVar("T")
Method = Literal["GET", "POST", "PATCH", "DELETE"]
CSV_MEDIA_TYPE = "text/csv; charset=utf-8"
QUERY_TIME_LIMIT_S = 2.0
EXPORT_TIME_LIMIT_S = 30.0
"""Time for each query of an export or of a check of all records, which people start on purpose."""


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query type of an endpoint without parameters."""


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """Parsed and authenticated call of an endpoint."""

    principal: Principal
    resource_id: str
    """Value of `{id}` in the path, or an empty string."""
    query: Any
    """Parameters, as an instance of the endpoint's `query_type`."""
    body: Any
    """Body, as an instance of the endpoint's `body_type`, or None."""

    @property
    def actor(self) -> str:
        """Name of the caller in the audit log."""
        principal = self.principal
        if principal.key:
            return f"key:{principal.key}"
        return f"user:{principal.user}" if principal.user else "local"


@dataclass(frozen=True, slots=True)
class AdminScope:
    """Data that endpoints work on: of the whole gateway, or restricted to one organisation."""

    store: Store | None
    replicas: ReplicaAdmin
    """The gateway's pools and replicas. Only endpoints for the whole gateway use them, and the next three."""
    routing: RoutingPreviewer
    """Previews of routing."""
    config: GatewayConfig
    """The gateway's settings."""
    authenticator: Authenticator
    """Finds the senders of previewed requests."""
    explain: Callable[[str, str | None, str | None], Awaitable[dict[str, Any] | None]]
    """Returns the explanation of a request by its id, an organisation's id and a project's id (None for any)."""
    limiter: AdminCallLimiter = field(default_factory=AdminCallLimiter)
    """Slots for reads of endpoints that wait for events."""
    organisation_id: str | None = None
    """Id of the organisation, or None for the whole gateway."""
    cache_admin: CacheAdmin | None = None
    """Caches of responses. None if the gateway has none."""
    prefix_doctor: PrefixDoctor | None = None
    """Diagnosis of prompts that miss the prefix cache."""
    fleet_control: FleetControl | None = None
    """Control of the declared fleet that the gateway belongs to. None if it belongs to none."""
    series_queries: SeriesQueries | None = None
    """Time series. None if the gateway keeps none."""
    objectives: Callable[[], Sequence[Objective]] = tuple
    """Returns the service level objectives of the gateway."""
    objective_reader: ObjectiveReader | None = None
    """Their counts. None without a store."""
    fleet_logs: ReplicaLogs | None = None
    """Logs of the fleet's replicas. None if the gateway belongs to no fleet."""
    alert_admin: AlertAdmin | None = None
    """Alerts. None in tests without a server."""
    simulations: SimulationRunner = field(default_factory=SimulationRunner)
    """Runs simulations."""
    lessons: Sequence[Lesson] = ()
    """Lessons of the console."""
    check: ChangeCheck | None = None
    """Refuses changes of accounts that the caller may not make."""

    def for_principal(self, principal: Principal) -> AdminScope:
        """Return the scope restricted to the reach of the caller's role. Endpoints only receive such a scope."""
        check = partial(check_change, principal)
        return replace(self, organisation_id=organisation_scope(principal), check=check)

    async def record_content_read(
        self,
        request: AdminRequest,
        kind: str,
        subject: str,
        organisation: str | None = None,
        **details: str,
    ) -> None:
        """Record in the audit log that the caller reads content, before it does. Nothing is recorded without a store.

        Raises:
            StoreError: The entry cannot be written.
        """
        if self.store is not None:
            record = partial(
                self.store.content_access.record_read,
                subject,
                organisation=organisation or None,
                details={"kind": kind, **details},
                actor=request.actor,
            )
            await run_in_daemon_thread(record)

    async def explain_request(self, request_id: str, project: str | None) -> dict[str, Any] | None:
        """Return the explanation of a request, or None if it is unknown or belongs to another organisation.

        Among requests of several projects whose clients chose the same id, that of `project` is found if it is given,
        and else the latest.
        """
        organisation_id = self.organisation_id
        explanation = await self.explain(request_id, organisation_id, project)
        if (
            explanation is None
            or organisation_id is None
            or explanation["caller"]["organisation"] == organisation_id
        ):
            return explanation
        return None

    @property
    def caches(self) -> CacheAdmin:
        """The caches of responses."""
        return _require(self.cache_admin, "This gateway has no cache of responses.")

    @property
    def prefixes(self) -> PrefixDoctor:
        """The diagnosis of prompts that miss the prefix cache."""
        return _require(self.prefix_doctor, "This gateway does not examine prompts.")

    @property
    def declared_fleet(self) -> FleetControl:
        """The declared fleet that the gateway belongs to."""
        message = (
            "This gateway belongs to no declared fleet. `argosy replicas list` shows its replicas, "
            "and `argosy up` starts a fleet."
        )
        return _require(self.fleet_control, message)

    @property
    def replica_logs(self) -> ReplicaLogs:
        """Logs of the replicas of the gateway's fleet."""
        message = (
            "No controller starts the replicas of this gateway. Read their logs where they run."
        )
        return _require(self.fleet_logs, message)

    @property
    def alerts(self) -> AlertAdmin:
        """The alerts of the gateway or its fleet."""
        return _require(self.alert_admin, "This gateway evaluates no alerts.")

    @property
    def series(self) -> SeriesQueries:
        """The time series of the gateway and the others of its store."""
        message = "This gateway keeps no time series. Set `series.enabled` in its settings."
        return _require(self.series_queries, message)

    @property
    def objective_counts(self) -> ObjectiveReader:
        """The counts of service level objectives."""
        message = "This gateway has no store for budgets. Add 'store' to its settings."
        return _require(self.objective_reader, message, "no_store")

    @property
    def accounts(self) -> Accounts:
        """The store's accounts. Raises ApiError 404 without a store, like the properties below."""
        return self._store.accounts.for_organisation(self.organisation_id, self.check)

    @property
    def limits_and_prices(self) -> LimitsAndPrices:
        """The store's limits and prices."""
        return self._store.limits_and_prices.for_organisation(self.organisation_id, self.check)

    @property
    def adapters(self) -> Adapters:
        """The store's registry of adapters."""
        return self._store.adapters.for_organisation(self.organisation_id, self.check)

    @property
    def prompts(self) -> Prompts:
        """The store's registry of prompts."""
        return self._store.prompts.for_organisation(self.organisation_id, self.check)

    @property
    def erasure(self) -> Erasure:
        """The erasure of projects. The caller may change those that it is given."""
        return self._store.erasure

    @property
    def quality(self) -> Quality:
        """The store's golden sets and their runs."""
        return self._store.quality.for_organisation(self.organisation_id, self.check)

    @property
    def flags(self) -> Flags:
        """Decisions of operators about feature flags."""
        return self._store.flags.for_organisation(None, self.check)

    @property
    def ledger(self) -> Ledger:
        """The store's ledger."""
        return self._store.ledger.for_organisation(self.organisation_id)

    @property
    def hardware_costs(self) -> HardwareCosts:
        """The recorded costs of hardware, which belong to the whole gateway."""
        return self._store.hardware_costs

    @property
    def stored_bytes(self) -> StoredBytes:
        """The bytes that tenants store. The caller may see the tenants that it names."""
        return self._store.stored_bytes

    @property
    def fleet_store(self) -> FleetStore:
        """Records of the fleet, or of gateways without one, whose name is `fleet_name`."""
        return self._store.fleets

    @property
    def fleet_name(self) -> str:
        """Name under which the records are."""
        return self.config.fleet or STANDALONE_FLEET

    @property
    def incidents(self) -> IncidentRecords:
        """Incidents of the fleet."""
        return IncidentRecords(self.fleet_store, self.fleet_name)

    @property
    def audit_log(self) -> AuditLog:
        """The store's audit log."""
        return self._store.audit_log.for_organisation(self.organisation_id)

    @property
    def _store(self) -> Store:
        message = "This gateway has no account store. Add 'store' to its settings."
        return _require(self.store, message, "no_store")


def _require(part: T | None, message: str, code: str = "not_found") -> T:
    if part is None:
        raise ApiError(404, code, message)
    return part


EndpointHandler = Callable[[AdminScope, AdminRequest], Any]
_ERROR_DESCRIPTIONS = {
    "400": "A parameter is not valid. `param` names it.",
    "401": "The key is missing or not accepted.",
    "403": "The key's role or the web page's origin does not permit this call.",
    "404": "Resource not found.",
    "405": "The path does not support this method.",
    "408": "The body did not arrive in time.",
    "409": "The request conflicts with an existing resource.",
    "413": "The body is too large.",
    "415": "The body is compressed or not declared as `application/json`.",
    "429": "Too many wrong keys, or too many waiting calls of the organisation.",
    "500": "Internal error. The gateway's log has it under the request id.",
    "503": "The store or the token issuer's keys are not available at the moment.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminEndpoint:
    """Endpoint of the admin API: one method at one path."""

    method: Method
    path: str
    role: Role
    """Lowest role that may call the endpoint."""
    scope: RoleScope
    """Where the role must be held. With `organisation` callers reach only data of their own organisation."""
    handler: EndpointHandler
    """Function that handles a call. Its ValueErrors are answered with 400, 404 or 409."""
    response_type: Any
    """Return type of `handler`: a type to encode as JSON, bytes of JSON, or an iterator of text to stream."""
    query_type: type = NoParameters
    body_type: type | None = None
    is_nonblocking: bool = False
    """Whether the handler runs on the event loop's thread and never blocks it; it may be a coroutine function.

    Others use the store in worker threads.
    """
    is_long_poll: bool = False
    """Whether the handler waits for events or a process, and ends when the client disconnects.

    It holds a slot of the limiter only while it reads.
    """
    query_time_limit_s: float = QUERY_TIME_LIMIT_S
    """Longest time of each query of the store."""
    media_type: str = JSON_MEDIA_TYPE
    changes_nothing: bool = False
    """Whether it changes nothing although it is no GET, such as a preview."""

    @property
    def is_safe(self) -> bool:
        """Whether it changes nothing, so that accounts need not be read again afterwards."""
        return self.changes_nothing or self.method == "GET"

    def describe(self) -> Operation:
        """Describe the endpoint for the OpenAPI document. Its operation id is the name of the handler."""
        content: dict[str, Any] = {self.media_type: TEXT_SCHEMA}
        if self.media_type == JSON_MEDIA_TYPE:
            is_type = self.response_type is not bytes
            content = {JSON_MEDIA_TYPE: self.response_type if is_type else {"type": "object"}}
        if is_page(self.response_type):
            content[COLUMNS_MEDIA_TYPE] = COLUMNS_SCHEMA
        reach = " for the whole gateway" if self.scope == "gateway" else ""
        return Operation(
            self.handler.__name__,
            content,
            _ERROR_DESCRIPTIONS,
            self.body_type,
            refuses_unknown_fields=True,
            query=self.query_type,
            summary=(inspect.getdoc(self.handler) or "").partition("\n")[0],
            description=f"Requires the role {self.role} or higher{reach}.",
        )


class AdminEndpoints(list[AdminEndpoint]):
    """List of endpoints with a decorator to add one: `@endpoints.register("GET", "/admin/things/{id}", "viewer")`."""

    def register(
        self,
        method: Method,
        path: str,
        role: Role,
        scope: RoleScope = "organisation",
        **options: Any,  # noqa: ANN401 - the other fields of `AdminEndpoint`
    ) -> Callable[[EndpointHandler], EndpointHandler]:
        """Return a decorator that registers a function as endpoint. Its return annotation is the response type."""

        def decorate(handler: EndpointHandler) -> EndpointHandler:
            self.append(
                AdminEndpoint(
                    method=method,
                    path=path,
                    role=role,
                    scope=scope,
                    handler=handler,
                    response_type=get_type_hints(handler)["return"],
                    **options,
                )
            )
            return handler

        return decorate
