"""Declarations that are sent to a gateway may change some settings only."""

from __future__ import annotations

import re

import pytest

from argosy.deployment import FleetConfig, parse_fleet, parse_remote_change

IN_FORCE = """
fleet: demo
models:
- {name: chat, source: owner/chat}
- {name: code, source: owner/code, replicas: [{url: 'https://api.example.com', api_key_env: KEY}]}
engines: {own: {command: [serve, '{model}', '{port}']}}
pools:
- {name: chat, model: chat}
- name: code
  model: code
  engine: vllm
  launcher: kubernetes
  image: registry/vllm:1
  environment: {HF_TOKEN: {env: HF_TOKEN}}
  options: {trust-remote-code: true, max-model-len: 4096}
kubernetes: {secret_name: tokens}
store: {url: 'sqlite:///argosy.db'}
"""


@pytest.fixture
def old() -> FleetConfig:
    return parse_fleet(IN_FORCE)


@pytest.mark.parametrize(
    ("old_text", "new_text", "setting"),
    [
        ("command: [serve,", "command: [sh, -c,", "engines"),
        ("https://api.example.com", "https://evil.example.com", "models[1].replicas"),
        (
            "- {name: chat, source: owner/chat}",
            "- {name: chat, source: ~/chat}",
            "models[0].source",
        ),
        ("{env: HF_TOKEN}", "{file: /etc/passwd}", "pools[1].environment"),
        ("{env: HF_TOKEN}", "{env: AWS_SECRET_ACCESS_KEY}", "pools[1].environment"),
        ("registry/vllm:1", "evil/vllm:1", "pools[1].image"),
        ("launcher: kubernetes", "launcher: ray", "pools[1].launcher"),
        ("true, max-model-len: 4096", "1", "pools[1].options.trust-remote-code"),
        ("4096}", "4096, chat-template: /etc/passwd}", "pools[1].options.chat-template"),
        ("4096}", "4096, enable-x: true}", "pools[1].options.enable-x"),
        ("source: owner/code", "source: evil/code", "pools[1].model"),
        ("model: chat}", "model: chat, options: {trust_remote_code: true}}", "pools[0].options"),
        ("model: chat}", "model: chat, environment: {LD_PRELOAD: /a}}", "pools[0].environment"),
        ("name: chat, model: chat}", "name: new, model: chat, launcher: ray}", "pools[0].launcher"),
        ("secret_name: tokens", "secret_name: others", "kubernetes"),
        ("argosy.db", "other.db", "store"),
        ("fleet: demo", "auth: {mode: disabled}", "auth"),
        ("fleet: demo", "log_content: true", "log_content"),
        (
            "source: owner/chat",
            f"source: owner/chat, aliases: {[*map(str, range(1000))]}",
            "models",
        ),
    ],
)
def test_command_line_alone_decides_what_machines_run_read_and_trust(
    old: FleetConfig, old_text: str, new_text: str, setting: str
) -> None:
    changed = IN_FORCE.replace(old_text, new_text)
    assert changed != IN_FORCE
    with pytest.raises(ValueError, match=rf"^sent: line \d+: {re.escape(setting)}"):
        parse_remote_change(changed, "sent", old)


def test_models_pools_and_limits_may_change(old: FleetConfig) -> None:
    changed = IN_FORCE.replace("fleet: demo", "timeouts: {connect_timeout_s: 1}\ngateways: 2")
    changed = changed.replace("source: owner/chat", "source: /models/chat, aliases: [best]")
    changed = changed.replace("max-model-len: 4096", "max-num-seqs: 8")
    changed = changed.replace(
        "pools:\n- {name: chat,",
        "pools:\n- {name: second, model: chat, launcher: kubernetes, image: 'registry/vllm:1'}\n"
        "- {name: chat, replicas: 3, options: {max_seqs: 4, quantize: int8},",
    )
    config = parse_remote_change(changed, "sent", old)
    assert (config.fleet, config.gateways, config.models[0].source) == ("demo", 2, "/models/chat")
    assert [pool.name for pool in config.pools] == ["second", "chat", "code"]


def test_fleet_without_pools_gets_none_that_it_never_had(old: FleetConfig) -> None:
    down = parse_fleet("models: [{name: chat, source: owner/chat}]\nfleet: demo\ngateways: 0")
    with pytest.raises(ValueError, match=r"pools\[0\].launcher"):
        parse_remote_change(
            "models: [{name: chat, source: a/b}]\ngateways: 0\npools: [{name: a, model: chat}]",
            "sent",
            down,
        )
    emptied = "models: [{name: chat, source: owner/chat}]\ngateways: 0\n"
    with pytest.raises(ValueError, match="store: it decides"):
        parse_remote_change(emptied, "sent", old)
