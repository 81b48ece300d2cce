"""Launch specifications of each engine kind, digests of replicas, and settings of the gateways."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
from tests.support.small_models import write_small_model

from argosy.deployment import (
    FleetConfig,
    PoolConfig,
    SleepConfig,
    build_gateway_config,
    dump_fleet,
    load_fleet,
    parse_fleet,
    replica_digest,
)
from argosy.fleet.launch_spec import build_launch_spec
from argosy.fleet.launchers import LaunchError
from argosy.model_store import open_model_store, pull_model

MODELS = """
models:
  - {name: chat, source: /models/chat, revision: v1}
  - {name: hub, source: owner/name}
"""
DIGEST = "sha256:" + "a" * 64


def parse_pool(text: str) -> tuple[FleetConfig, PoolConfig]:
    other = "hub" if "model: chat" in text else "chat"
    config = parse_fleet(MODELS + f"pools: [{text}, {{name: other, model: {other}}}]")
    return config, config.pools[0]


def command_of(text: str) -> str:
    config, pool = parse_pool(text)
    command = " ".join(build_launch_spec(config, pool, 1, 0).command)
    return command.replace(f"{sys.executable} -P -m argosy.cli", "PYTHON")


COMMANDS = {
    """{name: p, model: chat, drain_deadline_s: 5, options: {max_seqs: 4, prefix_cache: false, kv_memory: 1GiB,
    override_generation_config: {top_p: 0.5}, speculative_config: {num_speculative_tokens: 4}}}""": """PYTHON
    replica --uds {socket} --options {"model":"/models/chat","revision":"v1","served_model_name":["chat"],"""
    """"drain_deadline":5.0,"kv_memory":"1GiB","""
    """"max_seqs":4,"override_generation_config":{"top_p":0.5},"prefix_cache":false,"""
    """"speculative_config":{"num_speculative_tokens":4}}""",
    "{name: p, model: hub, launcher: ray}": """argosy replica --host {host} --port {port} --options
    {"model":"owner/name","served_model_name":["hub"],"drain_deadline":30.0}""",
    """{name: p, model: chat, engine: vllm, options: {enable_prefix_caching: false, max_num_seqs: 8,
    lora_modules: [a=b, c=d], async_scheduling: true}}""": """vllm serve /models/chat --served-model-name chat
    --shutdown-timeout 30 --revision v1 --host {host} --port {port} --async-scheduling --no-enable-prefix-caching
    --lora-modules a=b c=d --max-num-seqs 8""",
    "{name: p, model: hub, engine: sglang, options: {disable_radix_cache: false, tp: 2}}": """python3 -m
    sglang.launch_server --model-path owner/name --served-model-name hub --host {host} --port {port} --tp 2""",
    "{name: p, model: hub, engine: llama-cpp, options: {mmap: false, lora: [a, b]}}": """llama-server --alias hub
    --hf-repo owner/name --host {host} --port {port} --lora a --lora b --no-mmap""",
}
"""Command line of each pool."""


@pytest.mark.parametrize(("pool", "command"), COMMANDS.items(), ids=range(len(COMMANDS)))
def test_command_line_of_built_in_engine(pool: str, command: str) -> None:
    assert command_of(pool) == " ".join(command.split())


def test_secrets_are_resolved_when_a_replica_starts(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("from-file\n")
    config, pool = parse_pool(
        f"{{name: p, model: hub, environment: {{A: plain, B: {{env: SECRET}}, C: {{file: {secret}}}}}}}"
    )
    spec = build_launch_spec(config, pool, 3, 1, {"SECRET": "from-variable"})
    assert spec.environment == {"A": "plain", "B": "from-variable", "C": "from-file"}
    assert (spec.name, spec.generation, spec.ordinal) == ("p-3-1", 3, 1)
    with pytest.raises(LaunchError, match=r"pool p: B: the environment variable SECRET .* Set it"):
        build_launch_spec(config, pool, 3, 1, {})
    secret.unlink()
    with pytest.raises(LaunchError, match=r"pool p: C: the file .* \(No such file"):
        build_launch_spec(config, pool, 3, 1, {"SECRET": "x"})


def test_each_gateway_has_its_port_and_no_settings_of_the_controller() -> None:
    config, _ = parse_pool("{name: p, model: hub, sleep: {after_s: 60, level: 2}}")
    first, second = build_gateway_config(config), build_gateway_config(config, 1)
    assert (first.port, second.port) == (8000, 8001)
    assert type(first) is not type(config)
    assert not hasattr(first, "pools")
    assert not hasattr(first.models[0], "source")
    assert [model.sleep for model in first.models if model.name == "hub"] == [
        SleepConfig(after_s=60.0, level=2)
    ]
    free = msgspec.structs.replace(config, port=0)
    assert build_gateway_config(free, 1).port == 0


@pytest.mark.parametrize("engine", ["argosy", "vllm"])
def test_stored_model_is_a_digest_for_argosy_and_a_path_for_others(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "store"))
    version = pull_model(open_model_store(), str(write_small_model(tmp_path / "m")), name="o/m")
    file = tmp_path / "fleet.yaml"
    text = "models: [{name: m, source: 'SOURCE'}]\npools: [{name: p, model: m, engine: ENGINE}]\n"
    digests = set()
    for source in ("store:o/m", "store:o/m:candidate", version.digest[:20], version.digest):
        file.write_text(text.replace("SOURCE", source).replace("ENGINE", engine))
        config = load_fleet([file])
        assert parse_fleet(dump_fleet(config)) == config
        command = build_launch_spec(config, config.pools[0], 1, 0).command
        digests.add(replica_digest(config, config.pools[0]))
    assert len(digests) == 1
    if engine == "argosy":
        options = json.loads(command[command.index("--options") + 1])
        assert options["digest"] == options["model"] == version.digest
        return
    assert str(open_model_store().model_path(version.digest)) in command
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "empty"))
    with pytest.raises(LaunchError, match="not in the model store"):
        build_launch_spec(config, config.pools[0], 1, 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("source: 'store:nope'", r"models\[0\]\.source: the model store .* has no store:nope"),
        (f"source: '{DIGEST}', digest: '{DIGEST[:-1]}b'", "Remove one of the two"),
    ],
)
def test_unknown_stored_model_is_refused(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_MODELS", str(tmp_path / "store"))
    file = tmp_path / "fleet.yaml"
    file.write_text(f"models: [{{name: m, {model}}}]\npools: [{{name: p, model: m}}]\n")
    with pytest.raises(ValueError, match=message):
        load_fleet([file])
