"""Traffic settings of models: shares, stickiness, conditions on users and times, fallbacks, and invalid settings."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from argosy.deployment import (
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    RouteConfig,
    TrafficTarget,
    load_config,
)
from argosy.gateway.model_registry.model_entries import build_model_entries, build_model_router
from argosy.gateway.model_registry.model_router import ModelRouter, RouteTarget
from argosy.gateway.principal import Principal
from argosy.gateway.request_fields import parse_request_fields
from argosy.policy.traffic import DailyWindow, PercentageFlag

USERS = range(2_000)


def make_router(
    *routes: RouteConfig,
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


def resolve(
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
    return [resolve(router, f"user {number}").pool.model for number in USERS]


def test_shares_are_the_declared_ones_and_a_growing_one_moves_nobody_back() -> None:
    before = models_of_users(make_router(weights={"a": 90, "b": 10}))
    after = models_of_users(make_router(weights={"a": 70, "b": 30}))
    for models, share in ((before, 0.1), (after, 0.3)):
        assert Counter(models)["b"] / len(USERS) == pytest.approx(share, abs=0.02)
    assert {new for old, new in zip(before, after, strict=True) if old == "b"} == {"b"}


def test_reason_names_the_weight_and_the_route_before_it() -> None:
    by_header = RouteConfig(name="beta", model="a", headers={"x-beta": "1"}, target_model="chat")
    router = make_router(by_header, weights={"a": 0, "b": 4, "chat": 0})
    target = resolve(router)
    assert (target.route_name, target.reason) == ("traffic", "weight 4 of 4")
    routed = router.resolve_target("a", Principal(), {b"x-beta": b"1"})
    assert (routed.pool.model, routed.route_name) == ("b", "beta")
    assert routed.reason == "route beta; weight 4 of 4"


def test_user_then_session_then_request_stays_at_one_model() -> None:
    router = make_router(weights={"a": 1, "b": 1})

    def models(fields: Mapping[str, str], headers: Mapping[bytes, bytes] = {}) -> set[str]:
        """Models of requests with different ids."""
        return {
            resolve(router, headers=headers, request_id=f"r{number}", fields=fields).pool.model
            for number in range(30)
        }

    assert len(models({})) == 2
    for name in ("user", "safety_identifier", "session_id"):
        assert len(models({name: "x"})) == 1
    assert models({}, {b"x-session-affinity": b"x"}) == models({"session_id": "x"})
    assert resolve(router, user={"not": "a text"}).route_name == "traffic"


def test_routes_may_depend_on_the_time_and_on_a_part_of_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flag = PercentageFlag(name="new", share=0.25, unit="user")
    night = DailyWindow(start_minute=0, end_minute=60)
    route = RouteConfig(percentage_flag=flag, windows=(night,), target_model="b")
    router = make_router(route, weights={})
    for now, share in ((1_800.0, 0.25), (7_200.0, 0.0)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        counts = Counter(models_of_users(router))
        assert counts["b"] / len(USERS) == pytest.approx(share, abs=0.02)


def test_fallback_answers_for_models_that_are_down_or_have_a_long_queue() -> None:
    router = make_router(weights={}, fallback_models=("a", "small"), max_wait_s=2.0)
    chat, a, small = (next(p for p in router.pools if p.model == n) for n in ("chat", "a", "small"))
    for pool in router.pools:
        for replica in pool.replicas.values():
            replica.health.on_detected(0.0)
    assert resolve(router) == RouteTarget(chat)
    (replica,) = chat.replicas.values()
    replica.load.in_flight, replica.load.inter_token_s, chat.active_requests = 2, 0.01, 5
    skipped = "chat has 5.1 s of queue, at most 2 s"  # 4 requests of 256 tokens, 2 at a time
    assert resolve(router) == RouteTarget(a, "fallback_models", skipped, passed_over=chat)
    for replica in a.replicas.values():
        replica.health.on_unreachable(0.0)
    skipped += "; a has no ready replica"
    assert resolve(router) == RouteTarget(small, "fallback_models", skipped, passed_over=chat)
    for replica in small.replicas.values():
        replica.health.on_unreachable(0.0)
    assert resolve(router) == RouteTarget(chat, "", f"{skipped}; small has no ready replica")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("traffic: [{model: nobody}]", "traffic: no other model has the name 'nobody'"),
        ("traffic: [{model: split}]", "the model 'split' divides its own traffic"),
        ("traffic: [{model: a, weight: 0}]", "give at least one pool a positive weight"),
        ("traffic: [{model: a}, {model: a}]", "named twice"),
        (
            "fallback_models: [nobody], replicas: [{url: 'http://c'}]",
            "fallback_models: no other model",
        ),
        ("max_wait_s: 5, replicas: [{url: 'http://c'}]", "Add `fallback_models`"),
        ("traffic: [{model: chat}]", "'chat' has no replicas"),
    ],
)
def test_invalid_traffic_is_rejected(tmp_path: Path, settings: str, message: str) -> None:
    path = tmp_path / "gateway.yaml"
    models = [
        "{name: a, replicas: [{url: 'http://a'}]}",
        "{name: split, traffic: [{model: a}]}",
        f"{{name: chat, {settings}}}",
    ]
    path.write_text(f"models: [{', '.join(models)}]")
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(path)
