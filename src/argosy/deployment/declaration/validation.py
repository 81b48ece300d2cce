"""Validation of a declaration: references that lead nowhere, contradictions, impossible sizes and secrets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import pairwise
from urllib.parse import urlsplit

from argosy.deployment.declaration.config import FleetConfig, FleetModelConfig, PoolConfig
from argosy.deployment.declaration.documents import find_secrets, to_document
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
from argosy.deployment.settings.gateway_config import find_contradictions
from argosy.model_store import DIGEST_PREFIX, REFERENCE_PREFIX
from argosy.settings import (
    SettingError,
    SettingPath,
    convert_valid_settings,
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
    """Check a declaration for contradictions. Raises SettingError for the first. The message says what to change."""
    for problem in find_fleet_problems(config):
        raise problem


def find_fleet_problems(config: FleetConfig) -> Iterator[SettingError]:
    """Yield an error for each contradiction of a declaration. The messages say what to change."""
    document = to_document(config)
    yield from _find_impossible_values(document, ())
    if config.pools:
        yield from find_secrets(document)
    yield from find_contradictions(config, has_controller=True)
    for name, engine in config.engines.items():
        yield from _check_engine(name, engine)
    yield from _check_pool_names(config)
    for index, pool in enumerate(config.pools):
        yield from _check_pool(config, pool, ("pools", index))
    for index, model in enumerate(config.models):
        yield from _check_model(config, model, ("models", index))
    yield from _check_gateways(config)


def _check_pool(config: FleetConfig, pool: PoolConfig, path: SettingPath) -> Iterator[SettingError]:
    dead_references = list(_check_references(config, pool, path))
    yield from dead_references
    yield from _check_counts(pool, path)
    yield from _check_placement(pool, path)
    if pool.launcher == "kubernetes":
        yield from _check_kubernetes(config, pool, path)
    yield from _check_environment(pool, path)
    if pool.engine == ARGOSY_ENGINE:
        yield from _check_argosy_options(pool, (*path, "options"))
    elif pool.engine in BUILT_IN_ENGINES or pool.engine in config.engines:
        yield from _check_own_options(find_engine(config, pool), pool, (*path, "options"))
    if dead_references:
        return
    yield from _check_command_values(config, pool, path)
    yield from _check_autoscaling(config, pool, path)
    yield from _check_rollout(config, pool, path)


def _fail(path: SettingPath, setting: str, problem: str) -> SettingError:
    """Return an error about a setting below `path`, or about the structure at `path` if `setting` is empty."""
    return SettingError.at((*path, *(setting.split(".") if setting else ())), problem)


def _did_you_mean(name: str, known: Iterator[str] | list[str]) -> str:
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Use one of {', '.join(names)}."


def _find_impossible_values(value: object, path: SettingPath) -> Iterator[SettingError]:
    """Yield values that the store (JSON) or a command line could not contain."""
    if isinstance(value, float) and not math.isfinite(value):
        yield _fail(path, "", f"{value} is not a finite number. Remove it for no limit.")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        yield _fail(path, "", "the number has more than 64 bits. Lower it.")
    if isinstance(value, str) and "\0" in value:
        yield _fail(path, "", "it contains a NUL character. Remove it.")
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _find_impossible_values(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_impossible_values(item, (*path, index))


def _check_pool_names(config: FleetConfig) -> Iterator[SettingError]:
    known = set[str]()
    for index, name in enumerate(pool.name for pool in config.pools):
        if name == GATEWAY_POOL:
            problem = "the gateways of the controller have this name. Use another one."
            yield _fail(("pools", index), "name", problem)
        if name in known:
            yield _fail(("pools", index), "name", f"the pool {name!r} is defined twice. Keep one.")
        known.add(name)


def _check_engine(name: str, engine: EngineKind) -> Iterator[SettingError]:
    path: SettingPath = ("engines", name)
    if name in BUILT_IN_ENGINES:
        yield _fail(path, "", "an engine of this name is built in. Use another name.")
    used = {placeholder for text in engine.arguments() for placeholder in find_placeholders(text)}
    unknown = min(used - PLACEHOLDERS, default=None)
    if unknown is not None:
        problem = f"the placeholder {{{unknown}}} is unknown. {_did_you_mean(unknown, list(PLACEHOLDERS))}"
        yield _fail(path, "", problem)
    if used.isdisjoint({"port", "socket"}):
        yield _fail(path, "command", "it has no {port}, so that no gateway could reach it. Add it.")
    required = {item for text in engine.command for item in find_placeholders(text)}
    optional = required & {"revision", "digest", "hub_model", "model_path"}
    if optional:
        name = min(optional)
        yield _fail(
            path, "command", f"{{{name}}} may have no value. Move it to `optional_arguments`."
        )


def _check_references(
    config: FleetConfig, pool: PoolConfig, path: SettingPath
) -> Iterator[SettingError]:
    names = [model.name for model in config.models]
    model = config.model_of(pool) if pool.model in names else None
    if model is None:
        problem = f"no model has the name {pool.model!r}. {_did_you_mean(pool.model, names)}"
        yield _fail(path, "model", problem)
    elif model.source is None:
        yield _fail(
            path,
            "model",
            f"the model {pool.model!r} has no `source` that a replica could load. Add it to the model.",
        )
    engines = [*BUILT_IN_ENGINES, *config.engines]
    if pool.engine not in engines:
        problem = f"no engine has the name {pool.engine!r}. {_did_you_mean(pool.engine, engines)}"
        yield _fail(path, "engine", problem)
        return
    arguments = " ".join(find_engine(config, pool).arguments())
    takes_revision = pool.engine == ARGOSY_ENGINE or "{revision}" in arguments
    if model is not None and model.revision is not None and not takes_revision:
        yield _fail(
            path,
            "engine",
            f"the engine {pool.engine!r} cannot load a certain revision, but the model {pool.model!r} has one. "
            "Remove `revision` of the model, or use another engine.",
        )


def _check_command_values(
    config: FleetConfig, pool: PoolConfig, path: SettingPath
) -> Iterator[SettingError]:
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
            yield _fail(here, "", problem)


def _check_model(
    config: FleetConfig, model: FleetModelConfig, path: SettingPath
) -> Iterator[SettingError]:
    if model.source is None:
        for setting in ("revision", "digest"):
            if getattr(model, setting) is not None:
                yield _fail(
                    path, setting, "it belongs to a `source`. Add the source, or remove it."
                )
    is_stored = (model.source or "").startswith((REFERENCE_PREFIX, DIGEST_PREFIX))
    if model.quality_gate == "required" and model.digest is None and not is_stored:
        yield _fail(
            path,
            "quality_gate",
            "a report belongs to a digest. Add the `digest` (`argosy quantize` prints it), or take the source from the "
            "model store.",
        )
    is_down = not (config.pools or config.gateways)  # see `stop_everything`
    served = {pool.model for pool in config.pools}
    has_pool = model.name in served or not served <= {each.name for each in config.models}
    if not (is_down or model.replicas or has_pool or model.is_answered_by_others):
        yield _fail(
            path,
            "",
            f"nothing serves the model {model.name!r}. Add a pool with `model: {model.name}`, or `replicas` to the "
            "model.",
        )


def _check_counts(pool: PoolConfig, path: SettingPath) -> Iterator[SettingError]:
    minimum, maximum = pool.min_replicas, pool.max_replicas
    is_scaled = pool.autoscaling.mode != "off"
    if pool.replicas is not None and (minimum is not None or maximum is not None) and not is_scaled:
        yield _fail(
            path, "replicas", "it contradicts min_replicas and max_replicas. Keep it, or those two."
        )
    if (minimum is None) != (maximum is None):
        missing, given = (
            ("min_replicas", "max_replicas")
            if minimum is None
            else ("max_replicas", "min_replicas")
        )
        yield _fail(path, given, f"it needs {missing}. Add it, or use `replicas`.")
    if minimum is not None and maximum is not None and minimum > maximum:
        yield _fail(
            path, "min_replicas", f"{minimum} is more than max_replicas ({maximum}). Lower it."
        )
    if is_scaled:
        yield from _check_scaled_counts(pool, path)
    if pool.max_surge in {0, "0%"} and pool.max_unavailable in {0, "0%"}:
        yield _fail(
            path, "max_surge", "with max_unavailable 0 no replica could be replaced. Set one to 1."
        )
    memory = pool.memory_bytes
    if memory is not None and memory < MIN_MEMORY_BYTES:
        yield _fail(
            path,
            "memory",
            f"{pool.memory!r} is less than any engine needs. Give it at least {MIN_MEMORY_BYTES >> 20}MiB.",
        )


def _check_scaled_counts(pool: PoolConfig, path: SettingPath) -> Iterator[SettingError]:
    minimum, maximum = pool.min_replicas, pool.max_replicas
    if minimum is None or maximum is None or minimum == maximum:
        problem = "it has nothing to decide. Set min_replicas, and max_replicas above it."
        yield _fail(path, "autoscaling", problem)
    elif pool.replicas is not None and not minimum <= pool.replicas <= maximum:
        problem = (
            f"it is not between min_replicas ({minimum}) and max_replicas ({maximum}). Change it."
        )
        yield _fail(path, "replicas", problem)


def _find_other_server(config: FleetConfig, pool: PoolConfig) -> str | None:
    """Return what serves the model of a pool besides its replicas; None if nothing does."""
    others = [other.name for other in config.pools if other.model == pool.model and other != pool]
    if others:
        return f"the pool {others[0]!r}"
    return "`replicas` of the model" if config.model_of(pool).replicas else None


def _check_rollout(
    config: FleetConfig, pool: PoolConfig, path: SettingPath
) -> Iterator[SettingError]:
    """Find a plan that contradicts itself, and versions of a model that other servers answer for as well."""
    if pool.rollout is None:
        return
    server = _find_other_server(config, pool)
    if server is not None:
        problem = (
            f"{server} also serves the model {pool.model!r}, so that the versions of this pool cannot be compared. "
            "Give the pool a model of its own, or remove `rollout`."
        )
        yield _fail(path, "rollout", problem)
    try:
        pool.rollout.build_plan(has_objectives=config.objectives.has_latency)
    except ValueError as error:
        yield _fail(path, "rollout", f"{error}.")


def _check_autoscaling(
    config: FleetConfig, pool: PoolConfig, path: SettingPath
) -> Iterator[SettingError]:
    """Refuse an autoscaler that could not know the demand for the pool, or what its replicas serve."""
    if pool.autoscaling.mode == "off":
        if pool.autoscaling.schedules:
            problem = "the autoscaler that follows them is off. Set `mode` to on, or remove them."
            yield _fail(path, "autoscaling.schedules", problem)
        return
    yield from _check_schedules(pool, (*path, "autoscaling", "schedules"))
    server = _find_other_server(config, pool)
    if server is not None:
        problem = (
            f"{server} also serves the model {pool.model!r}, so that the demand for this pool is not known. "
            "Give the pool a model of its own, or remove `autoscaling`."
        )
        yield _fail(path, "autoscaling", problem)
    if pool.autoscaling.tokens_per_s is None and find_engine(config, pool).kind != ARGOSY_ENGINE:
        problem = (
            f"replicas of the engine {pool.engine!r} do not report what they can serve. "
            "Set `tokens_per_s` to what one replica serves."
        )
        yield _fail(path, "autoscaling", problem)


def _check_schedules(pool: PoolConfig, path: SettingPath) -> Iterator[SettingError]:
    maximum = pool.max_replicas or 0
    for index, schedule in enumerate(pool.autoscaling.schedules):
        if schedule.min_replicas > maximum:
            problem = f"{schedule.min_replicas} is more than max_replicas ({maximum}). Lower it."
            yield _fail((*path, index), "min_replicas", problem)
        try:
            schedule.to_window()
        except ValueError as error:
            yield _fail((*path, index), "timezone", f"{error}.")


def _check_placement(pool: PoolConfig, path: SettingPath) -> Iterator[SettingError]:
    if pool.launcher == "local":
        for setting in ("zones", "labels"):
            if getattr(pool, setting):
                yield _fail(
                    path,
                    setting,
                    "the launcher local knows one machine only. Remove it, or use the launcher ray or kubernetes.",
                )
    if pool.custom_resources and pool.launcher != "ray":
        problem = f"the launcher {pool.launcher} has none. Remove it, or use the launcher ray."
        yield _fail(path, "custom_resources", problem)
    for name, amount in pool.custom_resources.items():
        own = _RAY_RESOURCES.get(name)
        if own is not None:
            problem = f"this resource of Ray has a setting of its own. Use `{own}` of the pool."
            yield _fail(path, f"custom_resources.{name}", problem)
        if amount > 1 and amount != int(amount):
            problem = f"Ray divides only single units, but it is {amount:g}. Write a whole number."
            yield _fail(path, f"custom_resources.{name}", problem)
    if len(set(pool.zones)) < len(pool.zones):
        yield _fail(path, "zones", "a zone is listed twice. Keep one.")


def _check_kubernetes(
    config: FleetConfig, pool: PoolConfig, path: SettingPath
) -> Iterator[SettingError]:
    if pool.image is None:
        yield _fail(path, "image", "the launcher kubernetes needs a container image. Add `image`.")
    if pool.secret_references and config.kubernetes.secret_name is None:
        name = min(pool.secret_references)
        problem = "it refers to a secret. Set `kubernetes.secret_name` to the name of the Secret with its value."
        yield _fail(path, f"environment.{name}", problem)
    for key, value in pool.labels.items():
        prefix, _, name = key.rpartition("/")
        if not all(_LABEL.fullmatch(text) for text in (name, value)) or len(prefix) > 253:
            problem = (
                "Kubernetes has no such label. Name and value have at most 63 letters, digits, '-', '_' and '.'; "
                "the name may follow a domain and a '/'."
            )
            yield _fail(path, f"labels.{key}", problem)


def _check_environment(pool: PoolConfig, path: SettingPath) -> Iterator[SettingError]:
    for name, value in pool.environment.items():
        if not isinstance(value, str) and (value.env is None) == (value.file is None):
            yield _fail(path, f"environment.{name}", "write either `env` or `file`.")


def _check_argosy_options(pool: PoolConfig, path: SettingPath) -> Iterator[SettingError]:
    for name in pool.options:
        if name in FLEET_OPTIONS:
            setting = FLEET_OPTIONS[name]
            remedy = f"Use {setting} instead." if setting else "Remove it."
            yield _fail(path, name, f"the fleet sets this option itself. {remedy}")
    own = {name: value for name, value in pool.options.items() if name not in FLEET_OPTIONS}
    _, errors = convert_valid_settings(own, ArgosyOptions, path=path)
    yield from errors
    device = pool.options.get("device")
    if pool.accelerators > 1:
        yield _fail(path[:-1], "accelerators", "the engine argosy uses one GPU. Write 0 or 1.")
    if device == "cuda" and pool.accelerators == 0:
        yield _fail(path, "device", "cuda needs a GPU. Set accelerators of the pool to 1.")
    if device == "cpu" and pool.accelerators:
        yield _fail(path, "device", "cpu leaves the GPU unused. Remove accelerators of the pool.")


def _check_own_options(
    engine: EngineKind, pool: PoolConfig, path: SettingPath
) -> Iterator[SettingError]:
    """Refuse options that the engine's template sets."""
    arguments = list(engine.arguments())
    used = {text.partition("=")[0] for text in arguments}
    assigned = {first for first, second in pairwise(arguments) if find_placeholders(second)}
    for name in pool.options:
        flag = f"--{name.replace('_', '-').lower()}"
        # Command lines take abbreviations.
        if flag in used or any(each.startswith(flag) for each in assigned):
            yield _fail(path, name, "the fleet sets this option itself. Remove it.")


def _check_gateways(config: FleetConfig) -> Iterator[SettingError]:
    if not config.pools:
        return
    if config.gateways > 1 and config.uds is not None:
        yield _fail((), "uds", "several gateways cannot listen on one socket. Use `port`.")
    if config.port and config.port + config.gateways - 1 > 65_535:
        yield _fail((), "port", f"{config.gateways} gateways do not fit above it. Lower it.")
    if config.store is not None:
        yield from _reject_password(
            "store.url", config.store.url, "set PGPASSWORD in the environment"
        )
    yield from _reject_password("limits.redis", config.limits.redis, "use limits.password_env")


def _reject_password(setting: str, url: str | None, remedy: str) -> Iterator[SettingError]:
    if url is not None and urlsplit(url).password:
        yield _fail((), setting, f"it contains a password. Remove it there, and {remedy}.")
