"""Model routes: the conditions of a route, the order of routes, and the errors and log events of invalid ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, RouteConfig, load_config
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.model_registry.model_router import ModelRouter, RouteTarget
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, Limit, Organisation, Price, Project

ACME = Organisation(id="org_1", name="acme", created_at=0)
ZETA = Organisation(id="org_2", name="zeta", created_at=0)
ARCHIVED = Organisation(id="org_3", name="gone", created_at=0, archived_at=1.0)
WEB = Project(id="proj_1", organisation="org_1", name="web", created_at=0)
APP = Project(id="proj_2", organisation="org_1", name="app", created_at=0)
OTHER_ORGANISATION_PROJECT = Project(id="proj_3", organisation="org_2", name="web", created_at=0)
ARCHIVED_PROJECT = Project(
    id="proj_4", organisation="org_1", name="old", created_at=0, archived_at=1.0
)
SNAPSHOT = AccountSnapshot(
    organisations=(ACME, ZETA, ARCHIVED),
    projects=(WEB, APP, OTHER_ORGANISATION_PROJECT, ARCHIVED_PROJECT),
)
FILE = """
models:
  - {name: qwen, aliases: [default], replicas: [{url: 'http://a'}]}
  - {name: next, aliases: [latest], replicas: [{url: 'http://b'}]}
store: {}
"""


def make_router(*routes: RouteConfig) -> ModelRouter:
    """Return a router of two models, each with an alias, and these routes."""
    configs = [
        ModelConfig(name=name, aliases=(alias,), replicas=[ReplicaConfig(url=f"http://{name}")])
        for name, alias in (("qwen", "default"), ("next", "latest"))
    ]
    config = GatewayConfig(models=configs, routes=list(routes))
    built = build_model_router(build_model_entries(config), routes)
    built.apply_snapshot(SNAPSHOT)
    return built


def principal_of(project: Project, tier: int = 1) -> Principal:
    """Return a principal of this project."""
    return Principal(organisation=project.organisation, project=project.id, tier=tier)


def resolve_model(
    route: RouteConfig,
    requested_model: str = "qwen",
    principal: Principal = Principal(),  # noqa: B008 - immutable
    headers: Mapping[bytes, bytes] = {},
) -> str:
    """Return the name of the model that serves the request if this is the only route."""
    return make_router(route).resolve_target(requested_model, principal, headers).pool.model


@pytest.mark.parametrize("named", ["qwen", "default"])
def test_route_matches_all_names_of_model(named: str) -> None:
    moved = make_router(RouteConfig(model=named, target_model="latest"))
    for requested_model in ("qwen", "default"):
        target = moved.resolve_target(requested_model, Principal(), {})
        assert target == RouteTarget(
            moved.resolve_target("next", Principal(), {}).pool, "routes[0]"
        )
    assert moved.resolve_target("next", Principal(), {}).route_name == ""
    route_of_any_model = RouteConfig(target_model="qwen")
    assert resolve_model(route_of_any_model, "next") == "qwen"


def test_headers_of_route_must_all_match_exactly() -> None:
    route = RouteConfig(headers={"X-Beta": "1", "x-team": "*"}, target_model="next")
    matching_headers = {b"x-beta": b"1", b"x-team": b"blue", b"host": b"here"}
    assert resolve_model(route, headers=matching_headers) == "next"
    for other_headers in (
        {b"x-beta": b"1"},
        {b"x-team": b"blue"},
        matching_headers | {b"x-beta": b"1, 1"},
        matching_headers | {b"x-beta": b""},
        {},
    ):
        assert resolve_model(route, headers=other_headers) == "qwen", other_headers


@pytest.mark.parametrize(
    ("tenant", "expected"),
    [
        ("acme", {WEB, APP, ARCHIVED_PROJECT}),
        ("org_1", {WEB, APP, ARCHIVED_PROJECT}),
        ("acme/web", {WEB}),
        ("acme/proj_1", {WEB}),
        ("org_1/web", {WEB}),
        ("org_1/proj_1", {WEB}),
        ("web", set()),
        ("acme/old", set()),
        ("gone", set()),
        ("acme/", set()),
        ("nobody", set()),
    ],
)
def test_tenants_are_organisations_or_projects_by_name_or_id(
    tenant: str, expected: set[Project]
) -> None:
    route = RouteConfig(tenants=(tenant,), target_model="next")
    matching = {
        p
        for p in (WEB, APP, OTHER_ORGANISATION_PROJECT, ARCHIVED_PROJECT)
        if resolve_model(route, principal=principal_of(p)) == "next"
    }
    assert matching == expected
    assert resolve_model(route) == "qwen"  # an anonymous principal has no tenant


def test_route_matches_any_of_its_tenants_and_any_of_its_tiers() -> None:
    route = RouteConfig(
        tenants=("zeta", "acme/app"), tiers=("premium", "free"), target_model="next"
    )
    for project in (WEB, APP, OTHER_ORGANISATION_PROJECT):
        for tier in range(3):
            fits = project is not WEB and tier != 1
            assert resolve_model(route, principal=principal_of(project, tier)) == (
                "next" if fits else "qwen"
            )


def test_route_matches_any_flag_of_principal() -> None:
    route = RouteConfig(flags=("beta", "new"), target_model="next")
    for flags, model in (((), "qwen"), (("old",), "qwen"), (("new", "old"), "next")):
        assert resolve_model(route, principal=Principal(flags=frozenset(flags))) == model


def test_first_matching_route_decides() -> None:
    router = make_router(
        RouteConfig(name="stays", model="qwen", headers={"x-keep": "*"}, target_model="qwen"),
        RouteConfig(model="qwen", target_model="next"),
        RouteConfig(name="back", model="next", target_model="qwen"),
    )
    targets = {
        (requested_model, kept): router.resolve_target(
            requested_model, Principal(), {b"x-keep": b""} if kept else {}
        )
        for requested_model in ("qwen", "next")
        for kept in (False, True)
    }
    names = {request: (target.pool.model, target.route_name) for request, target in targets.items()}
    assert names == {
        ("qwen", True): ("qwen", "stays"),
        ("qwen", False): ("next", "routes[1]"),
        ("next", True): ("qwen", "back"),
        ("next", False): ("qwen", "back"),
    }


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "qwen", "latest"]),
            st.dictionaries(st.sampled_from(["a", "b"]), st.sampled_from("12*"), min_size=1)
            | st.none(),
            st.sampled_from(["default", "next"]),
        ),
        max_size=5,
    ),
    st.sampled_from(["qwen", "default", "next", "latest"]),
    st.dictionaries(st.sampled_from([b"a", b"b"]), st.sampled_from([b"1", b"2"])),
)
def test_routes_are_evaluated_in_order(
    rules: list[tuple[str | None, dict[str, str] | None, str]],
    requested_model: str,
    headers: dict[bytes, bytes],
) -> None:
    canonical = {"qwen": "qwen", "default": "qwen", "next": "next", "latest": "next"}
    expected = canonical[requested_model], ""
    for index, (model, conditions, target) in enumerate(rules):
        model_matches = model is None or canonical[model] == canonical[requested_model]
        values = {name: headers.get(name.encode(), b"").decode() for name in conditions or {}}
        if model_matches and all(
            values[name] and value in {"*", values[name]}
            for name, value in (conditions or {}).items()
        ):
            expected = canonical[target], f"routes[{index}]"
            break
    routes = [
        RouteConfig(model=model, headers=conditions, target_model=target)
        for model, conditions, target in rules
    ]
    found = make_router(*routes).resolve_target(requested_model, Principal(), headers)
    assert (found.pool.model, found.route_name) == expected


def test_access_is_checked_for_requested_model() -> None:
    router = make_router(RouteConfig(model="qwen", target_model="next"))
    scoped = Principal(allowed_models=frozenset({"qwen"}))
    assert router.resolve_target("default", scoped, {}).pool.model == "next"
    assert {card.id for card in router.list_models(scoped).data} == {"qwen", "default"}
    with pytest.raises(ApiError) as error:
        router.resolve_target("next", scoped, {})
    assert error.value.code == "model_not_allowed"
    with pytest.raises(ApiError) as error:
        router.resolve_target("qwen", Principal(allowed_models=frozenset({"next"})), {})
    assert error.value.code == "model_not_allowed"
    with pytest.raises(ApiError) as error:
        router.resolve_target("nothing", Principal(), {})
    assert error.value.code == "model_not_found"


def test_routing_and_unknown_tenants_are_logged() -> None:
    with capture_logs() as logs:
        router = make_router(
            RouteConfig(name="beta", tenants=("acme/wbe", "acme"), target_model="next")
        )
        router.apply_snapshot(SNAPSHOT)
        router.resolve_target("default", principal_of(WEB), {})
        router.resolve_target("default", principal_of(OTHER_ORGANISATION_PROJECT), {})
        found = Project(id="proj_9", organisation="org_1", name="wbe", created_at=0)
        router.apply_snapshot(AccountSnapshot(organisations=(ACME,), projects=(found,)))
        router.apply_snapshot(SNAPSHOT)
    unknown = {
        "event": "unknown_tenant_in_config",
        "routes": {"beta": ("acme/wbe",)},
        "log_level": "warning",
    }
    event = {
        "event": "request_routed",
        "requested_model": "default",
        "model": "next",
        "route": "beta",
        "reason": "",
        "log_level": "info",
    }
    assert logs == [unknown, event, unknown]


def test_unknown_tenant_is_logged_once_at_start() -> None:
    with capture_logs() as logs:
        router = make_router(
            RouteConfig(name="beta", tenants=("acem",), target_model="next"),
            RouteConfig(name="gold", tiers=("premium",), target_model="next"),
        )
        assert [event["routes"] for event in logs] == [{"beta": ("acem",)}]
        router.apply_snapshot(SNAPSHOT)
        router.apply_snapshot(AccountSnapshot(organisations=(ACME,)))
    assert len(logs) == 1


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (
            "[{target_model: qwne}]",
            "route 'routes[0]': target_model: no model has the name 'qwne'. Use one of",
        ),
        ("[{model: old, target_model: next}]", "model: no model has the name 'old'"),
        (
            "[{target_model: next}, {name: a, model: x, target_model: next}]",
            "route 'a': model: no model has the name 'x'",
        ),
        (
            "[{name: a, target_model: next}, {name: a, target_model: next}]",
            "route 'a' is defined twice",
        ),
        (
            "[{name: 'routes[1]', target_model: next}, {target_model: next}]",
            "route 'routes[1]' is defined twice",
        ),
        ("[{model: qwen}]", "missing required field `target_model` - at `$.routes[0]`"),
        (
            "[{target_model: next, headers: {x-a: '1', X-A: '2'}}]",
            "'x-a' is defined twice (names are case-ins",
        ),
        ("[{target_model: next, headers: {x-a: 1}}]", "Expected `str`, got `int`"),
        ("[{target_model: next, headers: {'x a': '1'}}]", "regex"),
        ("[{target_model: next, headers: {x-a: ' 1'}}]", "regex"),
        ("[{target_model: next, headers: {x-a: é}}]", "regex"),
        ("[{target_model: next, headers: {}}]", "length >= 1"),
        ("[{target_model: next, tenants: []}]", "length >= 1"),
        ("[{target_model: next, tiers: []}]", "length >= 1"),
        ("[{target_model: next, flags: []}]", "length >= 1"),
        (
            "[{target_model: next, tiers: [gold]}]",
            "Invalid enum value 'gold' - at `$.routes[0].tiers[0]`",
        ),
        ("[{target_model: next, tenant: [acme]}]", "unknown field `tenant`"),
        ("[{target_model: next, windows: []}]", "length >= 1"),
        (
            "[{target_model: next, windows: [{start_minute: 0, end_minute: 1, day: 1}]}]",
            "unknown field `day`",
        ),
        (
            "[{target_model: next, percentage_flag: {name: f, share: 1.5}}]",
            "share of flag f must be between 0 and 1",
        ),
    ],
)
def test_invalid_route_is_rejected_by_name(tmp_path: Path, routes: str, message: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"{FILE}routes: {routes}")
    with pytest.raises(ValueError, match=f"gateway.yaml: .*{re.escape(message)}"):
        load_config(path)


@pytest.mark.parametrize("condition", ["tenants: [acme]", "tiers: [premium]", "flags: [new]"])
def test_routes_by_tenant_tier_or_flag_need_store(tmp_path: Path, condition: str) -> None:
    path = tmp_path / "gateway.yaml"
    route = f"routes: [{{{condition}, target_model: next}}]"
    path.write_text(FILE + route)
    assert load_config(path).routes[0].target_model == "next"
    path.write_text(FILE.replace("store: {}", "") + route)
    with pytest.raises(ValueError, match="Add `store`"):
        load_config(path)


def test_unknown_models_of_limits_and_prices_are_logged() -> None:
    def priced(*names: str) -> AccountSnapshot:
        prices = (Price(model=name, input=1, cached_input=1, output=1) for name in names)
        return AccountSnapshot(prices=tuple(prices))

    with capture_logs() as logs:
        router = make_router()
        router.apply_snapshot(priced("qwen", "latest", "qwne"))
        router.apply_snapshot(priced("qwne"))
        limit = Limit(
            id="lim_1", owner_kind="key", owner="key_1", unit="requests", amount=1, model="old"
        )
        router.apply_snapshot(msgspec.structs.replace(priced("qwne"), limits=(limit,)))
    unknown = [(event["event"], event["models"], event["count"]) for event in logs]
    event = "unknown_model_in_limits_or_prices"
    assert unknown == [(event, ["qwne"], 1), (event, ["old", "qwne"], 2)]
