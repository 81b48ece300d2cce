"""The Helm chart: it renders valid objects that fit each other and the commands, and refuses wrong values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import msgspec
import pytest
import typer.main
import yaml

from argosy.cli.app import app
from argosy.deployment import FleetConfig, load_config, parse_fleet
from argosy.fleet.launchers import CONTROLLER_RULES

CHART = Path(__file__).parents[3] / "deploy/helm/argosy"
NAMESPACE = "llm"
WORKLOADS = {"Deployment", "StatefulSet", "Job"}
CUSTOM_KINDS = {"PodMonitor"}
REPLICA_LABELS = {"argosy.dev/fleet", "app.kubernetes.io/component"}

Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Release:
    """Rendered objects of the chart with one file of values."""

    objects: list[Manifest]

    def of_kind(self, *kinds: str) -> list[Manifest]:
        return [each for each in self.objects if each["kind"] in kinds]

    def names(self, kind: str) -> set[str]:
        return {each["metadata"]["name"] for each in self.of_kind(kind)}

    def pods(self) -> list[Manifest]:
        return [each["spec"]["template"] for each in self.of_kind(*WORKLOADS)]

    def selects_a_pod(self, labels: dict[str, str]) -> bool:
        return any(labels.items() <= pod["metadata"]["labels"].items() for pod in self.pods())

    def file(self, component: str, name: str) -> str:
        (config_map,) = (
            each
            for each in self.of_kind("ConfigMap")
            if each["metadata"]["labels"]["app.kubernetes.io/component"] == component
        )
        return str(config_map["data"][name])


def values_of(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
    return values


def render(values: dict[str, Any]) -> dict[str, str]:
    return helm_python.Chart.load(CHART).render(values, name="demo", namespace=NAMESPACE)


def load_release(name: str) -> Release:
    files = render(values_of(name))
    manifests = [text for file, text in files.items() if not file.endswith("NOTES.txt")]
    return Release([each for text in manifests for each in yaml.safe_load_all(text) if each])


@pytest.fixture(scope="module", params=["fleet", "gateway-only", "production"])
def release(request: pytest.FixtureRequest) -> Release:
    return load_release(request.param)


def test_chart_has_no_lint_warnings() -> None:
    report = helm_python.lint(CHART, values_of("fleet"), strict=True)
    warning = 2
    assert not report["errors"]
    assert [each for each in report["messages"] if each["severity"] >= warning] == []


def test_objects_are_valid(release: Release) -> None:
    for each in release.objects:
        if each["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(each, "1.37", strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in release.objects]
    assert len(names) == len(set(names))


def test_selectors_and_references_lead_to_objects_of_the_release(release: Release) -> None:
    for each in release.of_kind("Service"):
        assert release.selects_a_pod(each["spec"]["selector"])
    for each in release.of_kind("PodDisruptionBudget", "NetworkPolicy", *CUSTOM_KINDS):
        labels = each["spec"].get("selector", each["spec"].get("podSelector"))["matchLabels"]
        assert release.selects_a_pod(labels) or labels.keys() == REPLICA_LABELS
    for each in release.of_kind("HorizontalPodAutoscaler"):
        target = each["spec"]["scaleTargetRef"]
        (workload,) = (
            other
            for other in release.of_kind(target["kind"])
            if other["metadata"]["name"] == target["name"]
        )
        assert "replicas" not in workload["spec"]
    for each in release.of_kind("RoleBinding", "ClusterRoleBinding"):
        assert each["roleRef"]["name"] in release.names(each["roleRef"]["kind"])
        assert {subject["name"] for subject in each["subjects"]} <= release.names("ServiceAccount")
    for pod in release.pods():
        spec = pod["spec"]
        assert spec["serviceAccountName"] in release.names("ServiceAccount")
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            assert volume.get("configMap", {}).get("name") in {None, *release.names("ConfigMap")}
        claims = {"state"} if "StatefulSet" in {each["kind"] for each in release.objects} else set()
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys() | claims


def test_pods_have_few_rights(release: Release) -> None:
    for pod in release.pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001  # that of the image
        (container,) = pod["spec"]["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"state", "tmp"} <= {mount["name"] for mount in container["volumeMounts"]}
    for role in release.of_kind("Role", "ClusterRole"):
        for rule in role["rules"]:
            assert "*" not in (*rule["apiGroups"], *rule["resources"], *rule["verbs"])
            assert "secrets" not in rule["resources"]
        if role["kind"] == "Role":
            assert role["rules"] == CONTROLLER_RULES


def test_commands_and_files_are_those_of_argosy(release: Release, tmp_path: Path) -> None:
    commands = typer.main.get_command(app)
    for pod in release.pods():
        (container,) = pod["spec"]["containers"]
        name, *arguments = container["args"]
        command = commands.get_command(typer.Context(commands), name)  # type: ignore[attr-defined]
        command.make_context(name, arguments)
    (tmp_path / "gateway.yaml").write_text(release.file("gateway", "gateway.yaml"))
    gateway = load_config(tmp_path / "gateway.yaml")
    assert gateway.host == "0.0.0.0"  # noqa: S104 - the pod has an address of its own
    assert gateway.port == 8000
    if "Role" not in {each["kind"] for each in release.objects}:
        assert gateway.fleet is None
        return
    fleet = parse_fleet(known_settings(release.file("controller", "fleet.yaml")), "fleet.yaml")
    assert fleet.gateways == 0
    assert fleet.pools
    assert (fleet.fleet, fleet.store) == (gateway.fleet, gateway.store)
    files = {each.file: each.key for each in fleet.alerting.secrets if each.file is not None}
    secret = fleet.kubernetes.secret_name
    for workload in release.of_kind("Deployment", "Job"):
        spec = workload["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        sources = container.get("envFrom", [])
        assert sources == ([{"secretRef": {"name": secret}}] if secret else [])
        mounts = [each for each in container["volumeMounts"] if each["name"] == "secrets"]
        assert {each["mountPath"]: each["subPath"] for each in mounts} == files
        volumes = [each["secret"] for each in spec["volumes"] if each["name"] == "secrets"]
        assert volumes == ([{"secretName": secret}] if files else [])


def known_settings(declaration: str) -> bytes:
    """Return the declaration without `kubernetes`, if this version has no launcher for it."""
    settings = yaml.safe_load(declaration)
    assert settings["kubernetes"]["namespace"] == NAMESPACE
    fields = FleetConfig.__struct_fields__
    return msgspec.json.encode({name: settings[name] for name in settings if name in fields})


def test_gateway_has_time_to_drain() -> None:
    (gateway,) = load_release("production").of_kind("StatefulSet")
    assert gateway["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 3 * 46 + 5


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"contoller": {}}, "contoller"),
        ({"gateway": {"replicas": "2"}}, "/gateway/replicas"),
        ({"gateway": {"settings": {"port": 9000}}}, "/gateway/settings"),
        ({"fleet": {"declaration": {"gateways": 2}}}, "/fleet/declaration"),
        ({"fleet": {"name": "Big Fleet"}}, "/fleet/name"),
        ({"store": {"url": "postgresql://argosy:password@db/argosy"}}, "/store/url"),
        ({"image": {"digest": "latest"}}, "/image/digest"),
        ({}, "controller.enabled to false"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(helm_python.HelmError, match=problem):
        render(values)
