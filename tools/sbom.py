"""Writes a software bill of materials (CycloneDX) of all that an installation with its optional parts brings in.

    python -m tools.sbom build/sbom.json

Versions are those of constraints.txt. Dependencies and licences come from pyproject.toml and the installed packages.
Equal inputs give equal files: they contain no time, and the serial number is derived from the content.
"""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License, LicenseAcknowledgement
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

REPOSITORY = Path(__file__).parents[1]
DEVELOPMENT_EXTRAS = frozenset({"dev", "docs"})
MAX_LICENSE_NAME_CHARS = 100
"""Longer values of the field License are whole licence texts."""
SERIAL_NAMESPACE = uuid.UUID("9c6a6c5e-3c57-4b5b-9d50-5a0f6e2d9a11")

Package = tuple[NormalizedName, frozenset[str]]
"""Name and extras."""


class SbomError(Exception):
    """The bill cannot be written. The message says what to change."""


def read_versions(constraints: Path) -> dict[NormalizedName, str]:
    """Return the pinned versions by package."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pins = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, _, version in pins}


def build_bom(project: dict[str, Any], versions: dict[NormalizedName, str]) -> Bom:
    """Build the bill of Argosy with all extras but those of development.

    Args:
        project: Table `project` of pyproject.toml.
        versions: Pinned versions by package.

    Raises:
        SbomError: A package is not installed, or in another version than the pinned one.
    """
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"]]
    for name in sorted(extras.keys() - DEVELOPMENT_EXTRAS):
        texts += extras[name]
    root = _component("argosy", project["version"], [_license(project["license"])])
    components = {root.name: root}
    dependencies: dict[str, set[str]] = {}
    seen: set[Package] = set()
    pending = [(root.name, package) for package in _select(texts, frozenset())]
    while pending:
        parent, package = pending.pop()
        name = package[0]
        if name == root.name:  # an extra that names another one
            continue
        dependencies.setdefault(parent, set()).add(name)
        if package in seen:
            continue
        seen.add(package)
        distribution = _installed(name)
        components.setdefault(name, _library(distribution, versions))
        pending += [(name, each) for each in _select(distribution.requires or (), package[1])]
    bom = Bom()
    bom.metadata.component = root
    bom.components.update(each for each in components.values() if each is not root)
    for name, component in components.items():
        bom.register_dependency(
            component, [components[each] for each in dependencies.get(name, ())]
        )
    return bom


def dump_bom(bom: Bom) -> str:
    """Return the bill as JSON. Equal bills have equal texts."""
    content = "\n".join(sorted(component.bom_ref.value or "" for component in bom.components))
    bom.serial_number = uuid.uuid5(SERIAL_NAMESPACE, content)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    del document["metadata"]["timestamp"]
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _select(texts: Iterable[str], extras: frozenset[str]) -> Iterator[Package]:
    """Return the packages of requirements that apply to this platform and to these extras."""
    for text in texts:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def _installed(name: str) -> Distribution:
    try:
        return Distribution.from_name(name)
    except PackageNotFoundError:
        raise SbomError(f"{name} is not installed; run this in the environment of make") from None


def _library(distribution: Distribution, versions: dict[NormalizedName, str]) -> Component:
    name = canonicalize_name(distribution.name)
    version = distribution.version.partition("+")[0]  # torch names its build there
    if versions.get(name, version) != version:
        raise SbomError(
            f"{name} is installed as {version}, but pinned to {versions[name]}; run make"
        )
    return _component(name, version, list(_licenses(distribution)))


def _component(name: str, version: str, licenses: list[License]) -> Component:
    purl = PackageURL("pypi", name=name, version=version)
    kind = ComponentType.APPLICATION if name == "argosy" else ComponentType.LIBRARY
    return Component(
        name=name, version=version, type=kind, purl=purl, bom_ref=str(purl), licenses=licenses
    )


def _licenses(distribution: Distribution) -> Iterator[License]:
    """Return the licence that a package declares: its SPDX expression, or else its names."""
    metadata = distribution.metadata
    for field in ("License-Expression", "License"):
        for text in metadata.get_all(field) or ():
            if text and len(text) <= MAX_LICENSE_NAME_CHARS and "\n" not in text:
                yield _license(text)
                return
    for classifier in metadata.get_all("Classifier") or ():
        if classifier.startswith("License :: "):
            yield _license(classifier.rpartition(" :: ")[2])


def _license(text: str) -> License:
    return LicenseFactory().make_from_string(
        text, license_acknowledgement=LicenseAcknowledgement.DECLARED
    )


def main() -> None:
    """Write the bill to the file that the command names."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tools.sbom FILE")
    target = Path(sys.argv[1])
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    try:
        bom = build_bom(project, read_versions(REPOSITORY / "constraints.txt"))
    except SbomError as error:
        raise SystemExit(str(error)) from None
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(dump_bom(bom), encoding="utf-8")
    print(f"{target}: {len(bom.components)} packages")


if __name__ == "__main__":
    main()
