"""Declarations as documents: their canonical YAML and JSON, which the store keeps, and the refusal of secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal

import msgspec

from argosy.deployment.declaration.config import PoolConfig
from argosy.deployment.settings.gateway_config import GatewayConfig
from argosy.settings import (
    SettingError,
    SettingPath,
    dump_yaml,
    is_secret_name,
    is_secret_value,
)

_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON may contain as they are, but YAML only escaped."""
_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})
_REMEDIES = {
    "environment": "Write {env: NAME} or {file: /PATH} instead of it.",
    "headers": "Use `api_key_env`, with `key_header` and `key_prefix` if needed.",
    "options": "Use an environment variable of the engine, and set it in `environment` to {env: NAME}.",
}
"""Remedy by section."""


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
            for field in fields_of(type(value))
            if (setting := getattr(value, field.name)) != _default(field)
        }
    if isinstance(value, dict):
        return {key: to_document(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_document(item) for item in value]
    return msgspec.to_builtins(value)


@cache
def fields_of(struct: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """Return the fields of a structure. `msgspec.structs.fields` evaluates all annotations each time."""
    return msgspec.structs.fields(struct)


def _default(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def find_secrets(value: object, path: SettingPath = ()) -> Iterator[SettingError]:
    """Yield an error for each text that is named like a secret or has the shape of one, anywhere in a document.

    Its message contains the path and a remedy, but not the secret.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from find_secrets(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from find_secrets(item, (*path, index))
    elif (
        isinstance(value, str) and (_names_secret(path) or is_secret_value(value)) and value != "*"
    ):
        sections = [str(key) for key in path if key in _REMEDIES]
        remedy = _REMEDIES[sections[0]] if sections else "Refer to an environment variable."
        problem = "it looks like a secret, which a declaration must not contain."
        yield SettingError.at(path, f"{problem} {remedy}")


def find_unset_variables(value: object, path: SettingPath = ()) -> Iterator[SettingError]:
    """Yield a warning for each environment variable that a setting refers to and this process does not have.

    References of pools on Kubernetes are left out, because they are keys of a Secret there.
    """
    if isinstance(value, PoolConfig) and value.launcher == "kubernetes":
        return
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, msgspec.Struct):
        items = (
            (field.encode_name, getattr(value, field.name)) for field in fields_of(type(value))
        )
    elif isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        names_variable = (
            isinstance(value, msgspec.Struct) and re.search("(^|_)env$", str(key)) is not None
        )
        if names_variable and isinstance(item, str) and item not in os.environ:
            problem = f"warning: the environment variable {item} is not set here."
            yield SettingError.at((*path, key), problem)
        yield from find_unset_variables(item, (*path, key))


def _names_secret(path: SettingPath) -> bool:
    name = path[-1] if path else ""
    return isinstance(name, str) and (
        is_secret_name(name) or ("headers" in path and name.lower() in _SECRET_HEADERS)
    )
