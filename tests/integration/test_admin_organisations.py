"""Role matrix of the admin API: every endpoint, called with every role held in the gateway or in an organisation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import httpx2
import pytest
from tests.support.organisations import (
    AdminGateway,
    CallerReach,
    Json,
    ResourceIds,
    key_body,
    limit_body,
    unique_name,
    user_body,
)
from tests.support.stored_rollout import DECLARATION, POOL, StoredRollout

from argosy.deployment import FleetControl
from argosy.gateway.admin import list_endpoints
from argosy.gateway.admin.endpoints import AdminEndpoint
from argosy.store import Role, RoleScope

ROLES: tuple[Role, ...] = ("user", "viewer", "operator", "admin")
BodyBuilder = Callable[[ResourceIds], Any]


def no_fields(ids: ResourceIds) -> Json:
    del ids
    return {}


@dataclass(frozen=True)
class EndpointCase:
    """Expected permissions of an endpoint, and how to call it."""

    role: Role
    scope: RoleScope = "organisation"
    id_kind: str = ""
    """Kind of resource that the id in the path names."""
    query: BodyBuilder = no_fields
    body: BodyBuilder = no_fields
    is_same_for_all: bool = False
    """Whether the response contains no data of an organisation, as those of the gateway's scope."""
    forbidden_status: int = 403
    """Status for lower roles."""
    success_status: int = 200
    """Status for callers who may call it."""
    unknown_list_status: int = 200
    """Status of a list of something that does not exist."""
    is_recorded: bool = False
    """Whether the audit log has reads, because they show what users sent."""
    other_bodies: list[BodyBuilder] = field(default_factory=list)
    """Bodies that refer to the organisation with other fields than `body`."""


OwnCase = partial(EndpointCase, "user", is_same_for_all=True)
OperatorCase = partial(EndpointCase, "operator", "gateway")


PROMPT_FIELDS: Json = {"content": {"text": "Be kind."}}
ADAPTER_FIELDS = {"base_model": "big", "digest": f"sha256:{'1' * 64}"}


def organisation_field(ids: ResourceIds) -> Json:
    return {"organisation": ids.organisation}


def tenant_series(ids: ResourceIds) -> Json:
    return {"scope": f"tenant:{ids.project}"}


def replica_fields(ids: ResourceIds) -> Json:
    del ids
    return {"replica": "a", "reason": unique_name()}


def name_field(ids: ResourceIds) -> Json:
    del ids
    return {"name": unique_name()}


def alternate(*bodies: Json) -> BodyBuilder:
    """Return these bodies one after another, so that each call of a sufficient role changes something."""
    remaining = itertools.cycle(bodies)
    return lambda _: next(remaining)


def rollout_fields(ids: ResourceIds) -> Json:
    del ids
    return {"pool": POOL, "rollout": f"{POOL}-1", "reason": unique_name()}


CASES: dict[str, EndpointCase] = {
    "list_organisations": EndpointCase("viewer", query=lambda _: {"limit": 1000}),
    "create_organisation": EndpointCase("admin", "gateway", body=name_field),
    "get_organisation": EndpointCase("viewer", id_kind="organisation"),
    "change_organisation": EndpointCase(
        "admin", "gateway", id_kind="organisation", body=name_field
    ),
    "archive_organisation": EndpointCase("admin", "gateway", id_kind="organisation"),
    "list_projects": EndpointCase("viewer", query=organisation_field),
    "create_project": EndpointCase(
        "admin", body=lambda ids: organisation_field(ids) | name_field(ids)
    ),
    "get_project": EndpointCase("viewer", id_kind="project"),
    "change_project": EndpointCase("admin", id_kind="project", body=name_field),
    "archive_project": EndpointCase("admin", id_kind="project"),
    "erase_project": EndpointCase(
        "admin", id_kind="project", body=lambda ids: {"project": ids.project}
    ),
    "list_users": EndpointCase("viewer", query=organisation_field),
    "create_user": EndpointCase("admin", body=user_body),
    "get_user": EndpointCase("viewer", id_kind="user"),
    "change_user": EndpointCase("admin", id_kind="user", body=lambda ids: {"project": ids.project}),
    "disable_user": EndpointCase("admin", id_kind="user"),
    "list_keys": EndpointCase("viewer", query=lambda ids: {"project": ids.project}),
    "create_key": EndpointCase("operator", body=key_body),
    "get_key": EndpointCase("viewer", id_kind="key"),
    "rotate_key": EndpointCase("operator", id_kind="key"),
    "revoke_key": EndpointCase("operator", id_kind="key"),
    "advise_replicas": EndpointCase("viewer", "gateway"),
    "compare_billed_and_caused_costs": EndpointCase("viewer", "gateway"),
    "report_budgets": EndpointCase("viewer"),
    "list_cost_outliers": EndpointCase("viewer", is_same_for_all=True),
    "list_limits": EndpointCase("viewer", query=lambda ids: {"owner": ids.project}),
    "set_limit": EndpointCase(
        "operator",
        body=limit_body("project"),
        other_bodies=[limit_body("user"), limit_body("key")],
    ),
    "delete_limit": EndpointCase("operator", id_kind="limit"),
    "list_prices": EndpointCase("viewer", is_same_for_all=True),
    "set_price": EndpointCase(
        "admin",
        "gateway",
        body=lambda _: {"model": "big", "input": 1, "cached_input": 1, "output": 1},
    ),
    "list_adapters": EndpointCase("viewer", query=organisation_field),
    "add_adapter_version": EndpointCase(
        "operator",
        body=lambda ids: organisation_field(ids) | ADAPTER_FIELDS | name_field(ids),
        other_bodies=[lambda ids: {"project": ids.project} | ADAPTER_FIELDS | name_field(ids)],
    ),
    "get_adapter": EndpointCase("viewer", id_kind="adapter"),
    "change_adapter": EndpointCase("operator", id_kind="adapter", body=lambda _: {"pinned": True}),
    "promote_adapter": EndpointCase("operator", id_kind="adapter"),
    "remove_adapter": EndpointCase("operator", id_kind="adapter"),
    "load_lora_adapter": EndpointCase(
        "operator",
        body=lambda _: {"lora_name": unique_name(), "lora_path": ADAPTER_FIELDS["digest"]},
        is_same_for_all=True,
    ),
    "unload_lora_adapter": EndpointCase("operator", body=lambda ids: {"lora_name": ids.adapter}),
    "list_prompts": EndpointCase("viewer", query=organisation_field),
    "add_prompt_version": EndpointCase(
        "operator",
        body=lambda ids: organisation_field(ids) | PROMPT_FIELDS | name_field(ids),
        other_bodies=[lambda ids: {"project": ids.project} | PROMPT_FIELDS | name_field(ids)],
    ),
    "get_prompt": EndpointCase("viewer", id_kind="prompt"),
    "label_prompt": EndpointCase("operator", id_kind="prompt", body=lambda _: {"label": "staging"}),
    "delete_prompt": EndpointCase("operator", id_kind="prompt"),
    "render_prompt": EndpointCase("viewer", body=lambda ids: {"prompt_id": ids.prompt}),
    "list_alerts": EndpointCase("viewer", "gateway"),
    "silence_alerts": OperatorCase(
        body=lambda _: {"matchers": {"model": "big"}, "duration_s": 60, "reason": "test"}
    ),
    "end_silence": EndpointCase("operator", "gateway", id_kind="prompt", success_status=404),
    # Three callers may order tests, each once.
    "order_notice_test": OperatorCase(body=lambda _: {"receiver": "pager"}),
    "list_golden_sets": EndpointCase("viewer", query=organisation_field),
    "list_quality_runs": EndpointCase("viewer", query=organisation_field),
    "list_quality_samples": EndpointCase("viewer", query=lambda ids: {"project": ids.project}),
    "summarise_quality_samples": EndpointCase("viewer"),
    "read_quality_sample": EndpointCase("operator", id_kind="sample", is_recorded=True),
    "list_flags": EndpointCase("viewer", "gateway"),
    # The gateway declares no flags, which is the answer to callers who may switch them.
    "switch_flag": EndpointCase("operator", "gateway", id_kind="prompt", success_status=404),
    "reset_flag": EndpointCase("operator", "gateway", id_kind="prompt", success_status=404),
    "report_usage": EndpointCase(
        "viewer", query=lambda ids: {"project": ids.project, "group_by": "organisation"}
    ),
    "export_usage": EndpointCase("viewer", query=organisation_field),
    "get_caller": OwnCase(),
    "report_own_usage": OwnCase(),
    "explain_request": EndpointCase("viewer", id_kind="request", forbidden_status=404),
    "list_requests": EndpointCase("viewer", query=organisation_field),
    "list_settings": EndpointCase("viewer", "gateway"),
    "list_checks": EndpointCase("viewer", "gateway"),
    "query_series": EndpointCase("viewer", query=tenant_series, unknown_list_status=404),
    "export_series": EndpointCase("viewer", query=tenant_series, unknown_list_status=404),
    "list_audit_entries": EndpointCase("viewer", query=lambda ids: {"subject": ids.project}),
    "verify_audit_log": EndpointCase("viewer", "gateway"),
    "list_pools": EndpointCase("viewer", "gateway"),
    "list_replicas": EndpointCase("viewer", "gateway"),
    "list_replica_events": EndpointCase("viewer", "gateway"),
    "read_replica_log": OperatorCase(query=lambda _: {"replica": "gone"}),
    "list_objectives": EndpointCase("viewer", "gateway"),
    "get_objective": EndpointCase("viewer", "gateway", id_kind="prompt", success_status=404),
    "list_cache_rules": EndpointCase("viewer", "gateway"),
    "purge_cache": OperatorCase(body=lambda _: {"model": "big"}),
    "preview_routing": EndpointCase(
        "viewer",
        "gateway",
        body=lambda _: {"request": {"model": "big", "prompt": "Say"}},
    ),
    "list_prefixes": EndpointCase("viewer", "gateway", query=lambda _: {"model": "big"}),
    "list_prefix_reports": EndpointCase(
        "viewer", query=lambda ids: {"project": ids.project}, unknown_list_status=404
    ),
    "watch_prefixes": EndpointCase("operator", body=lambda ids: {"project": ids.project}),
    "list_fleet_events": EndpointCase("viewer", "gateway"),
    **{
        f"{action}_replica": OperatorCase(body=replica_fields)
        for action in ("cordon", "drain", "undrain")
    },
    # Only a native replica sleeps. This one is none, which is the answer to callers who may decide.
    "sleep_replica": OperatorCase(body=replica_fields, success_status=400),
    "wake_replica": OperatorCase(body=replica_fields, success_status=400),
    "weight_replica": OperatorCase(body=lambda ids: replica_fields(ids) | {"weight": 2.0}),
    "get_fleet": EndpointCase("viewer", "gateway"),
    "list_fleet_revisions": EndpointCase("viewer", "gateway"),
    "plan_fleet_rollback": EndpointCase("viewer", "gateway", query=lambda _: {"revision": 1}),
    "get_fleet_declaration": OperatorCase(),
    "plan_fleet_change": OperatorCase(
        body=lambda _: {"declaration": DECLARATION.decode()},
    ),
    # Neither a declaration nor a variation, so that no process is started for each caller.
    "forecast_fleet_change": OperatorCase(body=lambda _: {}, success_status=400),
    "apply_fleet_change": OperatorCase(
        body=alternate(
            {"declaration": DECLARATION.decode(), "after": 3},
            {
                "declaration": DECLARATION.decode().replace('"replicas": 2', "replicas: 1"),
                "after": 4,
            },
        ),
    ),
    "roll_back_fleet": OperatorCase(body=alternate({"revision": 1}, {"revision": 3})),
    "scale_pool": OperatorCase(
        body=alternate({"pool": POOL, "replicas": 1}, {"pool": POOL, "replicas": 3}),
    ),
    **{
        f"{command}_rollout": OperatorCase(body=rollout_fields)
        for command in ("pause", "resume", "promote", "abort")
    },
    "list_incidents": EndpointCase("viewer", "gateway"),
    # There are none, which is the answer to callers who may see and change them.
    "get_incident": EndpointCase("viewer", "gateway", id_kind="prompt", success_status=404),
    "draft_postmortem": EndpointCase("viewer", "gateway", id_kind="prompt", success_status=404),
    "open_incident": OperatorCase(body=lambda _: {"title": unique_name()}),
    "close_incident": OperatorCase(body=lambda _: {"incident": 999_999}, success_status=404),
    "comment_incident": OperatorCase(
        body=lambda _: {"incident": 999_999, "text": "disk"}, success_status=404
    ),
    "get_drift": EndpointCase("viewer", "gateway"),
    "post_alerts": OperatorCase(body=lambda _: [{"labels": {"alertname": unique_name()}}]),
    "get_openapi_document": OwnCase(),
    "list_lessons": OwnCase(),
    "run_lesson": OwnCase(
        body=lambda _: {"lesson": "speculation", "values": {"drafts": 0}}, success_status=400
    ),
}


@dataclass(frozen=True)
class EndpointCaller:
    """Calls one endpoint of a gateway."""

    gateway: AdminGateway
    endpoint: AdminEndpoint

    @property
    def case(self) -> EndpointCase:
        return CASES[self.endpoint.handler.__name__]

    @property
    def is_list(self) -> bool:
        return self.endpoint.method == "GET" and not self.case.id_kind

    async def call(
        self, ids: ResourceIds, headers: Json, build_body: BodyBuilder | None = None
    ) -> httpx2.Response:
        body = (build_body or self.case.body)(ids)
        return await self.gateway.client.request(
            self.endpoint.method,
            self.endpoint.path.format(id=asdict(ids).get(self.case.id_kind)),
            params=self.case.query(ids),
            json=body if self.endpoint.body_type is not None else None,
            headers=headers | {"x-request-id": "one"},
        )

    async def assert_resource_hidden(self, customer: ResourceIds, headers: Json) -> None:
        """Check that an id of another organisation is answered like an unknown id, in every field."""
        for build_body in (self.case.body, *self.case.other_bodies):
            foreign = await self.call(customer, headers, build_body)
            unknown = await self.call(ResourceIds(), headers, build_body)
            assert mask_ids(foreign, customer) == mask_ids(unknown, ResourceIds())
            expected = self.case.unknown_list_status if self.is_list else 404
            assert foreign.status_code == expected, foreign.text


def mask_ids(response: httpx2.Response, ids: ResourceIds) -> tuple[int, str]:
    """Return the status and the text of a response, in which placeholders replace the ids."""
    text = response.text
    for kind, value in asdict(ids).items():
        text = text.replace(value, f"<{kind}>")
    return response.status_code, text


def test_matrix_covers_every_endpoint() -> None:
    registered = {
        endpoint.handler.__name__: (endpoint.scope, "{id}" in endpoint.path)
        for endpoint in list_endpoints()
    }
    assert registered == {name: (case.scope, case.id_kind != "") for name, case in CASES.items()}


ENDPOINTS = list_endpoints()
FLEET_CHANGES = [
    endpoint
    for endpoint in ENDPOINTS
    if endpoint.path.startswith("/admin/fleet") and not endpoint.is_safe
]


def store_fleet(gateway: AdminGateway) -> None:
    if gateway.store.fleets.latest_revision("demo") is None:
        StoredRollout(gateway.store.fleets)
        FleetControl("demo", gateway.store.fleets).scale(POOL, 3, "", "test")


@pytest.mark.parametrize("endpoint", FLEET_CHANGES, ids=lambda endpoint: endpoint.handler.__name__)
async def test_change_of_the_fleet_permits_exactly_the_expected_callers(
    admin_gateway: AdminGateway, endpoint: AdminEndpoint
) -> None:
    await check_callers(EndpointCaller(admin_gateway, endpoint), every_role=True)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("every_role", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "endpoint",
    [endpoint for endpoint in ENDPOINTS if endpoint not in FLEET_CHANGES],
    ids=lambda endpoint: endpoint.handler.__name__,
)
async def test_endpoint_permits_exactly_the_expected_callers(
    shared_gateway: AdminGateway, endpoint: AdminEndpoint, *, every_role: bool
) -> None:
    await check_callers(EndpointCaller(shared_gateway, endpoint), every_role=every_role)


async def check_callers(caller: EndpointCaller, *, every_role: bool = False) -> None:
    """Callers with a sufficient role reach their own organisation and cannot detect resources of others.

    Roles are ranked, so that the lowest sufficient one and the one below it show what each may do.
    """
    gateway, endpoint, case = caller.gateway, caller.endpoint, caller.case
    store_fleet(gateway)
    reaches: tuple[CallerReach, ...] = ("gateway", "own", "other")
    lowest = ROLES.index(case.role)
    roles = ROLES if every_role else ROLES[max(lowest - 1, 0) : lowest + 1]
    customer = await gateway.current_customer()
    for reach, role in itertools.product(reaches, roles):
        headers = await gateway.caller_headers(role, reach, customer)
        before = gateway.store.load_snapshot().version
        if ROLES.index(role) < ROLES.index(case.role):
            response = await caller.call(customer, headers)
            assert response.status_code == case.forbidden_status, (role, reach, response.text)
        elif reach != "gateway" and case.scope == "gateway":
            response = await caller.call(customer, headers)
            assert response.status_code == 403, (role, reach, response.text)
            assert response.json()["error"]["code"] == "insufficient_role"
        elif reach == "other" and not case.is_same_for_all:
            await caller.assert_resource_hidden(customer, headers)
        else:
            response = await caller.call(customer, headers)
            assert response.status_code == case.success_status, (role, reach, response.text)
            if not endpoint.is_safe and case.success_status == 200:
                assert gateway.store.load_snapshot().version > before
                customer = await gateway.current_customer(renews=True)  # it was changed or ended
                continue
            assert (case.scope == "gateway" or case.is_same_for_all) or any(
                value in response.text for value in asdict(customer).values()
            ), (role, reach, response.text)
            if case.is_recorded:
                continue
        assert gateway.store.load_snapshot().version == before, (role, reach)


@pytest.mark.asyncio(loop_scope="module")
async def test_unfiltered_lists_hold_only_the_callers_organisation(
    shared_gateway: AdminGateway,
) -> None:
    own, foreign = await shared_gateway.create_customer(), await shared_gateway.create_customer()
    headers = await shared_gateway.key_headers("viewer", "organisation", own.organisation)
    client = shared_gateway.client
    for endpoint in ENDPOINTS:
        if endpoint.method == "GET" and "{id}" not in endpoint.path:
            params = {"group_by": "organisation,project,key"} if "usage" in endpoint.path else {}
            response = await client.get(endpoint.path, params=params, headers=headers)
            leaked = [value for value in asdict(foreign).values() if value in response.text]
            assert not leaked, endpoint.handler.__name__
    page = await client.get(f"/admin/keys?after={foreign.key}", headers=headers)
    assert page.status_code == 400
