"""Which model answers: what each part of a route asks of a request, and in which order routes are looked at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from argosy.gateway import ModelConfig, ReplicaConfig, RouteConfig, load_config
from argosy.gateway.config import GatewayConfig
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.model_registry.model_router import ModelRouter, RouteTarget
from argosy.gateway.principal import Principal
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, Limit, Organisation, Price, Project

ACME = Organisation(id="org_1", name="acme", created_at=0)
ZETA = Organisation(id="org_2", name="zeta", created_at=0)
GONE = Organisation(id="org_3", name="gone", created_at=0, archived_at=1.0)
WEB = Project(id="proj_1", organisation="org_1", name="web", created_at=0)
APP = Project(id="proj_2", organisation="org_1", name="app", created_at=0)
THEIRS = Project(id="proj_3", organisation="org_2", name="web", created_at=0)
OLD = Project(id="proj_4", organisation="org_1", name="old", created_at=0, archived_at=1.0)
EVERYBODY = AccountSnapshot(organisations=(ACME, ZETA, GONE), projects=(WEB, APP, THEIRS, OLD))
FILE = """
models:
  - {name: qwen, aliases: [default], replicas: [{url: 'http://a'}]}
  - {name: next, aliases: [latest], replicas: [{url: 'http://b'}]}
store: {}
"""


def models(*routes: RouteConfig) -> ModelRouter:
    """Two models, each with an alias, and these routes."""
    configs = [
        ModelConfig(name=name, aliases=(alias,), replicas=[ReplicaConfig(url=f"http://{name}")])
        for name, alias in (("qwen", "default"), ("next", "latest"))
    ]
    config = GatewayConfig(models=configs, routes=list(routes))
    built = build_model_router(build_model_entries(config), routes)
    built.apply_snapshot(EVERYBODY)
    return built


def of(project: Project, tier: int = 1) -> Principal:
    """Who asks for a project."""
    return Principal(organisation=project.organisation, project=project.id, tier=tier)


def answered(
    route: RouteConfig,
    asked: str = "qwen",
    principal: Principal = Principal(),  # noqa: B008 - immutable
    headers: Mapping[bytes, bytes] = {},
) -> str:
    """The name of the model that answers where there is this route."""
    return models(route).resolve_target(asked, principal, headers).pool.model


@pytest.mark.parametrize("named", ["qwen", "default"])
def test_a_model_is_meant_by_all_of_its_names(named: str) -> None:
    moved = models(RouteConfig(model=named, target_model="latest"))
    for asked in ("qwen", "default"):
        target = moved.resolve_target(asked, Principal(), {})
        assert target == RouteTarget(
            moved.resolve_target("next", Principal(), {}).pool, "routes[0]"
        )
    assert moved.resolve_target("next", Principal(), {}).route_name == ""
    assert answered(RouteConfig(target_model="qwen"), "next") == "qwen"  # whatever is asked for


def test_a_request_has_all_headers_with_their_exact_values() -> None:
    route = RouteConfig(headers={"X-Beta": "1", "x-team": "*"}, target_model="next")
    fitting = {b"x-beta": b"1", b"x-team": b"blue", b"host": b"here"}
    assert answered(route, headers=fitting) == "next"
    for wrong in (
        {b"x-beta": b"1"},
        {b"x-team": b"blue"},
        fitting | {b"x-beta": b"1, 1"},
        fitting | {b"x-beta": b""},
        {},
    ):
        assert answered(route, headers=wrong) == "qwen", wrong


@pytest.mark.parametrize(
    ("tenant", "meant"),
    [
        ("acme", {WEB, APP, OLD}),
        ("org_1", {WEB, APP, OLD}),
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
    tenant: str, meant: set[Project]
) -> None:
    route = RouteConfig(tenants=(tenant,), target_model="next")
    led = {p for p in (WEB, APP, THEIRS, OLD) if answered(route, principal=of(p)) == "next"}
    assert led == meant
    assert answered(route) == "qwen"  # who is nobody's


def test_any_of_the_tenants_and_of_the_tiers() -> None:
    route = RouteConfig(
        tenants=("zeta", "acme/app"), tiers=("premium", "free"), target_model="next"
    )
    for project in (WEB, APP, THEIRS):
        for tier in range(3):
            fits = project is not WEB and tier != 1
            assert answered(route, principal=of(project, tier)) == ("next" if fits else "qwen")


def test_any_of_the_flags_of_a_caller() -> None:
    route = RouteConfig(flags=("beta", "new"), target_model="next")
    for flags, model in (((), "qwen"), (("old",), "qwen"), (("new", "old"), "next")):
        assert answered(route, principal=Principal(flags=frozenset(flags))) == model


def test_the_first_that_fits_decides_and_no_other_is_looked_at() -> None:
    routed = models(
        RouteConfig(name="stays", model="qwen", headers={"x-keep": "*"}, target_model="qwen"),
        RouteConfig(model="qwen", target_model="next"),
        RouteConfig(name="back", model="next", target_model="qwen"),
    )
    told = {
        (asked, kept): routed.resolve_target(asked, Principal(), {b"x-keep": b""} if kept else {})
        for asked in ("qwen", "next")
        for kept in (False, True)
    }
    names = {way: (target.pool.model, target.route_name) for way, target in told.items()}
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
def test_any_routes_lead_where_reading_them_in_order_leads(
    rules: list[tuple[str | None, dict[str, str] | None, str]],
    asked: str,
    headers: dict[bytes, bytes],
) -> None:
    own = {"qwen": "qwen", "default": "qwen", "next": "next", "latest": "next"}
    expected = own[asked], ""
    for place, (model, wanted, to) in enumerate(rules):
        known = model is None or own[model] == own[asked]
        shown = {name: headers.get(name.encode(), b"").decode() for name in wanted or {}}
        if known and all(
            shown[name] and value in {"*", shown[name]} for name, value in (wanted or {}).items()
        ):
            expected = own[to], f"routes[{place}]"
            break
    routes = [
        RouteConfig(model=model, headers=wanted, target_model=to) for model, wanted, to in rules
    ]
    found = models(*routes).resolve_target(asked, Principal(), headers)
    assert (found.pool.model, found.route_name) == expected


def test_leave_is_for_what_is_asked_for() -> None:
    routed = models(RouteConfig(model="qwen", target_model="next"))
    scoped = Principal(allowed_models=frozenset({"qwen"}))
    assert routed.resolve_target("default", scoped, {}).pool.model == "next"
    assert {card.id for card in routed.list_models(scoped).data} == {"qwen", "default"}
    with pytest.raises(ApiError) as refused:
        routed.resolve_target("next", scoped, {})
    assert refused.value.code == "model_not_allowed"
    with pytest.raises(ApiError) as refused:
        routed.resolve_target("qwen", Principal(allowed_models=frozenset({"next"})), {})
    assert refused.value.code == "model_not_allowed"
    with pytest.raises(ApiError) as refused:
        routed.resolve_target("nothing", Principal(), {})
    assert refused.value.code == "model_not_found"


def test_the_log_tells_what_was_asked_for_and_of_tenants_that_are_not_there() -> None:
    with capture_logs() as logs:
        routed = models(RouteConfig(name="beta", tenants=("acme/wbe", "acme"), target_model="next"))
        routed.apply_snapshot(EVERYBODY)
        routed.resolve_target("default", of(WEB), {})
        routed.resolve_target("default", of(THEIRS), {})
        found = Project(id="proj_9", organisation="org_1", name="wbe", created_at=0)
        routed.apply_snapshot(AccountSnapshot(organisations=(ACME,), projects=(found,)))
        routed.apply_snapshot(EVERYBODY)
    unknown = {
        "event": "unknown_tenant_in_config",
        "routes": {"beta": ("acme/wbe",)},
        "log_level": "warning",
    }
    told = {
        "event": "request_routed",
        "requested_model": "default",
        "model": "next",
        "route": "beta",
        "log_level": "info",
    }
    assert logs == [unknown, told, unknown]


def test_the_log_tells_of_tenants_that_are_not_there_once_and_from_the_beginning() -> None:
    with capture_logs() as logs:
        routed = models(
            RouteConfig(name="beta", tenants=("acem",), target_model="next"),
            RouteConfig(name="gold", tiers=("premium",), target_model="next"),
        )
        assert [told["routes"] for told in logs] == [{"beta": ("acem",)}]
        routed.apply_snapshot(EVERYBODY)
        routed.apply_snapshot(AccountSnapshot(organisations=(ACME,)))
    assert len(logs) == 1


@pytest.mark.parametrize(
    ("routes", "said"),
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
    ],
)
def test_what_no_route_can_mean_is_refused_by_name(tmp_path: Path, routes: str, said: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"{FILE}routes: {routes}")
    with pytest.raises(ValueError, match=f"gateway.yaml: .*{re.escape(said)}"):
        load_config(path)


@pytest.mark.parametrize("of_accounts", ["tenants: [acme]", "tiers: [premium]", "flags: [new]"])
def test_routes_by_accounts_need_a_store(tmp_path: Path, of_accounts: str) -> None:
    path = tmp_path / "gateway.yaml"
    route = f"routes: [{{{of_accounts}, target_model: next}}]"
    path.write_text(FILE + route)
    assert load_config(path).routes[0].target_model == "next"
    path.write_text(FILE.replace("store: {}", "") + route)
    with pytest.raises(ValueError, match="Add `store`"):
        load_config(path)


def test_the_log_tells_of_limits_and_prices_of_models_that_are_not_there() -> None:
    def priced(*names: str) -> AccountSnapshot:
        prices = (Price(model=name, input=1, cached_input=1, output=1) for name in names)
        return AccountSnapshot(prices=tuple(prices))

    with capture_logs() as logs:
        served = models()
        served.apply_snapshot(priced("qwen", "latest", "qwne"))
        served.apply_snapshot(priced("qwne"))
        limit = Limit(
            id="lim_1", owner_kind="key", owner="key_1", unit="requests", amount=1, model="old"
        )
        served.apply_snapshot(msgspec.structs.replace(priced("qwne"), limits=(limit,)))
    unknown = [(told["event"], told["models"], told["count"]) for told in logs]
    event = "unknown_model_in_limits_or_prices"
    assert unknown == [(event, ["qwne"], 1), (event, ["old", "qwne"], 2)]
