"""What the admin API can do, as data: routes, checks and the OpenAPI document are made of `Operation`s."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_type_hints

import msgspec

from argosy.gateway.auth import reach
from argosy.gateway.principal import Caller
from argosy.protocol import ApiError
from argosy.store import Accounts, Audit, Role, RoleScope, Store, Terms, UsageLog

Method = Literal["GET", "POST", "PATCH", "DELETE"]
JSON = "application/json"
CSV = "text/csv; charset=utf-8"


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """No parameters."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operation."""

    caller: Caller
    id: str
    """What stands for `{id}` in the path."""
    query: Any
    """Of the operation's `query` type."""
    body: Any
    """Of the operation's `body` type."""

    @property
    def actor(self) -> str:
        """The caller, as the audit log names it."""
        caller = self.caller
        if caller.key:
            return f"key:{caller.key}"
        return f"user:{caller.user}" if caller.user else "local"


@dataclass(frozen=True, slots=True)
class Desk:
    """What operations work on: all of the whole gateway, or of one organisation, as if there were no others."""

    store: Store | None
    cards: Callable[[str, str | None], dict[str, Any] | None]
    """What `argosy explain` shows of a request, by its id."""
    organisation: str | None = None
    """Its id; None: the whole gateway."""

    def of(self, caller: Caller) -> Desk:
        """What is within the reach of the caller's role. No operation is given anything else."""
        return replace(self, organisation=reach(caller))

    def card(self, request: str) -> dict[str, Any] | None:
        """What `cards` tells, unless it is another organisation's."""
        card, within = self.cards(request, self.organisation), self.organisation
        if card is None or within is None or card["caller"]["organisation"] == within:
            return card
        return None

    @property
    def accounts(self) -> Accounts:
        """The store's accounts. Raises ApiError 404 when there is no store; the others likewise."""
        return self._store.accounts.within(self.organisation)

    @property
    def terms(self) -> Terms:
        """The store's limits and prices."""
        return self._store.terms.within(self.organisation)

    @property
    def usage(self) -> UsageLog:
        """The store's ledger."""
        return self._store.usage.within(self.organisation)

    @property
    def audit(self) -> Audit:
        """The store's audit log."""
        return self._store.audit.within(self.organisation)

    @property
    def _store(self) -> Store:
        if self.store is None:
            message = "This gateway keeps no accounts. Give it a 'store' in its settings."
            raise ApiError(404, "no_store", message)
        return self.store


Run = Callable[[Desk, Call], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: Method
    path: str
    role: Role
    """The least one that may do it."""
    scope: RoleScope
    """Where that role must be held. Those of an organisation may do it with what is theirs."""
    run: Run
    """A ValueError that it raises is answered as 400, 404 or 409."""
    answer: Any
    """The type that `run` gives: what is encoded as JSON, bytes that are JSON, or pieces of text to stream."""
    query: type
    body: type | None
    quick: bool
    """It waits for nothing, so it runs on the event loop's thread; others ask the store, in a worker thread."""
    media_type: str

    @property
    def name(self) -> str:
        """Its function's."""
        return self.run.__name__

    @property
    def summary(self) -> str:
        """The first line of its function's docstring."""
        return (inspect.getdoc(self.run) or "").partition("\n")[0]


class Operations(list[Operation]):
    """A list that functions are added to: `@api.add("GET", "/admin/things/{id}", "viewer")`."""

    def add(
        self,
        method: Method,
        path: str,
        role: Role,
        scope: RoleScope = "organisation",
        *,
        query: type = Nothing,
        body: type | None = None,
        quick: bool = False,
        media_type: str = JSON,
    ) -> Callable[[Run], Run]:
        """Make the function an operation; what it returns is the answer's type."""

        def added(run: Run) -> Run:
            self.append(
                Operation(
                    method=method,
                    path=path,
                    role=role,
                    scope=scope,
                    run=run,
                    answer=get_type_hints(run)["return"],
                    query=query,
                    body=body,
                    quick=quick,
                    media_type=media_type,
                )
            )
            return run

        return added
