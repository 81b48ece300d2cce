"""Model routes and traffic: conditions, order, shares, stickiness and fallbacks of models that answer for others."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from argosy.deployment import (
    ClassifierConfig,
    DeclaredFlag,
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    RequestSetting,
    RouteConfig,
    TrafficTarget,
)
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.model_registry.model_router import ModelRouter, RouteTarget
from argosy.gateway.pool import Pool
from argosy.gateway.principal import Principal
from argosy.gateway.request_context import GENERATE
from argosy.gateway.request_fields import parse_request_fields
from argosy.policy.traffic import (
    FEATURES,
    ClassifiedModel,
    CurvePoint,
    DailyWindow,
    FeatureFlag,
    ModelCard,
    PromptClassifier,
)
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, Adapter, Limit, Organisation, Price, Project

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


@pytest.mark.parametrize(
    ("conditions", "matching"),
    [
        ({"min_prompt_tokens": 1000}, {"long"}),
        ({"max_prompt_tokens": 999}, {"short", "tools", "picture", "german"}),
        ({"tools": True}, {"tools"}),
        ({"tools": False, "max_prompt_tokens": 999}, {"short", "picture", "german"}),
        ({"media": True}, {"picture"}),
        ({"media": False, "tools": False}, {"short", "long", "german"}),
        ({"languages": ("de", "fr")}, {"german"}),
    ],
)
def test_conditions_of_the_request(conditions: dict[str, Any], matching: set[str]) -> None:
    route = RouteConfig(target_model="next", **conditions)
    message, picture = {"role": "user", "content": "hi"}, {"type": "image_url", "image_url": {}}
    bodies: dict[str, dict[str, Any]] = {
        "short": {"messages": [message], "tools": []},
        "long": {"messages": [{"role": "user", "content": "hi " * 2000}]},
        "tools": {"messages": [message], "tools": [{"type": "function"}]},
        "picture": {"messages": [{"role": "user", "content": [picture]}]},
        "german": {
            "messages": [
                {"role": "user", "content": "Wie geht es dir?"},
                message | {"role": "tool"},
            ]
        },
    }
    router = make_router(route)
    for name, body in bodies.items():
        fields = parse_request_fields(msgspec.json.encode(body), "messages")
        target = router.resolve_target("qwen", Principal(), {}, fields)
        assert (target.pool.model == "next") == (name in matching), name
    assert resolve_model(route) == "qwen"  # the fields are unknown


SMALL, LARGE = "sha256:" + "1" * 64, "sha256:" + "2" * 64


def make_classifier(target: str = "quality_share", share: float = 1.0) -> ClassifierConfig:
    """Return a classifier that takes prompts of up to 32 characters for simple, and 3 of 4 with `traffic_share`."""
    model = ClassifiedModel(name="m", quality=1.0, cost=2.0)
    points = [(9.0, 0.0, 0.5), (0.0, 0.25, 1.0), (-9.0, 1.0, 1.0)]
    trained = PromptClassifier(
        features=FEATURES,
        weights=tuple(float(name == "text_length") for name in FEATURES),
        bias=-5.05,
        small=msgspec.structs.replace(model, digest=SMALL, cost=1.0),
        large=msgspec.structs.replace(model, digest=LARGE),
        curve=tuple(
            CurvePoint(
                threshold=score, traffic_share=share, quality_share=quality, cost_share=share
            )
            for score, share, quality in points
        ),
        card=ModelCard(
            data_digest="",
            training_rows=1,
            held_out_rows=1,
            held_out_by="prompt",
            auc=1.0,
            held_out=(),
        ),
    )
    return msgspec.convert(
        {"trained": msgspec.to_builtins(trained), target: share}, ClassifierConfig
    )


def ask(
    router: ModelRouter, text: str, *, failed: tuple[str, ...] = (), **more: object
) -> RouteTarget:
    """Return the target of a chat to `next` while all models are ready."""
    body = {"messages": [{"role": "user", "content": text}], **more}
    fields = parse_request_fields(msgspec.json.encode(body), "messages")
    with mock.patch.object(Pool, "expected_wait_s", return_value=0.0):
        find = router.find_target if failed else router.resolve_target
        return find("next", Principal(), {}, fields, "", failed)


def test_prompts_that_a_classifier_takes_for_simple_go_to_the_smaller_model() -> None:
    """Tools, media, schemas, the context, other versions and failures come before the score."""
    route = RouteConfig(
        name="cheap", model="next", target_model="qwen", classifier=make_classifier()
    )
    router, short, long = make_router(route), "What is 1 + 1?", "Prove this theorem. " * 9
    schema = {"type": "json_object"}
    tools = [{"type": "function"}]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "qwen", "score -1.17 is below 0.00"),
        ({"text": long}, "next", "is not below"),
        ({"text": long + "\nThis is simple."}, "next", "is not below"),
        ({"tools": tools}, "next", "tools"),
        ({"response_format": schema}, "next", "schema"),
        ({"messages": picture}, "next", "media"),
        ({"messages": [{"role": "system", "content": "x"}]}, "next", "no text"),
        ({"max_tokens": 5000}, "next", "context of qwen"),
        ({"failed": ("qwen",)}, "next", "qwen could not answer"),
    ]
    with mock.patch.object(Pool, "max_model_len", 4096):
        for more, model, reason in cases:
            target = ask(router, **{"text": short} | more)
            assert target.pool.model == model, more
            assert reason in target.reason, more
            assert target.has_fallbacks == (model == "qwen")
    for digest, model in ((None, "qwen"), (LARGE, "next")):
        with mock.patch.object(Pool, "model_digest", digest):
            assert ask(router, short).pool.model == model
    assert (
        router.find_target("next", Principal(), {}).pool.model == "next"
    )  # not ready, and no fields


def test_dry_run_reports_and_changes_nothing() -> None:
    routes = [
        RouteConfig(
            name="cheap",
            model="next",
            target_model="qwen",
            classifier=make_classifier(),
            dry_run=True,
        ),
        RouteConfig(name="all", model="next", target_model="qwen", dry_run=True),
    ]
    target = ask(make_router(*routes), "What is 1 + 1?")
    assert (target.pool.model, target.route_name) == ("next", "")
    rows = [decision.to_dict() for _, decision in target.decisions]
    assert [(row["route"], row["model"], row["decision"], row["dry_run"]) for row in rows] == [
        ("cheap", "qwen", "simple", True),
        ("all", "qwen", "simple", True),
    ]
    assert target.reason.startswith("route cheap (dry run): score -1.17")


@pytest.mark.parametrize("more", [{}, {"session_id": "s"}])
def test_conversation_that_was_not_simple_stays_with_the_larger_model(more: dict[str, Any]) -> None:
    route = RouteConfig(
        name="cheap", model="next", target_model="qwen", classifier=make_classifier(), sticky_s=60.0
    )
    router, turns = make_router(route), [{"role": "user", "content": "Hello."}]
    expected = ["qwen", "next", "next"]
    for text, model in zip(
        ["And you?", "Prove this theorem. " * 9, "Thanks."], expected, strict=True
    ):
        turns.append({"role": "user", "content": text})
        assert ask(router, "", messages=turns, **more).pool.model == model, text
    assert "stays with next" in ask(router, "", messages=turns, **more).reason
    assert ask(router, "Thanks.").pool.model == "qwen"  # another conversation
    with mock.patch("time.monotonic", return_value=time.monotonic() + 100):
        assert ask(router, "", messages=turns, **more).pool.model == "qwen"


@pytest.mark.parametrize(("target", "share"), [("traffic_share", 0.25), ("cost_share", 0.625)])
def test_share_of_live_traffic_is_kept(target: str, share: float) -> None:
    """All prompts are longer than those of the training, so that the threshold of the training sends none away."""
    route = RouteConfig(
        name="cheap",
        model="next",
        target_model="qwen",
        classifier=make_classifier(target, share),
    )
    router, rng = make_router(route), Random(1)
    texts = ["Prove this theorem. " * rng.randint(9, 90) for _ in range(1200)]
    models = [ask(router, text).pool.model for text in texts]
    assert models[:5] == ["next"] * 5
    assert models[600:].count("next") / 600 == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize("served", [None, "sha256:" + "1" * 64, "sha256:" + "2" * 64])
def test_an_adapter_is_served_on_the_version_of_its_base_only(
    served: str | None,
) -> None:
    base = "sha256:" + "1" * 64
    adapter = Adapter(
        id="adp_1",
        organisation=None,
        project=None,
        name="sql",
        base_model="qwen",
        digest="sha256:" + "3" * 64,
        base_digest=base,
        created_at=0,
    )
    router = make_router()
    router.apply_snapshot(msgspec.structs.replace(SNAPSHOT, adapters=(adapter,)))
    with mock.patch.object(Pool, "model_digest", served):
        if served in {None, base}:  # an unknown version may be the right one
            assert router.resolve_target("sql", Principal(), {}).adapter == adapter
            return
        with pytest.raises(ApiError, match=f"made for {base}") as refusal:
            router.resolve_target("sql", Principal(), {})
    assert (refusal.value.status, refusal.value.code) == (409, "other_base_model")


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "qwen", "latest"]),
            st.dictionaries(st.sampled_from(["A", "b"]), st.sampled_from("12*"), min_size=1)
            | st.none(),
            st.sampled_from(["default", "next"]),
        ),
        max_size=5,
    ),
    st.sampled_from(["qwen", "default", "next", "latest"]),
    st.dictionaries(
        st.sampled_from([b"a", b"b", b"host"]), st.sampled_from([b"1", b"2", b"1, 1", b""])
    ),
)
def test_routes_are_evaluated_in_order(
    rules: list[tuple[str | None, dict[str, str] | None, str]],
    requested_model: str,
    headers: dict[bytes, bytes],
) -> None:
    canonical = {"qwen": "qwen", "default": "qwen", "next": "next", "latest": "next"}
    expected = canonical[requested_model], ""
    present = {name.decode(): value.decode() for name, value in headers.items()}
    for index, (model, conditions, target) in enumerate(rules):
        model_matches = model is None or canonical[model] == canonical[requested_model]
        values = {name: present.get(name.lower()) for name in conditions or {}}
        if model_matches and all(
            values[name] is not None and value in {"*", values[name]}
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


@pytest.mark.parametrize(
    ("allowed", "found"),
    [(["qwen"], "qwen"), (["latest"], "latest"), (["next", "latest"], "next"), (None, None), ([], None)],
)  # fmt: skip
def test_request_without_a_model_is_for_the_only_one_that_its_sender_may_use(
    allowed: list[str] | None, found: str | None
) -> None:
    principal = Principal(allowed_models=None if allowed is None else frozenset(allowed))
    if found is not None:
        assert make_router().find_only_model(principal, GENERATE) == found
        return
    listed = "no model that you may use" if allowed == [] else "2 models: qwen, next"
    with pytest.raises(ApiError, match=listed) as error:
        make_router().find_only_model(principal, GENERATE)
    assert (error.value.status, error.value.param) == (400, "model")


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
        "rules": {"beta": ("acme/wbe",)},
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


# --- weights, users, times and fallbacks ---------------------------------------------------------

USERS = range(2_000)


def make_chat_router(
    *routes: RequestSetting,
    weights: Mapping[str, float],
    fallback_models: tuple[str, ...] = (),
    max_wait_s: float | None = None,
) -> ModelRouter:
    """Return a router of `chat`, for which the models in `weights` answer, and the models `a`, `b` and `small`."""
    traffic = tuple(TrafficTarget(model=name, weight=weight) for name, weight in weights.items())
    models = [
        ModelConfig(
            name=name,
            replicas=[ReplicaConfig(url=f"http://{name}", max_requests=2)],
        )
        for name in ("chat", "a", "b", "small")
    ]
    models[0] = msgspec.structs.replace(
        models[0], traffic=traffic, fallback_models=fallback_models, max_wait_s=max_wait_s
    )
    return build_model_router(build_model_entries(GatewayConfig(models=models)), routes)


def resolve_chat(
    router: ModelRouter,
    user: object = None,
    *,
    headers: Mapping[bytes, bytes] = {},
    request_id: str = "",
    fields: Mapping[str, str] = {},
) -> RouteTarget:
    body = {"model": "chat", "prompt": "x", **fields} | ({"user": user} if user else {})
    parsed = parse_request_fields(msgspec.json.encode(body), "prompt")
    return router.resolve_target("chat", Principal(), headers, parsed, request_id)


def models_of_users(router: ModelRouter) -> list[str]:
    return [resolve_chat(router, f"user {number}").pool.model for number in USERS]


def test_reason_names_the_weight_and_the_route_before_it() -> None:
    by_header = RouteConfig(name="beta", model="a", headers={"x-beta": "1"}, target_model="chat")
    router = make_chat_router(by_header, weights={"a": 0, "b": 4, "chat": 0})
    target = resolve_chat(router)
    assert (target.route_name, target.reason) == ("traffic", "weight 4 of 4")
    routed = router.resolve_target("a", Principal(), {b"x-beta": b"1"})
    assert (routed.pool.model, routed.route_name) == ("b", "beta")
    assert routed.reason == "route beta; weight 4 of 4"


def test_user_then_session_then_request_stays_at_one_model() -> None:
    router = make_chat_router(weights={"a": 1, "b": 1})

    def models(fields: Mapping[str, str], headers: Mapping[bytes, bytes] = {}) -> set[str]:
        """Models of requests with different ids."""
        return {
            resolve_chat(router, headers=headers, request_id=f"r{number}", fields=fields).pool.model
            for number in range(30)
        }

    assert len(models({})) == 2
    for name in ("user", "safety_identifier", "session_id"):
        assert len(models({name: "x"})) == 1
    assert models({}, {b"x-session-affinity": b"x"}) == models({"session_id": "x"})
    assert resolve_chat(router, user={"not": "a text"}).route_name == "traffic"


def test_routes_may_depend_on_the_time_and_on_a_part_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = {"fractional": [["on", 25], ["off", 75]]}
    flag = FeatureFlag(variants={"on": True, "off": False}, default_variant="off", targeting=shares)
    night = DailyWindow(start_minute=0, end_minute=60)
    route = RouteConfig(flag="new", windows=(night,), target_model="b")
    router = make_chat_router(route, DeclaredFlag("new", flag), weights={})
    for now, share in ((1_800.0, 0.25), (7_200.0, 0.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        counts = Counter(models_of_users(router))
        assert counts["b"] / len(USERS) == pytest.approx(share, abs=0.03)


def test_fallback_answers_for_models_that_are_down_or_have_a_long_queue() -> None:
    router = make_chat_router(weights={}, fallback_models=("a", "small"), max_wait_s=2.0)
    chat, a, small = (next(p for p in router.pools if p.model == n) for n in ("chat", "a", "small"))
    for pool in router.pools:
        for replica in pool.replicas.values():
            replica.health.on_detected(0.0)
    own = RouteTarget(chat, has_fallbacks=True)
    assert resolve_chat(router) == own
    (replica,) = chat.replicas.values()
    replica.load.in_flight, replica.load.inter_token_s, chat.active_requests = 2, 0.01, 5
    skipped = "chat has 5.1 s of queue, at most 2 s"  # 4 requests of 256 tokens, 2 at a time
    assert resolve_chat(router) == RouteTarget(a, "fallback_models", skipped, None, chat, True)
    for replica in a.replicas.values():
        replica.health.on_unreachable(0.0)
    skipped += "; a has no ready replica"
    assert resolve_chat(router) == RouteTarget(small, "fallback_models", skipped, None, chat, True)
    for replica in small.replicas.values():
        replica.health.on_unreachable(0.0)
    assert resolve_chat(router) == own._replace(reason=f"{skipped}; small has no ready replica")


@given(st.text("ab*", min_size=1, max_size=8), st.text("ab", min_size=1, max_size=12))
@example("*", "a" * 201)
@example("a*b*b", "a" * 200_000)
def test_each_wildcard_of_an_alias_stands_for_any_text_of_a_name(alias: str, name: str) -> None:
    models = [ModelConfig(name="m", aliases=(alias,), replicas=[ReplicaConfig(url="http://m")])]
    router = build_model_router(build_model_entries(GatewayConfig(models=models)), ())
    pattern = ".*".join(map(re.escape, alias.split("*")))
    matches = name == alias or ("*" in alias and re.fullmatch(pattern, name[:200]) is not None)
    try:
        found = router.find_target(name, principal_of(WEB), {}).pool.model
    except ApiError as error:
        found = error.code
    assert found == ("m" if matches and len(name) <= 200 else "model_not_found")
