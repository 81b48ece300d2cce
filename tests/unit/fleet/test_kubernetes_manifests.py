"""Objects of a fleet on Kubernetes: valid by the schemas of Kubernetes, and with what the declaration says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.kubernetes_api import LATEST_VERSION, find_error
from tests.support.kubernetes_cluster import expand
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import AlertingConfig, FleetConfig, load_config, load_fleet, parse_fleet
from argosy.fleet.kubernetes_manifests import build_manifests, dump_manifests
from argosy.fleet.launch_spec import build_launch_spec
from argosy.fleet.launchers import LaunchError, LaunchSpec
from argosy.fleet.launchers.kubernetes_objects import build_deployment, build_pool_objects
from argosy.settings import SettingError, convert_settings

EXAMPLE = Path(__file__).parents[3] / "examples/kubernetes.yaml"
OLDEST_VERSION = "1.30"
"""The oldest version of Kubernetes that has all fields."""


def assert_valid(each: dict[str, Any]) -> None:
    for version in (OLDEST_VERSION, LATEST_VERSION):
        assert find_error(each, version) is None


@pytest.fixture(scope="module")
def config() -> FleetConfig:
    return load_fleet([EXAMPLE])


def pod_of(deployment: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("is_static", [False, True])
def test_manifests_are_valid_and_deterministic(config: FleetConfig, *, is_static: bool) -> None:
    files = build_manifests(config, is_static=is_static)
    assert set(files) == ({"pool-llama"} if is_static else {"controller"}) | {"gateway"}
    objects = [each for file in files.values() for each in file]
    for each in objects:
        assert_valid(each)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    texts = [dump_manifests(file) for file in files.values()]
    assert texts == [
        dump_manifests(file) for file in build_manifests(config, is_static=is_static).values()
    ]
    assert [list(yaml.safe_load_all(text)) for text in texts] == list(files.values())
    assert not any("&id" in text for text in texts)


@pytest.mark.parametrize("is_static", [False, True])
def test_config_maps_contain_settings_of_gateways_and_controllers(
    config: FleetConfig, tmp_path: Path, *, is_static: bool
) -> None:
    files = build_manifests(config, is_static=is_static)
    path = tmp_path / "gateway.yaml"
    path.write_text(files["gateway"][0]["data"]["gateway.yaml"])
    gateway = load_config(path)
    assert (gateway.host, gateway.port) == ("0.0.0.0", 8000)  # noqa: S104 - compares
    replicas = [
        (replica.url, replica.discover, replica.kind) for replica in gateway.models[0].replicas
    ]
    if is_static:
        assert gateway.fleet is None
        assert replicas == [("http://pool-llama.assistants.svc:8000", "dns", "argosy")]
        return
    assert gateway.fleet == "assistants"
    assert replicas == []
    data = next(each["data"] for each in files["controller"] if each["kind"] == "ConfigMap")
    declaration = parse_fleet(data["fleet.yaml"])
    assert declaration == msgspec.structs.replace(config, gateways=0)
    pods = {each["kind"]: each["spec"]["template"]["spec"] for each in files["controller"][-2:]}
    assert [each["name"] for each in pods["Deployment"]["containers"]] == ["controller"]
    assert "initContainers" not in pods["Deployment"]
    assert pods["Job"]["containers"][0]["command"][:2] == ["argosy", "apply"]
    changed = msgspec.structs.replace(config, objectives=None)
    names = [
        build_manifests(each)["controller"][-1]["metadata"]["name"] for each in (config, changed)
    ]
    assert len(set(names)) == 2


@pytest.mark.parametrize("is_static", [False, True])
def test_files_with_secrets_of_notices_are_mounted(config: FleetConfig, *, is_static: bool) -> None:
    """In the pods that evaluate alerts: controllers, or the gateways without one."""
    hook = {"url": "https://hook.example", "token": {"file": "/run/secrets/hook-token"}}
    receivers = [{"name": "hook", "webhook": hook}]
    alerting = convert_settings({"receivers": receivers}, AlertingConfig)
    config = msgspec.structs.replace(config, alerting=alerting)
    files = build_manifests(config, is_static=is_static)
    for each in files["gateway" if is_static else "controller"]:
        assert_valid(each)
        if each["kind"] in {"Deployment", "StatefulSet", "Job"}:
            pod = pod_of(each)
            (container,) = pod["containers"]
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            mount = mounts["/run/secrets/hook-token"]
            assert (mount["subPath"], mount["readOnly"]) == ("hook-token", True)
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            assert volumes[mount["name"]]["secret"]["secretName"] == config.kubernetes.secret_name
    nameless = msgspec.structs.replace(config.kubernetes, secret_name=None)
    with pytest.raises(SettingError, match="has the key hook-token"):
        build_manifests(msgspec.structs.replace(config, kubernetes=nameless), is_static=is_static)


def test_replica_has_what_its_pool_declares(config: FleetConfig) -> None:
    spec = build_launch_spec(config, config.pools[0], 3, 1, environ={})
    deployment = build_deployment(spec, "assistants", attempt=2)
    assert deployment["metadata"]["name"] == "llama-3-1"
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = pod_of(deployment)
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {
        "cpu": "8000m",
        "memory": str(64 << 30),
        "nvidia.com/gpu": "1",
    }
    assert container["command"][:2] == ["argosy", "replica"]
    assert '"model":"/models/llama-3.1-8b"' in container["command"][-1]
    command = " ".join(container["command"])
    assert "--host $(POD_IP) --port 8000" in command
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"][
        "argosy.dev/pool"
    ] == ("llama")
    assert pod["terminationGracePeriodSeconds"] > config.pools[0].drain_deadline_s
    assert container["startupProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert pod["securityContext"]["runAsNonRoot"]
    secret = {"secretKeyRef": {"name": "assistants", "key": "hf-token"}}
    assert {"name": "HF_TOKEN", "valueFrom": secret} in container["env"]
    kinds = [each["kind"] for each in build_pool_objects(spec, "assistants")]
    assert kinds == ["PodDisruptionBudget", "DaemonSet"]


def test_secret_of_the_controller_is_in_no_object(
    config: FleetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_TOKEN", "hunter2-value")
    text = EXAMPLE.read_text().replace("{file: /run/secrets/hf-token}", "{env: OTHER_TOKEN}")
    config = parse_fleet(text)
    for is_static in (False, True):
        objects = json.dumps(build_manifests(config, is_static=is_static))
        assert "hunter2" not in objects
        assert "OTHER_TOKEN" in objects


names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)
texts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20
) | st.lists(st.sampled_from(["$", "$(SECRET)", "(SECRET)", "{name}"]), max_size=5).map("".join)


@given(
    pool=names,
    argument=texts,
    variable=texts,
    accelerators=st.integers(0, 8),
    cpus=st.none() | st.floats(0.001, 128),
    signal=st.sampled_from(["SIGTERM", "SIGINT"]),
    zones=st.lists(names, max_size=2, unique=True),
    labels=st.dictionaries(names, names, max_size=2),
)
@settings(max_examples=50)
def test_any_replica_is_a_valid_object(  # noqa: PLR0917 - drawn values
    pool: str,
    argument: str,
    variable: str,
    accelerators: int,
    cpus: float | None,
    signal: str,
    zones: list[str],
    labels: dict[str, str],
) -> None:
    spec = msgspec.convert(
        {
            "name": f"{pool}-1-0",
            "pool": pool,
            "generation": 1,
            "ordinal": 0,
            "command": ["server", argument, "{host}:{port}", "{name}"],
            "environment": {"TEXT": variable},
            "resources": {
                "accelerators": accelerators,
                "cpus": cpus,
                "zones": zones,
                "labels": labels,
            },
            "drain_signal": signal,
            "image": "registry.internal/server:1",
        },
        LaunchSpec,
    )
    deployment = build_deployment(spec, "fleet")
    assert_valid(deployment)
    container = pod_of(deployment)["containers"][0]
    command = container["command"]
    secrets = {"POD_IP": "10.0.0.1", "SECRET": "hunter2"}
    expanded = [expand(part, secrets) for part in command]
    assert expanded[1:3] == [argument.replace("{name}", spec.name), "10.0.0.1:8000"]
    environment = {each["name"]: each for each in container["env"]}
    assert expand(environment["TEXT"]["value"], secrets) == variable


def test_refuses_what_no_cluster_could_run(config: FleetConfig) -> None:
    text = EXAMPLE.read_text()
    for old, new, expected in [
        ("  secret_name:", "  # secret_name:", "Set `kubernetes.secret_name`"),
        ("NVIDIA-H100-80GB-HBM3", "a/b", r"labels.nvidia.com/gpu.product: Kubernetes has no such"),
        ("image: registry.internal/argosy:0.1.0\n    acc", "acc", "needs a container image"),
    ]:
        with pytest.raises(ValueError, match=expected):
            parse_fleet(text.replace(old, new, 1))
    for old, new, expected in [
        ("launcher: kubernetes", "launcher: ray", r"pools\[0\].launcher: the pool 'llama'"),
        ("  image: registry.internal/argosy:0.1.0\n  sec", "  sec", "kubernetes.image: gateways"),
        ("postgresql://argosy@postgres/argosy", "sqlite:///a.db", "store.url: pods share a store"),
    ]:
        with pytest.raises(SettingError, match=expected):
            build_manifests(parse_fleet(text.replace(old, new, 1)))
    spec = build_launch_spec(config, config.pools[0], 1, 0, environ={})
    with pytest.raises(LaunchError, match=r"listens on \{socket\}"):
        build_deployment(msgspec.structs.replace(spec, command=("a", "{socket}")), "fleet")


def test_command_writes_files_for_kustomize(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["render", "kubernetes", str(EXAMPLE), "-o", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    kustomization = yaml.safe_load((tmp_path / "out/kustomization.yaml").read_text())
    assert kustomization["resources"] == ["controller.yaml", "gateway.yaml"]
    written = "---\n".join(
        (tmp_path / "out" / name).read_text() for name in kustomization["resources"]
    )
    printed = CliRunner().invoke(app, ["render", "kubernetes", str(EXAMPLE)])
    assert printed.output == written
    refused = CliRunner().invoke(
        app, ["render", "kubernetes", str(EXAMPLE.with_name("laptop.yaml"))]
    )
    assert refused.exit_code == 2
    assert "Write `kubernetes`" in refused.output
