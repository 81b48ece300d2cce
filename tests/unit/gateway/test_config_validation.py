"""Validation of the gateway's configuration file: each error names the file, the setting and a remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, load_config
from argosy.gateway import GatewayServer

ROUTED_MODELS = """
models:
  - {name: qwen, aliases: [default], replicas: [{url: 'http://a'}]}
  - {name: next, aliases: [latest], replicas: [{url: 'http://b'}]}
"""
DIVIDED_MODELS = """
models:
  - {name: a, replicas: [{url: 'http://a'}]}
  - {name: split, traffic: [{model: a}]}
"""
MODELS = "models: [{name: m, replicas: [{url: 'http://a'}]}]\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


@pytest.mark.parametrize(
    "setting",
    [
        "limits: {redis: 'redis://localhost'}",
        "auth: {mode: required}",
        *(
            f"routes: [{{{condition}, target_model: m}}]"
            for condition in ("tenants: [acme]", "tiers: [premium]", "flags: [new]")
        ),
    ],
)
def test_setting_without_required_store_is_rejected(path: Path, setting: str) -> None:
    path.write_text(MODELS + setting)
    with pytest.raises(ValueError, match="Add `store`"):
        load_config(path)
    path.write_text(f"{MODELS}{setting}\nstore: {{}}")
    assert load_config(path).store is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "routes: [{target_model: qwne}]",
            "route 'routes[0]': target_model: no model has the name 'qwne'. Use one of",
        ),
        ("routes: [{model: old, target_model: next}]", "model: no model has the name 'old'"),
        ("routes: [{target_model: next, refuse: no}]", "give one of target_model"),
        (
            "routes: [{refuse: no, cascade: {min_mean_logprob: -1}}]",
            "Add `target_model`, or remove them",
        ),
        ("routes: [{target_model: next, sticky_s: 9}]", "Add `classifier` or `cascade`"),
        ("routes: [{target_model: next, cascade: {after_tokens: 9}}]", "min_token_logprob"),
        ("routes: [{target_model: next, languages: [xx]}]", "Invalid"),
        ("routes: [{target_model: next, classifier: {file: x}}]", "one of quality_share"),
        (
            "routes: [{target_model: next, classifier: {cost_share: 1}}]",
            "the file of the classifier",
        ),
        (
            "routes: [{target_model: next}, {name: a, model: x, target_model: next}]",
            "route 'a': model: no model has the name 'x'",
        ),
        (
            "routes: [{name: a, target_model: next}, {name: a, target_model: next}]",
            "route 'a' is defined twice",
        ),
        (
            "routes: [{name: 'routes[1]', target_model: next}, {target_model: next}]",
            "route 'routes[1]' is defined twice",
        ),
        ("routes: [{model: qwen}]", "give one of target_model, max_cached_age_s and refuse"),
        (
            "routes: [{target_model: next, headers: {x-a: '1', X-A: '2'}}]",
            "'x-a' is defined twice (names are case-ins",
        ),
        (
            "routes: [{target_model: next, headers: {x-a: 1}}]",
            "Expected text, got a whole number - at",
        ),
        ("routes: [{target_model: next, headers: {'x a': '1'}}]", "Expected text such as"),
        ("routes: [{target_model: next, headers: {x-a: ' 1'}}]", "Expected text such as"),
        ("routes: [{target_model: next, headers: {x-a: é}}]", "Expected text such as"),
        ("routes: [{target_model: next, headers: {}}]", "length >= 1"),
        ("routes: [{target_model: next, tenants: []}]", "length >= 1"),
        ("routes: [{target_model: next, tiers: []}]", "length >= 1"),
        ("routes: [{target_model: next, flags: []}]", "length >= 1"),
        (
            "routes: [{target_model: next, tiers: [gold]}]",
            "Invalid enum value 'gold' - at `$.routes[0].tiers[0]`",
        ),
        ("routes: [{target_model: next, tenant: [acme]}]", "unknown field `tenant`"),
        ("routes: [{target_model: next, windows: []}]", "length >= 1"),
        (
            "routes: [{target_model: next, windows: [{start_minute: 0, end_minute: 1, day: 1}]}]",
            "unknown field `day`",
        ),
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
def test_invalid_route_or_traffic_is_rejected_by_name(
    path: Path, settings: str, message: str
) -> None:
    is_route = settings.startswith("routes")
    model = f"{DIVIDED_MODELS}  - {{name: chat, {settings}}}"
    path.write_text(f"{ROUTED_MODELS}store: {{}}\n{settings}" if is_route else model)
    with pytest.raises(ValueError, match=f"gateway.yaml: .*{re.escape(message)}"):
        load_config(path)


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ("advertise_url: 10.0.0.1:8000", "advertise_url: .* write http://HOST:PORT"),
        ("port: 99999", r"<= 65535 - at `\$.port`"),
        ("body_limit_bytes: -1", r">= 1 - at `\$.body_limit_bytes`"),
        ("drain_deadline_s: .nan", r">= 0.0 - at `\$.drain_deadline_s`"),
        ("colour: red", "unknown field `colour`"),
        (
            "models: [{name: m, replicas: [{url: 'ftp://a'}]}]",
            r"line 1: models\[0\].replicas\[0\].url: 'ftp://a' is not",
        ),
        ("models: [{name: m, replicas: [{url: 'http://a'}, {url: 'http://a'}]}]", "'http://a' is"),
        (
            "models: [{name: m, replicas: [{url: 'http://a', name: x}, {url: 'http://b', name: x}]}]",
            "model 'm', replica 'x' is defined twice",
        ),
        (
            "models: [{name: m, aliases: [m], replicas: [{url: 'http://a'}]}]",
            "model name 'm' is defined twice",
        ),
        (
            "auth:\n  mode: required\n  mode: 'off'",
            "'mode' is defined twice, in line 3 and in line 4",
        ),
        ("port: 1\nport: 2", "'port' is defined twice, in line 2 and in line 3. Keep one"),
        ("models: [{name: m, replicas: [{url: x, url: y}]}]", "'url' is defined twice"),
        ("prot: 1", "unknown field `prot`; did you mean `port`"),
        ("auth: {jwt: {audience: [a], isuer: x}}", r"auth.jwt`; did you mean `issuer`"),
        ("models: [{name: m, replicas: [{url: x, tls: {caa: x}}]}]", "did you mean `ca`"),
        ("log_level: loud", "Invalid enum value 'loud' .*; write debug, error, info or warning"),
        ("auth: {jwt: {audience: [a], algorithms: [HS256]}}", "write ES256, ES384, .* or RS512"),
        ("models: [{name: m, replicas: [{url: x, kind: vlm}]}]", "; write .*vllm"),
        ("port: 2026-12-24", "Expected a whole number"),
        ("models: []", "no model is configured. Add `models`"),
        ("port: [", "parsing"),
        (
            "models: [{name: '', replicas: [{url: x}]}]",
            r"Expected text such as .* at `\$.models\[0\].name`",
        ),
        ('models: [{name: "a\\tb", replicas: [{url: x}]}]', "Expected text such as .*name"),
        (
            "models: [{name: m, aliases: [' a'], replicas: [{url: x}]}]",
            "Expected text such as .*aliases",
        ),
        (
            "models: [{name: m, replicas: [{url: 'http://x', tls: {ca: y}}]}]",
            "tls needs an https URL",
        ),
        (
            "models: [{name: m, replicas: [{url: 'http://x', discover: dns, proxy: true}]}]",
            "Remove proxy or discover",
        ),
        (
            "models: [{name: m, replicas: [{url: 'http://x', kind: tgi, priority_scheduling: true}]}]",
            "priority_scheduling is only supported for kind vllm or sglang. Remove it",
        ),
        ("explain: {max_requests: -1}", ">= 0"),
        ("explain: {retention_s: .nan}", ">= 0"),
        ("auth: {jwt: {audience: ['']}}", "length >= 1"),
        ("store: {keep_usage_days: 9999999}", "<= 36500"),
        pytest.param("store: " + "[" * 1000, "the settings are nested too deeply", id="nested"),
    ],
)
def test_invalid_settings_are_rejected_with_name_of_file(
    path: Path, settings: str, pattern: str
) -> None:
    models = "" if settings.startswith("models") else MODELS
    path.write_text(models + settings)
    with pytest.raises(ValueError, match=f"gateway.yaml: .*{pattern}"):
        load_config(path)


def test_missing_file_is_named_in_error(path: Path) -> None:
    with pytest.raises(ValueError, match=r"gateway\.yaml cannot be read: No such file"):
        load_config(path)


def test_dates_and_booleans_in_text_settings_stay_text(path: Path) -> None:
    models = "models: [{name: 2026-11-22, aliases: [on], replicas: [{url: 'http://a', stream_usage: false}]}]"
    path.write_text(f"{models}\nfast_path: off\nauth: {{mode: disabled}}")
    config = load_config(path)
    (model,) = config.models
    assert (model.name, model.aliases) == ("2026-11-22", ("on",))
    assert (config.fast_path, config.auth.mode) == ("off", "disabled")
    assert not model.replicas[0].stream_usage


@pytest.mark.parametrize("content", ["", "# nothing yet", "---"])
def test_empty_file_lacks_models(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(ValueError, match=r"no model is configured\. Add `models`"):
        load_config(path)


@pytest.mark.parametrize(
    ("replica", "pattern"),
    [
        ({"url": "http://user:secret@x"}, "URL of x has a user, a query"),
        ({"url": "http://x?key=secret"}, "URL of x has a user, a query"),
        ({"url": "http://x/a b"}, "or a space"),
        ({"url": "http://x y"}, "or a space"),
        (
            {"url": "http://x", "headers": {"Content-Length": "5"}},
            r"gateway sets the header .* itself\. Remove it",
        ),
        (
            {"url": "http://x", "headers": {"host": "y"}},
            r"gateway sets the header .* itself\. Remove it",
        ),
    ],
)
def test_invalid_replica_url_or_header_is_rejected_without_secrets(
    replica: dict[str, Any], pattern: str
) -> None:
    config = GatewayConfig(models=[ModelConfig(name="m", replicas=[ReplicaConfig(**replica)])])
    with pytest.raises(ValueError, match=pattern) as caught:
        GatewayServer(config, print)
    assert "secret" not in str(caught.value)
