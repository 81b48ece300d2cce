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
from argosy.gateway.model_registry.model_entries import build_models, read_models
from argosy.gateway.model_registry.model_router import Models, Target
from argosy.gateway.principal import Caller
from argosy.protocol import ApiError
from argosy.store import Directory, Limit, Organisation, Price, Project

ACME = Organisation(id="org_1", name="acme", created_at=0)
ZETA = Organisation(id="org_2", name="zeta", created_at=0)
GONE = Organisation(id="org_3", name="gone", created_at=0, archived_at=1.0)
WEB = Project(id="proj_1", organisation="org_1", name="web", created_at=0)
APP = Project(id="proj_2", organisation="org_1", name="app", created_at=0)
THEIRS = Project(id="proj_3", organisation="org_2", name="web", created_at=0)
OLD = Project(id="proj_4", organisation="org_1", name="old", created_at=0, archived_at=1.0)
EVERYBODY = Directory(organisations=(ACME, ZETA, GONE), projects=(WEB, APP, THEIRS, OLD))
FILE = """
models:
  - {name: qwen, aliases: [default], replicas: [{url: 'http://a'}]}
  - {name: next, aliases: [latest], replicas: [{url: 'http://b'}]}
store: {}
"""


def models(*routes: RouteConfig) -> Models:
    """Two models, each with an alias, and these routes."""
    configs = [
        ModelConfig(name=name, aliases=(alias,), replicas=[ReplicaConfig(url=f"http://{name}")])
        for name, alias in (("qwen", "default"), ("next", "latest"))
    ]
    config = GatewayConfig(models=configs, routes=list(routes))
    built = build_models(read_models(config), routes)
    built.update(EVERYBODY)
    return built


def of(project: Project, tier: int = 1) -> Caller:
    """Who asks for a project."""
    return Caller(organisation=project.organisation, project=project.id, tier=tier)


def answered(
    route: RouteConfig,
    asked: str = "qwen",
    caller: Caller = Caller(),  # noqa: B008 - immutable
    headers: Mapping[bytes, bytes] = {},
) -> str:
    """The name of the model that answers where there is this route."""
    return models(route).target(asked, caller, headers).pool.model


@pytest.mark.parametrize("named", ["qwen", "default"])
def test_a_model_is_meant_by_all_of_its_names(named: str) -> None:
    moved = models(RouteConfig(model=named, to="latest"))
    for asked in ("qwen", "default"):
        target = moved.target(asked, Caller(), {})
        assert target == Target(moved.target("next", Caller(), {}).pool, "routes[0]")
    assert moved.target("next", Caller(), {}).route == ""
    assert answered(RouteConfig(to="qwen"), "next") == "qwen"  # whatever is asked for


def test_a_request_has_all_headers_with_their_exact_values() -> None:
    route = RouteConfig(headers={"X-Beta": "1", "x-team": "*"}, to="next")
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
    route = RouteConfig(tenants=(tenant,), to="next")
    led = {p for p in (WEB, APP, THEIRS, OLD) if answered(route, caller=of(p)) == "next"}
    assert led == meant
    assert answered(route) == "qwen"  # who is nobody's


def test_any_of_the_tenants_and_of_the_tiers() -> None:
    route = RouteConfig(tenants=("zeta", "acme/app"), tiers=("premium", "free"), to="next")
    for project in (WEB, APP, THEIRS):
        for tier in range(3):
            fits = project is not WEB and tier != 1
            assert answered(route, caller=of(project, tier)) == ("next" if fits else "qwen")


def test_any_of_the_flags_of_a_caller() -> None:
    route = RouteConfig(flags=("beta", "new"), to="next")
    for flags, model in (((), "qwen"), (("old",), "qwen"), (("new", "old"), "next")):
        assert answered(route, caller=Caller(flags=frozenset(flags))) == model


def test_the_first_that_fits_decides_and_no_other_is_looked_at() -> None:
    routed = models(
        RouteConfig(name="stays", model="qwen", headers={"x-keep": "*"}, to="qwen"),
        RouteConfig(model="qwen", to="next"),
        RouteConfig(name="back", model="next", to="qwen"),
    )
    told = {
        (asked, kept): routed.target(asked, Caller(), {b"x-keep": b""} if kept else {})
        for asked in ("qwen", "next")
        for kept in (False, True)
    }
    names = {way: (target.pool.model, target.route) for way, target in told.items()}
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
    routes = [RouteConfig(model=model, headers=wanted, to=to) for model, wanted, to in rules]
    found = models(*routes).target(asked, Caller(), headers)
    assert (found.pool.model, found.route) == expected


def test_leave_is_for_what_is_asked_for() -> None:
    routed = models(RouteConfig(model="qwen", to="next"))
    scoped = Caller(models=frozenset({"qwen"}))
    assert routed.target("default", scoped, {}).pool.model == "next"
    assert {card.id for card in routed.cards(scoped).data} == {"qwen", "default"}
    with pytest.raises(ApiError) as refused:
        routed.target("next", scoped, {})
    assert refused.value.code == "model_not_allowed"
    with pytest.raises(ApiError) as refused:
        routed.target("qwen", Caller(models=frozenset({"next"})), {})
    assert refused.value.code == "model_not_allowed"
    with pytest.raises(ApiError) as refused:
        routed.target("nothing", Caller(), {})
    assert refused.value.code == "model_not_found"


def test_the_log_tells_what_was_asked_for_and_of_tenants_that_are_not_there() -> None:
    with capture_logs() as logs:
        routed = models(RouteConfig(name="beta", tenants=("acme/wbe", "acme"), to="next"))
        routed.update(EVERYBODY)
        routed.target("default", of(WEB), {})
        routed.target("default", of(THEIRS), {})
        found = Project(id="proj_9", organisation="org_1", name="wbe", created_at=0)
        routed.update(Directory(organisations=(ACME,), projects=(found,)))
        routed.update(EVERYBODY)
    unknown = {
        "event": "tenants_unknown",
        "routes": {"beta": ("acme/wbe",)},
        "log_level": "warning",
    }
    told = {
        "event": "routed",
        "asked": "default",
        "model": "next",
        "route": "beta",
        "log_level": "info",
    }
    assert logs == [unknown, told, unknown]


def test_the_log_tells_of_tenants_that_are_not_there_once_and_from_the_beginning() -> None:
    with capture_logs() as logs:
        routed = models(
            RouteConfig(name="beta", tenants=("acem",), to="next"),
            RouteConfig(name="gold", tiers=("premium",), to="next"),
        )
        assert [told["routes"] for told in logs] == [{"beta": ("acem",)}]
        routed.update(EVERYBODY)
        routed.update(Directory(organisations=(ACME,)))
    assert len(logs) == 1


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        ("[{to: qwne}]", "route 'routes[0]': to: 'qwne' is not served here; name one of"),
        ("[{model: old, to: next}]", "model: 'old' is not served here"),
        ("[{to: next}, {name: a, model: x, to: next}]", "route 'a': model: 'x' is not"),
        ("[{name: a, to: next}, {name: a, to: next}]", "the route 'a' is there twice"),
        ("[{name: 'routes[1]', to: next}, {to: next}]", "the route 'routes[1]' is there twice"),
        ("[{model: qwen}]", "missing required field `to` - at `$.routes[0]`"),
        ("[{to: next, headers: {x-a: '1', X-A: '2'}}]", "'x-a' is there twice (case does not"),
        ("[{to: next, headers: {x-a: 1}}]", "Expected `str`, got `int`"),
        ("[{to: next, headers: {'x a': '1'}}]", "regex"),
        ("[{to: next, headers: {x-a: ' 1'}}]", "regex"),
        ("[{to: next, headers: {x-a: é}}]", "regex"),
        ("[{to: next, headers: {}}]", "length >= 1"),
        ("[{to: next, tenants: []}]", "length >= 1"),
        ("[{to: next, tiers: []}]", "length >= 1"),
        ("[{to: next, flags: []}]", "length >= 1"),
        ("[{to: next, tiers: [gold]}]", "Invalid enum value 'gold' - at `$.routes[0].tiers[0]`"),
        ("[{to: next, tenant: [acme]}]", "unknown field `tenant`"),
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
    route = f"routes: [{{{of_accounts}, to: next}}]"
    path.write_text(FILE + route)
    assert load_config(path).routes[0].to == "next"
    path.write_text(FILE.replace("store: {}", "") + route)
    with pytest.raises(ValueError, match="add a store"):
        load_config(path)


def test_the_log_tells_of_limits_and_prices_of_models_that_are_not_there() -> None:
    def priced(*names: str) -> Directory:
        prices = (Price(model=name, input=1, cached_input=1, output=1) for name in names)
        return Directory(prices=tuple(prices))

    with capture_logs() as logs:
        served = models()
        served.update(priced("qwen", "latest", "qwne"))
        served.update(priced("qwne"))
        limit = Limit(
            id="lim_1", owner_kind="key", owner="key_1", unit="requests", amount=1, model="old"
        )
        served.update(msgspec.structs.replace(priced("qwne"), limits=(limit,)))
    unknown = [(told["event"], told["models"], told["count"]) for told in logs]
    event = "models_of_terms_unknown"
    assert unknown == [(event, ["qwne"], 1), (event, ["old", "qwne"], 2)]
