"""Validation of Kubernetes objects by the schemas of the package kubernetes-validate, which are compiled once.

It is what `kubernetes-validate --strict` does, which reads 10 MB of schemas for each object.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema_rs
import kubernetes_validate
import msgspec

LATEST_VERSION = kubernetes_validate.latest_version()


def find_error(each: dict[str, Any], version: str = LATEST_VERSION) -> str | None:
    """Return why a version of Kubernetes refuses an object, or None. Unknown fields are refused."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", each["apiVersion"])
    errors = _validator(f"{each['kind'].lower()}-{group}", version).iter_errors(each)
    error = next(errors, None)
    return None if error is None else f"{'.'.join(map(str, error.instance_path))}: {error.message}"


@cache
def _validator(name: str, version: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(_read(name, version), registry=_definitions(version))


@cache
def _definitions(version: str) -> jsonschema_rs.Registry:
    content = _read("_definitions", version)
    return jsonschema_rs.Registry([(content["$id"], content)])


def _read(name: str, version: str) -> Any:  # noqa: ANN401 - a schema
    major_minor = ".".join(version.split(".")[:2])
    folder = f"kubernetes-json-schema/v{major_minor}.0-local-strict"
    return msgspec.json.decode(
        files("kubernetes_validate").joinpath(f"{folder}/{name}.json").read_bytes()
    )
