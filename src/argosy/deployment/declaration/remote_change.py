"""Limits of a declaration that is changed through a gateway: it cannot decide what the machines run, read or trust.

A user who applies a file on the controller's machine could run any program there. A key of the gateway permits less.
Each setting says in its own definition who may change it (`ByOperator`, `ByCommandLine`). What depends on values is
decided here: the options of engines, and where models come from. All that counts is the difference to the declaration
in force, whether it comes from a file, an earlier revision or a number of replicas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from argosy.deployment.declaration.config import FleetConfig, FleetModelConfig, PoolConfig
from argosy.deployment.declaration.documents import fields_of
from argosy.deployment.declaration.engines import ARGOSY_ENGINE
from argosy.deployment.settings.gateway_config import REQUEST_SETTINGS
from argosy.settings import SettingError, SettingPath, changed_by

_REMOTE_CODE_OPTION = "trust_remote_code"
_PROTECTED_OPTIONS = frozenset({"chat_template", "generation_config", _REMOTE_CODE_OPTION})
"""Options that name files or programs. Engines other than `argosy` have too many to list."""
MAX_ITEMS = 1000
"""Maximum number of pools, of rules for requests, and of names of models, so that no check takes long."""
_MODEL_IDENTITY = ("source", "revision", "digest")
_URL_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/]*")


def check_size(config: FleetConfig) -> None:
    """Refuse a declaration that is too large to be checked in a request. Raises SettingError."""
    names = sum(1 + len(model.aliases) + len(model.traffic) for model in config.models)
    for section, count in (
        ("models", names),
        ("pools", len(config.pools)),
        *((name, len(getattr(config, name))) for name in REQUEST_SETTINGS),
    ):
        if count > MAX_ITEMS:
            problem = f"it has more than {MAX_ITEMS:,} items or names. Use `argosy apply`."
            raise SettingError.at((section,), problem)


def check_remote_change(old: FleetConfig, new: FleetConfig) -> None:
    """Refuse to change settings that only the command line may change.

    These are programs and their options, images, environment variables, files, addresses of servers and stores, and
    what authenticates users. A new pool may have those of a pool in force.

    The declaration in force is valid. The new one need not be.

    Raises:
        SettingError: The new declaration changes such a setting.
    """
    _check_section(old, (), new, ())
    models = {model.name: model for model in old.models}
    for index, model in enumerate(new.models):
        _check_source(old, models.get(model.name), model, ("models", index, "source"))
    for index, pool in enumerate(new.pools):
        _check_options(old, pool, ("pools", index, "options"))
        _check_remote_code(old, new, pool, ("pools", index, "model"))


def _check_section(
    old: msgspec.Struct | None,
    siblings: Sequence[msgspec.Struct],
    new: msgspec.Struct,
    path: SettingPath,
) -> None:
    """Check each field of a section by its mark.

    Args:
        old: The section in force; None if it is new.
        siblings: Sections in force beside a new one. It may have the protected settings of one of them.
        new: The section.
        path: Where it is.
    """
    marks = changed_by(type(new))
    origins = [old] if old else siblings
    for field in fields_of(type(new)):
        value, here = getattr(new, field.name), (*path, field.encode_name)
        if marks.get(field.name) != "operator":
            if old is None and not value:
                continue  # a new section without it
            origins = [each for each in origins if _is_same(value, getattr(each, field.name))]
            if not origins:
                raise _protected(here)
            continue
        before = getattr(old, field.name, None)
        if isinstance(value, msgspec.Struct):
            _check_section(before if type(before) is type(value) else None, (), value, here)
        elif isinstance(value, (list, tuple)):
            _check_items(before or (), value, here)
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, msgspec.Struct):
                    _check_section((before or {}).get(key), (), item, (*here, key))


def _check_items(old: Sequence[Any], new: Sequence[Any], path: SettingPath) -> None:
    known = [each for each in old if isinstance(each, msgspec.Struct)]
    by_name = {getattr(each, "name", None): each for each in known}
    for index, item in enumerate(new):
        if isinstance(item, msgspec.Struct):
            name = getattr(item, "name", None)
            before = None if name is None else by_name.get(name)
            siblings = known if path == ("pools",) else ()
            _check_section(before, siblings, item, (*path, index))


def _protected(path: SettingPath) -> SettingError:
    problem = "it decides what the machines of the fleet run, read or trust."
    return SettingError.at(path, f"{problem} Change it with `argosy apply`.")


def _check_source(
    old: FleetConfig, before: FleetModelConfig | None, new: FleetModelConfig, path: SettingPath
) -> None:
    source = new.source
    if source is None or (before is not None and before.source == source):
        return
    if source.startswith((".", "~")):
        problem = "it is relative to a folder that the gateway does not know. Write the path from the root `/`."
        raise SettingError.at(path, problem)
    origin = _URL_ORIGIN.match(source)
    if origin is not None:
        known = [_URL_ORIGIN.match(model.source or "") for model in old.models]
        if origin[0] not in [each[0] for each in known if each is not None]:
            raise _protected(path)  # the machines would open any address


def _check_options(old: FleetConfig, pool: PoolConfig, path: SettingPath) -> None:
    before = old.find_pool(pool.name)
    options = {} if before is None or before.engine != pool.engine else before.options
    for option, value in pool.options.items():
        is_kept = option in options and _is_same(options[option], value)
        if not is_kept and not _is_open_option(pool.engine, option, value):
            raise _protected((*path, option))


def _is_same(old: object, new: object) -> bool:
    """Return whether two values are written alike. `1` and `true` are equal in Python, but not for an engine."""
    return msgspec.json.encode(old, order="sorted") == msgspec.json.encode(new, order="sorted")


def _is_open_option(engine: str, name: str, value: Any) -> bool:  # noqa: ANN401 - an option's value
    """Return whether an option may be set. A number names neither a file nor a program."""
    if any(each.startswith(_normalise(name)) for each in _PROTECTED_OPTIONS):
        return False  # command lines take abbreviations
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number or engine == ARGOSY_ENGINE


def _normalise(option: str) -> str:
    return option.replace("-", "_").lower()


def _check_remote_code(
    old: FleetConfig, new: FleetConfig, pool: PoolConfig, path: SettingPath
) -> None:
    """Refuse a model for an engine that runs the programs in the model's folder, unless it does so already."""
    model = next((model for model in new.models if model.name == pool.model), None)
    if model is None or not _trusts_remote_code(new, pool):
        return
    identity = [getattr(model, name) for name in _MODEL_IDENTITY]
    trusted = [
        [getattr(old.model_of(each), name) for name in _MODEL_IDENTITY]
        for each in old.pools
        if each.engine == pool.engine and _trusts_remote_code(old, each)
    ]
    if identity not in trusted:
        raise _protected(path)


def _trusts_remote_code(config: FleetConfig, pool: PoolConfig) -> bool:
    """Return whether the command of a pool has the option, be it in the engine's own arguments."""
    engine = config.engines.get(pool.engine)
    arguments = () if engine is None else engine.arguments()
    return any(_names_remote_code(each) for each in (*pool.options, *arguments))


def _names_remote_code(argument: str) -> bool:
    text = _normalise(argument)
    name = text.lstrip("_").partition("=")[0]
    is_abbreviation = name.startswith("trust") and _REMOTE_CODE_OPTION.startswith(name)
    return is_abbreviation or _REMOTE_CODE_OPTION in text
