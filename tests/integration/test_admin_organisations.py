"""Every operation of the admin API by every role, held in the gateway, the organisation concerned, and another one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import httpx2
import pytest
from tests.support.organisations import (
    Holding,
    Ids,
    Json,
    World,
    key_body,
    limit_body,
    name,
    user_body,
)

from argosy.gateway.admin.app import ENDPOINTS
from argosy.gateway.admin.endpoints import AdminEndpoint
from argosy.store import Role, RoleScope

ROLES: tuple[Role, ...] = ("user", "viewer", "operator", "admin")


def nothing(ids: Ids) -> Json:
    del ids
    return {}


@dataclass(frozen=True)
class Case:
    """Who may do one operation, and how it is asked for."""

    role: Role
    scope: RoleScope = "organisation"
    id: str = ""
    """Of which kind the id in the path is."""
    query: Callable[[Ids], Json] = nothing
    body: Callable[[Ids], Json] = nothing
    alike: bool = False
    """Its answer says nothing of any organisation."""
    refused: int = 403
    """Status for lower roles."""
    more: list[Callable[[Ids], Json]] = field(default_factory=list)
    """Other bodies, each with an id of another organisation in a place of its own."""


def of_organisation(ids: Ids) -> Json:
    return {"organisation": ids.organisation}


CASES: dict[str, Case] = {
    "list_organisations": Case("viewer"),
    "create_organisation": Case("admin", "gateway", body=lambda _: {"name": name()}),
    "get_organisation": Case("viewer", id="organisation"),
    "change_organisation": Case(
        "admin", "gateway", id="organisation", body=lambda _: {"name": name()}
    ),
    "archive_organisation": Case("admin", "gateway", id="organisation"),
    "list_projects": Case("viewer", query=of_organisation),
    "create_project": Case("admin", body=lambda ids: of_organisation(ids) | {"name": name()}),
    "get_project": Case("viewer", id="project"),
    "change_project": Case("admin", id="project", body=lambda _: {"name": name()}),
    "archive_project": Case("admin", id="project"),
    "list_users": Case("viewer", query=of_organisation),
    "create_user": Case("admin", body=user_body),
    "get_user": Case("viewer", id="user"),
    "change_user": Case("admin", id="user", body=lambda ids: {"project": ids.project}),
    "disable_user": Case("admin", id="user"),
    "list_keys": Case("viewer", query=lambda ids: {"project": ids.project}),
    "create_key": Case("operator", body=key_body),
    "get_key": Case("viewer", id="key"),
    "rotate_key": Case("operator", id="key"),
    "revoke_key": Case("operator", id="key"),
    "list_limits": Case("viewer", query=lambda ids: {"owner": ids.project}),
    "set_limit": Case(
        "operator", body=limit_body("project"), more=[limit_body("user"), limit_body("key")]
    ),
    "delete_limit": Case("operator", id="limit"),
    "list_prices": Case("viewer", alike=True),
    "set_price": Case(
        "admin",
        "gateway",
        body=lambda _: {"model": "big", "input": 1, "cached_input": 1, "output": 1},
    ),
    "report_usage": Case(
        "viewer", query=lambda ids: {"project": ids.project, "group_by": "organisation"}
    ),
    "export_usage": Case("viewer", query=of_organisation),
    "get_caller": Case("user", alike=True),
    "report_own_usage": Case("user", alike=True),
    "explain_request": Case("viewer", id="request", refused=404),
    "list_audit_entries": Case("viewer", query=lambda ids: {"subject": ids.project}),
    "verify_audit_log": Case("viewer", "gateway", alike=True),
    "get_openapi_document": Case("user", alike=True),
}


async def ask(world: World, operation: AdminEndpoint, ids: Ids, headers: Json) -> httpx2.Response:
    return await send(world, operation, ids, headers, CASES[operation.name].body(ids))


async def send(
    world: World, operation: AdminEndpoint, ids: Ids, headers: Json, body: Json
) -> httpx2.Response:
    case = CASES[operation.name]
    return await world.client.request(
        operation.method,
        operation.path.format(id=asdict(ids).get(case.id)),
        params=case.query(ids),
        json=body if operation.body_type is not None else None,
        headers=headers | {"x-request-id": "one"},
    )


def without_ids(answer: httpx2.Response, ids: Ids) -> tuple[int, str]:
    """Status and text of an answer, the ids in it replaced."""
    text = answer.text
    for kind, value in asdict(ids).items():
        text = text.replace(value, f"<{kind}>")
    return answer.status_code, text


def test_no_operation_is_forgotten() -> None:
    assert set(CASES) == {operation.name for operation in ENDPOINTS}
    told = {op.name: (op.scope, "{id}" in op.path) for op in ENDPOINTS}
    assert told == {name: (case.scope, case.id != "") for name, case in CASES.items()}


@pytest.mark.parametrize("operation", ENDPOINTS, ids=lambda operation: operation.name)
async def test_who_may(world: World, operation: AdminEndpoint) -> None:
    """With the role and within its reach, and nobody learns even that there is anything beyond it."""
    case = CASES[operation.name]
    holdings: tuple[Holding, ...] = ("gateway", "own", "other")
    customer = await world.customer()
    for holding, role in itertools.product(holdings, ROLES):
        headers = await world.holder(role, holding, customer)
        before = world.store.load_snapshot().version
        answer = await ask(world, operation, customer, headers)
        cell = f"{operation.name} by {role} of {holding}: {answer.text}"
        if ROLES.index(role) < ROLES.index(case.role):
            assert answer.status_code == case.refused, cell
        elif holding != "gateway" and case.scope == "gateway":
            assert answer.status_code == 403, cell
            assert answer.json()["error"]["code"] == "insufficient_role"
        elif holding == "other" and not case.alike:
            await unknown(world, operation, customer, headers, answer)
        else:
            assert answer.status_code == 200, cell
            if operation.method == "GET" and not case.alike:
                assert any(value in answer.text for value in asdict(customer).values()), cell
            assert (world.store.load_snapshot().version > before) == (operation.method != "GET"), (
                cell
            )
            if operation.method != "GET":
                customer = await world.customer()  # of this one something has ended, or changed
            continue
        assert world.store.load_snapshot().version == before, cell


async def unknown(
    world: World, operation: AdminEndpoint, customer: Ids, headers: Json, answer: httpx2.Response
) -> None:
    """What is another organisation's is answered as what is nobody's, wherever its id stands."""
    asked = await ask(world, operation, Ids(), headers)
    assert without_ids(answer, customer) == without_ids(asked, Ids())
    lists = operation.method == "GET" and CASES[operation.name].id == ""
    assert answer.status_code == (200 if lists else 404), answer.text
    for body in CASES[operation.name].more:
        theirs = await send(world, operation, customer, headers, body(customer))
        nobodys = await send(world, operation, customer, headers, body(Ids()))
        assert theirs.status_code == 404
        assert without_ids(theirs, customer) == without_ids(nobodys, Ids())


async def test_nothing_is_moved_into_or_taken_from_another_organisation(world: World) -> None:
    mine, theirs = await world.customer(), await world.customer()
    headers = await world.headers("admin", "organisation", mine.organisation)
    before = world.store.load_snapshot().version
    refused = [
        ("PATCH", f"/admin/users/{mine.user}", {"project": theirs.project}),
        ("POST", "/admin/users", user_body(mine) | {"project": theirs.project}),
        ("POST", "/admin/users", user_body(mine) | {"organisation": theirs.organisation}),
        ("POST", "/admin/keys", key_body(mine) | {"user": theirs.user}),
        ("POST", "/admin/keys", key_body(mine) | {"project": theirs.project}),
    ]
    for method, path, body in refused:
        answer = await world.client.request(method, path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path
    assert world.store.load_snapshot().version == before


async def test_lists_without_a_filter_hold_ones_own_only(world: World) -> None:
    mine, theirs = await world.customer(), await world.customer()
    headers = await world.headers("viewer", "organisation", mine.organisation)
    for operation in ENDPOINTS:
        if operation.method == "GET" and "{id}" not in operation.path:
            params = {"group_by": "organisation,project,key"} if "usage" in operation.path else {}
            answer = await world.client.get(operation.path, params=params, headers=headers)
            leaked = [value for value in asdict(theirs).values() if value in answer.text]
            assert not leaked, operation.name
    # The same in a list of another's key, of the place after it, and of its entries.
    listed = await world.client.get(f"/admin/keys?after={theirs.key}", headers=headers)
    assert listed.status_code == 400
