"""What the admin API can do, as data: routes, checks and the OpenAPI document are made of `Operation`s."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_type_hints

import msgspec

from argosy.gateway.auth import organisation_scope
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError
from argosy.store import Accounts, AuditLog, Ledger, LimitsAndPrices, Role, RoleScope, Store

Method = Literal["GET", "POST", "PATCH", "DELETE"]
JSON_MEDIA_TYPE = "application/json"
CSV_MEDIA_TYPE = "text/csv; charset=utf-8"


class NoParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters."""


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """One call of an operation."""

    principal: Principal
    resource_id: str
    """What stands for `{id}` in the path."""
    query: Any
    """Of the operation's `query` type."""
    body: Any
    """Of the operation's `body` type."""

    @property
    def actor(self) -> str:
        """The caller, as the audit log names it."""
        principal = self.principal
        if principal.key:
            return f"key:{principal.key}"
        return f"user:{principal.user}" if principal.user else "local"


@dataclass(frozen=True, slots=True)
class AdminScope:
    """What operations work on: all of the whole gateway, or of one organisation, as if there were no others."""

    store: Store | None
    explain: Callable[[str, str | None], dict[str, Any] | None]
    """What `argosy explain` shows of a request, by its id."""
    organisation_id: str | None = None
    """Its id; None: the whole gateway."""

    def for_principal(self, principal: Principal) -> AdminScope:
        """What is within the reach of the caller's role. No operation is given anything else."""
        return replace(self, organisation_id=organisation_scope(principal))

    def explain_request(self, request_id: str) -> dict[str, Any] | None:
        """What `cards` tells, unless it is another organisation's."""
        card, within = self.explain(request_id, self.organisation_id), self.organisation_id
        if card is None or within is None or card["caller"]["organisation"] == within:
            return card
        return None

    @property
    def accounts(self) -> Accounts:
        """The store's accounts. Raises ApiError 404 when there is no store; the others likewise."""
        return self._store.accounts.for_organisation(self.organisation_id)

    @property
    def limits_and_prices(self) -> LimitsAndPrices:
        """The store's limits and prices."""
        return self._store.limits_and_prices.for_organisation(self.organisation_id)

    @property
    def ledger(self) -> Ledger:
        """The store's ledger."""
        return self._store.ledger.for_organisation(self.organisation_id)

    @property
    def audit_log(self) -> AuditLog:
        """The store's audit log."""
        return self._store.audit_log.for_organisation(self.organisation_id)

    @property
    def _store(self) -> Store:
        if self.store is None:
            message = "This gateway keeps no accounts. Give it a 'store' in its settings."
            raise ApiError(404, "no_store", message)
        return self.store


EndpointHandler = Callable[[AdminScope, AdminRequest], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminEndpoint:
    """One method of one path."""

    method: Method
    path: str
    role: Role
    """The least one that may do it."""
    scope: RoleScope
    """Where that role must be held. Those of an organisation may do it with what is theirs."""
    handler: EndpointHandler
    """A ValueError that it raises is answered as 400, 404 or 409."""
    response_type: Any
    """The type that `run` gives: what is encoded as JSON, bytes that are JSON, or pieces of text to stream."""
    query_type: type
    body_type: type | None
    is_nonblocking: bool
    """It waits for nothing, so it runs on the event loop's thread; others ask the store, in a worker thread."""
    media_type: str

    @property
    def name(self) -> str:
        """Its function's."""
        return self.handler.__name__

    @property
    def summary(self) -> str:
        """The first line of its function's docstring."""
        return (inspect.getdoc(self.handler) or "").partition("\n")[0]


class AdminEndpoints(list[AdminEndpoint]):
    """A list that functions are added to: `@api.add("GET", "/admin/things/{id}", "viewer")`."""

    def register(
        self,
        method: Method,
        path: str,
        role: Role,
        scope: RoleScope = "organisation",
        *,
        query_type: type = NoParameters,
        body_type: type | None = None,
        is_nonblocking: bool = False,
        media_type: str = JSON_MEDIA_TYPE,
    ) -> Callable[[EndpointHandler], EndpointHandler]:
        """Make the function an operation; what it returns is the answer's type."""

        def decorate(handler: EndpointHandler) -> EndpointHandler:
            self.append(
                AdminEndpoint(
                    method=method,
                    path=path,
                    role=role,
                    scope=scope,
                    handler=handler,
                    response_type=get_type_hints(handler)["return"],
                    query_type=query_type,
                    body_type=body_type,
                    is_nonblocking=is_nonblocking,
                    media_type=media_type,
                )
            )
            return handler

        return decorate
