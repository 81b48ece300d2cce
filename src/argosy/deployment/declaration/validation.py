"""Validation of a declaration: references that lead nowhere, contradictions, impossible sizes and secrets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import pairwise
from urllib.parse import urlsplit

from argosy.deployment.declaration.config import FleetConfig, FleetModelConfig, PoolConfig
from argosy.deployment.declaration.documents import check_secrets, to_document
from argosy.deployment.declaration.engines import (
    ARGOSY_ENGINE,
    BUILT_IN_ENGINES,
    FLEET_OPTIONS,
    LAUNCHER_PLACEHOLDERS,
    PLACEHOLDERS,
    ArgosyOptions,
    EngineKind,
    find_placeholders,
)
from argosy.deployment.declaration.replica_command import find_engine
from argosy.deployment.settings.gateway_config import validate_config
from argosy.settings import (
    SettingError,
    SettingPath,
    convert_settings,
)

GATEWAY_POOL = "gateway"
"""Name of the pool of gateways that the controller runs. No pool of a declaration has it."""
MIN_MEMORY_BYTES = 128 * 1024 * 1024
"""No engine starts with less."""
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Name or value of a label of Kubernetes."""
_RAY_RESOURCES = {"CPU": "cpus", "GPU": "accelerators", "memory": "memory"}
"""Resources of Ray's nodes that are no custom ones, with the settings for them."""


def validate_fleet(config: FleetConfig) -> None:
    """Check a declaration for contradictions.

    Raises:
        SettingError: The declaration contradicts itself. The message says what to change.
    """
    document = to_document(config)
    _check_values(document, ())
    if config.pools:
        check_secrets(document)
    validate_config(config, has_controller=True)
    for name, engine in config.engines.items():
        _check_engine(name, engine)
    _check_pool_names(config)
    for index, pool in enumerate(config.pools):
        path = ("pools", index)
        _check_references(config, pool, path)
        _check_command_values(config, pool, path)
        _check_counts(pool, path)
        _check_autoscaling(config, pool, path)
        _check_rollout(config, pool, path)
        _check_placement(pool, path)
        if pool.launcher == "kubernetes":
            _check_kubernetes(config, pool, path)
        _check_environment(pool, path)
        if pool.engine == ARGOSY_ENGINE:
            _check_argosy_options(pool, (*path, "options"))
        else:
            _check_own_options(find_engine(config, pool), pool, (*path, "options"))
    for index, model in enumerate(config.models):
        _check_model(config, model, ("models", index))
    _check_gateways(config)


def _fail(path: SettingPath, setting: str, problem: str) -> SettingError:
    """Return an error about a setting below `path`, or about the structure at `path` if `setting` is empty."""
    return SettingError.at((*path, *(setting.split(".") if setting else ())), problem)


def _did_you_mean(name: str, known: Iterator[str] | list[str]) -> str:
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Use one of {', '.join(names)}."


def _check_values(value: object, path: SettingPath) -> None:
    """Refuse values that the store (JSON) or a command line could not contain."""
    if isinstance(value, float) and not math.isfinite(value):
        raise _fail(path, "", f"{value} is not a finite number. Remove it for no limit.")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise _fail(path, "", "the number has more than 64 bits. Lower it.")
    if isinstance(value, str) and "\0" in value:
        raise _fail(path, "", "it contains a NUL character. Remove it.")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_values(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_values(item, (*path, index))


def _check_pool_names(config: FleetConfig) -> None:
    known = set[str]()
    for index, name in enumerate(pool.name for pool in config.pools):
        if name == GATEWAY_POOL:
            problem = "the gateways of the controller have this name. Use another one."
            raise _fail(("pools", index), "name", problem)
        if name in known:
            raise _fail(("pools", index), "name", f"the pool {name!r} is defined twice. Keep one.")
        known.add(name)


def _check_engine(name: str, engine: EngineKind) -> None:
    path: SettingPath = ("engines", name)
    if name in BUILT_IN_ENGINES:
        raise _fail(path, "", "an engine of this name is built in. Use another name.")
    used = {placeholder for text in engine.arguments() for placeholder in find_placeholders(text)}
    unknown = min(used - PLACEHOLDERS, default=None)
    if unknown is not None:
        problem = f"the placeholder {{{unknown}}} is unknown. {_did_you_mean(unknown, list(PLACEHOLDERS))}"
        raise _fail(path, "", problem)
    if used.isdisjoint({"port", "socket"}):
        raise _fail(path, "command", "it has no {port}, so that no gateway could reach it. Add it.")
    required = {item for text in engine.command for item in find_placeholders(text)}
    optional = required & {"revision", "digest", "hub_model", "model_path"}
    if optional:
        name = min(optional)
        raise _fail(
            path, "command", f"{{{name}}} may have no value. Move it to `optional_arguments`."
        )


def _check_references(config: FleetConfig, pool: PoolConfig, path: SettingPath) -> None:
    names = [model.name for model in config.models]
    if pool.model not in names:
        problem = f"no model has the name {pool.model!r}. {_did_you_mean(pool.model, names)}"
        raise _fail(path, "model", problem)
    model = config.model_of(pool)
    if model.source is None:
        raise _fail(
            path,
            "model",
            f"the model {pool.model!r} has no `source` that a replica could load. Add it to the model.",
        )
    engines = [*BUILT_IN_ENGINES, *config.engines]
    if pool.engine not in engines:
        problem = f"no engine has the name {pool.engine!r}. {_did_you_mean(pool.engine, engines)}"
        raise _fail(path, "engine", problem)
    arguments = " ".join(find_engine(config, pool).arguments())
    takes_revision = pool.engine == ARGOSY_ENGINE or "{revision}" in arguments
    if model.revision is not None and not takes_revision:
        raise _fail(
            path,
            "engine",
            f"the engine {pool.engine!r} cannot load a certain revision, but the model {pool.model!r} has one. "
            "Remove `revision` of the model, or use another engine.",
        )


def _check_command_values(config: FleetConfig, pool: PoolConfig, path: SettingPath) -> None:
    """Refuse values of a command that a launcher would read as its placeholders."""
    index = [model.name for model in config.models].index(pool.model)
    model = config.models[index]
    values: list[tuple[SettingPath, object]] = [
        (("models", index, name), getattr(model, name)) for name in ("name", "source", "revision")
    ]
    values += [((*path, "options", name), value) for name, value in pool.options.items()]
    for here, value in values:
        found = LAUNCHER_PLACEHOLDERS.intersection(find_placeholders(str(value)))
        if found:
            problem = (
                f"{{{min(found)}}} stands for what a launcher assigns. Write it in `engines` only."
            )
            raise _fail(here, "", problem)


def _check_model(config: FleetConfig, model: FleetModelConfig, path: SettingPath) -> None:
    if model.source is None:
        for setting in ("revision", "digest"):
            if getattr(model, setting) is not None:
                raise _fail(
                    path, setting, "it belongs to a `source`. Add the source, or remove it."
                )
    is_down = not (config.pools or config.gateways)  # see `stop_everything`
    has_pool = model.name in {pool.model for pool in config.pools}
    if not (is_down or model.replicas or has_pool or model.is_answered_by_others):
        raise _fail(
            path,
            "",
            f"nothing serves the model {model.name!r}. Add a pool with `model: {model.name}`, or `replicas` to the "
            "model.",
        )


def _check_counts(pool: PoolConfig, path: SettingPath) -> None:
    minimum, maximum = pool.min_replicas, pool.max_replicas
    is_scaled = pool.autoscaling.mode != "off"
    if pool.replicas is not None and (minimum is not None or maximum is not None) and not is_scaled:
        raise _fail(
            path, "replicas", "it contradicts min_replicas and max_replicas. Keep it, or those two."
        )
    if (minimum is None) != (maximum is None):
        missing, given = (
            ("min_replicas", "max_replicas")
            if minimum is None
            else ("max_replicas", "min_replicas")
        )
        raise _fail(path, given, f"it needs {missing}. Add it, or use `replicas`.")
    if minimum is not None and maximum is not None and minimum > maximum:
        raise _fail(
            path, "min_replicas", f"{minimum} is more than max_replicas ({maximum}). Lower it."
        )
    if is_scaled:
        _check_scaled_counts(pool, path)
    if pool.max_surge in {0, "0%"} and pool.max_unavailable in {0, "0%"}:
        raise _fail(
            path, "max_surge", "with max_unavailable 0 no replica could be replaced. Set one to 1."
        )
    memory = pool.memory_bytes
    if memory is not None and memory < MIN_MEMORY_BYTES:
        raise _fail(
            path,
            "memory",
            f"{pool.memory!r} is less than any engine needs. Give it at least {MIN_MEMORY_BYTES >> 20}MiB.",
        )


def _check_scaled_counts(pool: PoolConfig, path: SettingPath) -> None:
    minimum, maximum = pool.min_replicas, pool.max_replicas
    if minimum is None or maximum is None or minimum == maximum:
        problem = "it has nothing to decide. Set min_replicas, and max_replicas above it."
        raise _fail(path, "autoscaling", problem)
    if pool.replicas is not None and not minimum <= pool.replicas <= maximum:
        problem = (
            f"it is not between min_replicas ({minimum}) and max_replicas ({maximum}). Change it."
        )
        raise _fail(path, "replicas", problem)


def _find_other_server(config: FleetConfig, pool: PoolConfig) -> str | None:
    """Return what serves the model of a pool besides its replicas; None if nothing does."""
    others = [other.name for other in config.pools if other.model == pool.model and other != pool]
    if others:
        return f"the pool {others[0]!r}"
    return "`replicas` of the model" if config.model_of(pool).replicas else None


def _check_rollout(config: FleetConfig, pool: PoolConfig, path: SettingPath) -> None:
    """Refuse a plan that contradicts itself, and versions of a model that other servers answer for as well."""
    if pool.rollout is None:
        return
    server = _find_other_server(config, pool)
    if server is not None:
        problem = (
            f"{server} also serves the model {pool.model!r}, so that the versions of this pool cannot be compared. "
            "Give the pool a model of its own, or remove `rollout`."
        )
        raise _fail(path, "rollout", problem)
    try:
        pool.rollout.build_plan(has_objectives=not config.objectives.is_empty)
    except ValueError as error:
        raise _fail(path, "rollout", f"{error}.") from error


def _check_autoscaling(config: FleetConfig, pool: PoolConfig, path: SettingPath) -> None:
    """Refuse an autoscaler that could not know the demand for the pool, or what its replicas serve."""
    if pool.autoscaling.mode == "off":
        if pool.autoscaling.schedules:
            problem = "the autoscaler that follows them is off. Set `mode` to on, or remove them."
            raise _fail(path, "autoscaling.schedules", problem)
        return
    _check_schedules(pool, (*path, "autoscaling", "schedules"))
    server = _find_other_server(config, pool)
    if server is not None:
        problem = (
            f"{server} also serves the model {pool.model!r}, so that the demand for this pool is not known. "
            "Give the pool a model of its own, or remove `autoscaling`."
        )
        raise _fail(path, "autoscaling", problem)
    if pool.autoscaling.tokens_per_s is None and find_engine(config, pool).kind != ARGOSY_ENGINE:
        problem = (
            f"replicas of the engine {pool.engine!r} do not report what they can serve. "
            "Set `tokens_per_s` to what one replica serves."
        )
        raise _fail(path, "autoscaling", problem)


def _check_schedules(pool: PoolConfig, path: SettingPath) -> None:
    maximum = pool.max_replicas or 0
    for index, schedule in enumerate(pool.autoscaling.schedules):
        if schedule.min_replicas > maximum:
            problem = f"{schedule.min_replicas} is more than max_replicas ({maximum}). Lower it."
            raise _fail((*path, index), "min_replicas", problem)
        try:
            schedule.to_window()
        except ValueError as error:
            raise _fail((*path, index), "timezone", f"{error}.") from error


def _check_placement(pool: PoolConfig, path: SettingPath) -> None:
    if pool.launcher == "local":
        for setting in ("zones", "labels"):
            if getattr(pool, setting):
                raise _fail(
                    path,
                    setting,
                    "the launcher local knows one machine only. Remove it, or use the launcher ray or kubernetes.",
                )
    if pool.custom_resources and pool.launcher != "ray":
        problem = f"the launcher {pool.launcher} has none. Remove it, or use the launcher ray."
        raise _fail(path, "custom_resources", problem)
    for name, amount in pool.custom_resources.items():
        own = _RAY_RESOURCES.get(name)
        if own is not None:
            problem = f"this resource of Ray has a setting of its own. Use `{own}` of the pool."
            raise _fail(path, f"custom_resources.{name}", problem)
        if amount > 1 and amount != int(amount):
            problem = f"Ray divides only single units, but it is {amount:g}. Write a whole number."
            raise _fail(path, f"custom_resources.{name}", problem)
    if len(set(pool.zones)) < len(pool.zones):
        raise _fail(path, "zones", "a zone is listed twice. Keep one.")


def _check_kubernetes(config: FleetConfig, pool: PoolConfig, path: SettingPath) -> None:
    if pool.image is None:
        raise _fail(path, "image", "the launcher kubernetes needs a container image. Add `image`.")
    if pool.secret_references and config.kubernetes.secret_name is None:
        name = min(pool.secret_references)
        problem = "it refers to a secret. Set `kubernetes.secret_name` to the name of the Secret with its value."
        raise _fail(path, f"environment.{name}", problem)
    for key, value in pool.labels.items():
        prefix, _, name = key.rpartition("/")
        if not all(_LABEL.fullmatch(text) for text in (name, value)) or len(prefix) > 253:
            problem = (
                "Kubernetes has no such label. Name and value have at most 63 letters, digits, '-', '_' and '.'; "
                "the name may follow a domain and a '/'."
            )
            raise _fail(path, f"labels.{key}", problem)


def _check_environment(pool: PoolConfig, path: SettingPath) -> None:
    for name, value in pool.environment.items():
        if not isinstance(value, str) and (value.env is None) == (value.file is None):
            raise _fail(path, f"environment.{name}", "write either `env` or `file`.")


def _check_argosy_options(pool: PoolConfig, path: SettingPath) -> None:
    for name in pool.options:
        if name in FLEET_OPTIONS:
            setting = FLEET_OPTIONS[name]
            remedy = f"Use {setting} instead." if setting else "Remove it."
            raise _fail(path, name, f"the fleet sets this option itself. {remedy}")
    convert_settings(pool.options, ArgosyOptions, path=path)
    device = pool.options.get("device")
    if pool.accelerators > 1:
        raise _fail(path[:-1], "accelerators", "the engine argosy uses one GPU. Write 0 or 1.")
    if device == "cuda" and pool.accelerators == 0:
        raise _fail(path, "device", "cuda needs a GPU. Set accelerators of the pool to 1.")
    if device == "cpu" and pool.accelerators:
        raise _fail(path, "device", "cpu leaves the GPU unused. Remove accelerators of the pool.")


def _check_own_options(engine: EngineKind, pool: PoolConfig, path: SettingPath) -> None:
    """Refuse options that the engine's template sets."""
    arguments = list(engine.arguments())
    used = {text.partition("=")[0] for text in arguments}
    assigned = {first for first, second in pairwise(arguments) if find_placeholders(second)}
    for name in pool.options:
        flag = f"--{name.replace('_', '-').lower()}"
        # Command lines take abbreviations.
        if flag in used or any(each.startswith(flag) for each in assigned):
            raise _fail(path, name, "the fleet sets this option itself. Remove it.")


def _check_gateways(config: FleetConfig) -> None:
    if not config.pools:
        return
    if config.gateways > 1 and config.uds is not None:
        raise _fail((), "uds", "several gateways cannot listen on one socket. Use `port`.")
    if config.port and config.port + config.gateways - 1 > 65_535:
        raise _fail((), "port", f"{config.gateways} gateways do not fit above it. Lower it.")
    if config.store is not None:
        _reject_password("store.url", config.store.url, "set PGPASSWORD in the environment")
    _reject_password("limits.redis", config.limits.redis, "use limits.password_env")


def _reject_password(setting: str, url: str | None, remedy: str) -> None:
    if url is not None and urlsplit(url).password:
        raise _fail((), setting, f"it contains a password. Remove it there, and {remedy}.")
