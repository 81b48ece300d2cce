"""Declarations as text: the canonical YAML and JSON, which the store keeps and people read."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

import msgspec

from argosy.deployment.settings.gateway_config import GatewayConfig
from argosy.settings import dump_yaml

_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON may contain as they are, but YAML only escaped."""


def dump_fleet(config: GatewayConfig, format: Literal["yaml", "json"] = "yaml") -> str:  # noqa: A002
    """Return the canonical text of a declaration, or of the settings of a gateway.

    Equal ones have equal texts. Defaults are left out.
    """
    document = to_document(config)
    if format == "json":
        text = msgspec.json.format(msgspec.json.encode(document)).decode()
        return _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
    return dump_yaml(document)


def to_document(value: Any) -> Any:  # noqa: ANN401 - any setting
    """Return a setting as dictionaries, lists and scalars, without settings that have their defaults."""
    if isinstance(value, msgspec.Struct):
        return {
            field.encode_name: to_document(setting)
            for field in _fields_of(type(value))
            if (setting := getattr(value, field.name)) != _default(field)
        }
    if isinstance(value, dict):
        return {key: to_document(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_document(item) for item in value]
    return msgspec.to_builtins(value)


@cache
def _fields_of(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(struct)  # which evaluates all annotations each time


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default
