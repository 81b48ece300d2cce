"""The bill of materials: it is valid CycloneDX, complete, and the same for the same environment."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import cyclonedx.schema
import jsonschema_rs
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.sbom import REPOSITORY, SbomError, build_bom, dump_bom, read_versions

SCHEMAS = Path(cyclonedx.schema.__file__).parent / "_res"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return project


@pytest.fixture(scope="module")
def document(project: dict[str, Any]) -> dict[str, Any]:
    versions = read_versions(REPOSITORY / "constraints.txt")
    text, again = (dump_bom(build_bom(project, versions)) for _ in range(2))
    assert text == again
    document: dict[str, Any] = json.loads(text)
    return document


def test_bill_is_valid(document: dict[str, Any]) -> None:
    files = SCHEMAS.glob("*.SNAPSHOT.schema.json")
    schemas = {file.name: json.loads(file.read_text()) for file in files}
    addresses = [(f"http://cyclonedx.org/schema/{name}", each) for name, each in schemas.items()]
    schema = schemas["bom-1.6.SNAPSHOT.schema.json"]
    registry = jsonschema_rs.Registry(addresses)
    jsonschema_rs.validator_for(schema, registry=registry).validate(document)


def test_bill_names_each_runtime_dependency_in_its_pinned_version(
    document: dict[str, Any], project: dict[str, Any]
) -> None:
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["engine"], *extras["postgres"], *extras["redis"]]
    components = {each["name"]: each["version"] for each in document["components"]}
    assert {canonicalize_name(Requirement(text).name) for text in texts} <= components.keys()
    assert not {"pytest", "mypy", "mkdocs"} & components.keys()
    versions = read_versions(REPOSITORY / "constraints.txt")
    assert components == {name: versions[canonicalize_name(name)] for name in components}


def test_each_component_is_reached_from_argosy(document: dict[str, Any]) -> None:
    graph = {each["ref"]: each.get("dependsOn", []) for each in document["dependencies"]}
    pending = [document["metadata"]["component"]["bom-ref"]]
    reached: set[str] = set()
    while pending:
        reference = pending.pop()
        if reference not in reached:
            reached.add(reference)
            pending += graph[reference]
    assert reached == graph.keys()
    assert {each["bom-ref"] for each in document["components"]} < reached


def test_other_version_than_the_pinned_one_is_refused(project: dict[str, Any]) -> None:
    versions = read_versions(REPOSITORY / "constraints.txt")
    versions[canonicalize_name("msgspec")] = "0.1"
    with pytest.raises(SbomError, match="msgspec is installed as"):
        build_bom(project, versions)
