"""Limits of a declaration that is sent to a gateway: it cannot decide what the machines run, read or trust.

A user who applies a file on the controller's machine could run any program there. A key of the gateway permits less.
"""

from __future__ import annotations

from typing import Any

import msgspec

from argosy.deployment.declaration.config import FleetConfig, FleetModelConfig, PoolConfig
from argosy.deployment.declaration.engines import ARGOSY_ENGINE
from argosy.settings import SettingError, SettingPath

_OPEN_SECTIONS = frozenset(
    {
        "body_limit_bytes",
        "body_timeout_s",
        "cold_start",
        "connection_idle_timeout_s",
        "controller",
        "drain_deadline_s",
        "drain_keepalive_s",
        "early_stream_start_s",
        "explain",
        "fast_path",
        "gateways",
        "idempotency",
        "log_format",
        "log_level",
        "max_connection_age_s",
        "max_connections_per_address",
        "max_failed_attempts",
        "models",
        "objectives",
        "pools",
        "queue",
        "routes",
        "slow_reader_timeout_s",
        "sse_keepalive_interval_s",
        "timeouts",
        "unknown_fields",
    }
)
"""Settings that may change; of `models` and `pools` only parts. All others are protected, also those added later."""
_PROTECTED_POOL_SETTINGS = ("environment", "image", "launcher")
_REMOTE_CODE_OPTION = "trust_remote_code"
_PROTECTED_OPTIONS = frozenset({"chat_template", "generation_config", _REMOTE_CODE_OPTION})
"""Options that name files or programs. Engines other than `argosy` have too many to list."""
MAX_ITEMS = 1000
"""Maximum number of pools, of routes, and of names of models, so that no check takes long."""
_MODEL_IDENTITY = ("source", "revision", "digest")


def check_remote_change(old: FleetConfig, new: FleetConfig) -> None:
    """Refuse to change settings that only the command line may change.

    These are programs and their options, images, environment variables, files, addresses of servers and stores, and
    what authenticates users. A new pool may have those of a pool in force.

    The declaration in force is valid. The new one need not be.

    Raises:
        SettingError: The new declaration changes such a setting.
    """
    names = sum(1 + len(model.aliases) + len(model.traffic) for model in new.models)
    for section, count in (
        ("models", names),
        ("pools", len(new.pools)),
        ("routes", len(new.routes)),
    ):
        if count > MAX_ITEMS:
            problem = f"it has more than {MAX_ITEMS:,} items or names. Use `argosy apply`."
            raise SettingError.at((section,), problem)
    for field in msgspec.structs.fields(new):
        is_open = field.encode_name in _OPEN_SECTIONS
        if not is_open and getattr(old, field.name) != getattr(new, field.name):
            raise _protected((field.encode_name,))
    models = {model.name: model for model in old.models}
    for index, model in enumerate(new.models):
        _check_model(models.get(model.name), model, ("models", index))
    for index, pool in enumerate(new.pools):
        _check_pool(old, pool, ("pools", index))
        _check_remote_code(old, new, pool, ("pools", index))


def _protected(path: SettingPath) -> SettingError:
    problem = "it decides what the machines of the fleet run, read or trust."
    return SettingError.at(path, f"{problem} Change it with `argosy apply`.")


def _check_model(old: FleetModelConfig | None, new: FleetModelConfig, path: SettingPath) -> None:
    if new.replicas != ([] if old is None else old.replicas):
        raise _protected((*path, "replicas"))
    if new.source is not None and new.source.startswith((".", "~")):
        problem = "it is relative to a folder that the gateway does not know. Write the path from the root `/`."
        raise SettingError.at((*path, "source"), problem)


def _check_pool(old: FleetConfig, pool: PoolConfig, path: SettingPath) -> None:
    before = old.find_pool(pool.name)
    permitted = old.pools if before is None else (before,)
    for name in _PROTECTED_POOL_SETTINGS:
        value = getattr(pool, name)
        is_new_without = before is None and not value
        if not is_new_without and value not in [getattr(each, name) for each in permitted]:
            raise _protected((*path, name))
    options = {} if before is None or before.engine != pool.engine else before.options
    for option, value in pool.options.items():
        is_kept = option in options and _is_same(options[option], value)
        if not is_kept and not _is_open_option(pool.engine, option, value):
            raise _protected((*path, "options", option))


def _is_same(old: object, new: object) -> bool:
    """Return whether two values are written alike. `1` and `true` are equal in Python, but not for an engine."""
    return msgspec.json.encode(old) == msgspec.json.encode(new)


def _is_open_option(engine: str, name: str, value: Any) -> bool:  # noqa: ANN401 - an option's value
    """Return whether an option may be set. A number names neither a file nor a program."""
    if _normalise(name) in _PROTECTED_OPTIONS:
        return False
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number or engine == ARGOSY_ENGINE


def _normalise(option: str) -> str:
    return option.replace("-", "_").lower()


def _check_remote_code(
    old: FleetConfig, new: FleetConfig, pool: PoolConfig, path: SettingPath
) -> None:
    """Refuse another model for a pool that runs the programs in the model's folder."""
    trusts = any(_normalise(name) == _REMOTE_CODE_OPTION for name in pool.options)
    before = old.find_pool(pool.name)
    model = next((model for model in new.models if model.name == pool.model), None)
    if not trusts or before is None or model is None:
        return
    known = old.model_of(before)
    if any(getattr(model, name) != getattr(known, name) for name in _MODEL_IDENTITY):
        raise _protected((*path, "model"))
