"""Refusal of secrets that are written out. The store keeps every declaration, and many people may read it."""

from __future__ import annotations

from argosy.settings import SettingError, SettingPath, format_path, is_secret_name, is_secret_value

_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})
_REMEDIES = {
    "environment": "Write {env: NAME} or {file: /PATH} instead of it.",
    "headers": "Use `api_key_env`, with `key_header` and `key_prefix` if needed.",
    "options": "Use an environment variable of the engine, and set it in `environment` to {env: NAME}.",
}
"""Remedy by section."""


def check_secrets(value: object, path: SettingPath = ()) -> None:
    """Refuse texts that are named like a secret or have the shape of one, anywhere in a document.

    Raises:
        SettingError: There is one. The message contains its path and a remedy, but not the secret.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            check_secrets(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_secrets(item, (*path, index))
    elif (
        isinstance(value, str) and (_names_secret(path) or is_secret_value(value)) and value != "*"
    ):
        sections = [str(key) for key in path if key in _REMEDIES]
        remedy = _REMEDIES[sections[0]] if sections else "Refer to an environment variable."
        where = format_path(path).removeprefix(".")
        problem = "it looks like a secret, which a declaration must not contain."
        raise SettingError(f"{where}: {problem} {remedy}", path)


def _names_secret(path: SettingPath) -> bool:
    name = path[-1] if path else ""
    return isinstance(name, str) and (
        is_secret_name(name) or ("headers" in path and name.lower() in _SECRET_HEADERS)
    )
