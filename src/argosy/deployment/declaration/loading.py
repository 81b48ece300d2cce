"""Reading of declarations: from files with overlays, or from the text that the store keeps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from argosy.deployment.declaration.config import FleetConfig, FleetModelConfig
from argosy.deployment.declaration.documents import find_unset_variables
from argosy.deployment.declaration.remote_change import check_remote_change, check_size
from argosy.deployment.declaration.validation import find_fleet_problems
from argosy.deployment.settings.adapter_config import resolve_adapters
from argosy.deployment.settings.flag_config import describe_unread_flag, find_unread_flags
from argosy.deployment.settings.gateway_config import (
    GatewayConfig,
    ModelConfig,
    find_contradictions,
)
from argosy.deployment.settings.routing_config import read_classifiers
from argosy.model_store import (
    DIGEST_PREFIX,
    REFERENCE_PREFIX,
    ModelStoreError,
    find_report_problem,
    open_model_store,
    read_quality_report,
)
from argosy.models import BUNDLED_MODELS
from argosy.settings import SettingError, SettingsDocument, parse_size
from argosy.store import StoreConfig

_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_LOCAL_PATH = re.compile(r"(\.{1,2}|~[^/]*)?/|\.{1,2}$|~")


class _Location(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that say where a fleet is found."""

    fleet: str | None = None
    store: StoreConfig | None = None


class FileCheck(NamedTuple):
    """Kind of the checked settings files, and their errors and warnings as lines `FILE:LINE: SETTING: PROBLEM`."""

    kind: str
    errors: list[str]
    warnings: list[str]
    is_complete: bool
    """Whether contradictions between settings were looked for, which needs all items of all lists."""


def load_fleet(paths: Sequence[Path]) -> FleetConfig:
    """Read a declaration from files, of which each is an overlay of those before it.

    The fleet's name defaults to that of the first file. Relative sources of models become absolute, and names of stored
    models become their digests.

    Raises:
        ValueError: A file cannot be read or a setting is invalid. The message names the file and the setting.
    """
    document = SettingsDocument.read(paths)
    config = document.decode(FleetConfig, find_fleet_problems)
    models = []
    for index, model in enumerate(config.models):
        file = Path(document.file_of(("models", index, "source")))
        where = f"{file}: models[{index}]"
        resolved = _resolve_path(_resolve_stored(model, where), file)
        _check_quality(resolved, where)
        _check_memory(resolved, config, where)
        models.append(resolved)
    return msgspec.structs.replace(
        config,
        fleet=config.fleet or _name_from(paths[0]),
        models=models,
        routes=read_classifiers(
            config.routes,
            [Path(document.file_of(("routes", index))) for index in range(len(config.routes))],
        ),
    )


def check_files(paths: Sequence[Path]) -> FileCheck:
    """Check files, of which each is an overlay of those before it, without the machine on which they are used.

    They declare a fleet if they have a setting that only fleets have, and otherwise are the settings of a gateway.

    Raises:
        ValueError: A file cannot be read.
    """
    try:
        document = SettingsDocument.read(paths)
    except SettingError as error:  # not YAML
        return FileCheck("file", [error.problem], [], is_complete=False)
    kind = "file"
    config: GatewayConfig | None = None
    content, errors = document.check(dict[str, Any])
    if content is not None and _declares_fleet(content):
        kind = "declaration of a fleet"
        fleet = document.check(FleetConfig, find_fleet_problems)
        config, errors = fleet
    elif content is not None:
        kind = "settings file of a gateway"
        gateway = document.check(GatewayConfig, find_contradictions)
        config, errors = gateway
    warnings: list[SettingError] = []
    if config is not None and not errors:
        warnings += find_unset_variables(config)
        warnings += [
            SettingError.at(("feature_flags", name), f"warning: {describe_unread_flag(name)}")
            for name in find_unread_flags(config.feature_flags, config.conditions)
        ]
    return FileCheck(
        kind,
        [document.describe(each) for each in errors],
        [document.describe(each) for each in warnings],
        is_complete=config is not None,
    )


def _declares_fleet(content: Mapping[str, Any]) -> bool:
    only_fleets = {*FleetConfig.__struct_fields__} - {*GatewayConfig.__struct_fields__}
    only_models = {*FleetModelConfig.__struct_fields__} - {*ModelConfig.__struct_fields__}
    models = content.get("models")
    keys = (
        {key for model in models if isinstance(model, dict) for key in model}
        if isinstance(models, list)
        else set()
    )
    return not (only_fleets.isdisjoint(content) and only_models.isdisjoint(keys))


def parse_remote_change(text: str, name: str, old: FleetConfig) -> FleetConfig:
    """Decode a declaration in YAML or JSON that changes a fleet and does not come from this machine.

    Names of stored models become their digests. See `check_remote_change` for what it may not change.
    Quality reports are read from the model store and the files of this machine.

    `old` is the declaration in force, whose fleet is meant if the text names none. Error messages have `name`.

    Raises:
        ValueError: The declaration is invalid, or changes what it may not. The message has the line and the setting.
    """

    def find_problems(config: FleetConfig) -> Iterator[SettingError]:
        check_size(config)
        check_remote_change(old, _name_fleet(config, old.fleet))
        yield from find_fleet_problems(config)

    document = SettingsDocument.parse(text.encode(), name)
    config = document.decode(FleetConfig, find_problems)
    models = [
        _resolve_stored(model, f"{name}: models[{index}]")
        for index, model in enumerate(config.models)
    ]
    for index, model in enumerate(models):
        _check_quality(model, f"{name}: models[{index}]")
        _check_memory(model, config, f"{name}: models[{index}]")
    return msgspec.structs.replace(_name_fleet(config, old.fleet), models=models)


def locate_fleet(paths: Sequence[Path]) -> tuple[str, str | None]:
    """Return the name of a fleet and the URL of its store, whatever else its declaration contains.

    So a fleet can be inspected and stopped while its files are edited, or on a machine that lacks its models.

    Raises:
        ValueError: A file cannot be read, is not valid YAML, or one of the two settings is invalid.
    """
    location = SettingsDocument.read(paths).decode(_Location, only=_Location.__struct_fields__)
    store = location.store
    return location.fleet or _name_from(paths[0]), None if store is None else store.url


def parse_fleet(text: str | bytes, name: str = "the declaration") -> FleetConfig:
    """Decode a declaration in YAML or JSON, such as one that `dump_fleet` wrote.

    Error messages call it `name`, such as `revision 7`.

    Raises:
        ValueError: The declaration is invalid.
    """
    content = text.encode() if isinstance(text, str) else text
    return SettingsDocument.parse(content, name).decode(FleetConfig, find_fleet_problems)


def _name_fleet(config: FleetConfig, name: str | None) -> FleetConfig:
    return config if config.fleet else msgspec.structs.replace(config, fleet=name)


def _resolve_path(model: FleetModelConfig, file: Path) -> FleetModelConfig:
    """Make the path of a model absolute. It is relative to the folder of its file."""
    if model.source is None or not _LOCAL_PATH.match(model.source):
        return model
    path = file.parent / Path(model.source).expanduser()
    return msgspec.structs.replace(model, source=str(path.resolve()))


def _resolve_stored(model: FleetModelConfig, where: str) -> FleetModelConfig:
    """Replace references to the model store by digests."""
    model = msgspec.structs.replace(model, adapters=resolve_adapters(model.adapters, where))
    source = model.source
    if source is None or not source.startswith((REFERENCE_PREFIX, DIGEST_PREFIX)):
        return model
    digest = source
    if not _DIGEST.fullmatch(source):
        try:
            digest = open_model_store().find(source).digest
        except ModelStoreError as error:
            raise ValueError(f"{where}.source: {error}") from error
    if model.digest not in {None, digest}:
        raise ValueError(
            f"{where}.digest: {source} has the digest {digest}, not {model.digest}. Remove one of the two."
        )
    return msgspec.structs.replace(model, source=digest, digest=digest)


def _check_quality(model: FleetModelConfig, where: str) -> None:
    """Check that a model whose gate requires it has a passing quality report for its digest."""
    if model.quality_gate == "off" or model.source is None:
        return
    source = model.source
    try:
        problem = find_report_problem(read_quality_report(_find_files(model)), model.digest or "")
    except (ModelStoreError, OSError) as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(
            f"{where}.quality_gate: {source} cannot be served: {problem.rstrip('.')}. Quantize it again with another "
            "recipe or more calibration text, or declare a version that passes."
        )


def _check_memory(model: FleetModelConfig, config: FleetConfig, where: str) -> None:
    """Check that the weights of a model that sleeps fit into `model_memory`, as far as its files are here."""
    sleeps = any(pool.model == model.name and pool.sleep is not None for pool in config.pools)
    if config.model_memory is None or model.source is None or not sleeps:
        return
    try:
        path = _find_files(model)
        files = path.glob("*.safetensors") if path.is_dir() else [path]
        weight_bytes = sum(file.stat().st_size for file in files)
    except (ModelStoreError, OSError):
        return  # its replicas find it out
    if weight_bytes > parse_size(config.model_memory):
        raise ValueError(
            f"{where}.source: {model.source} has {weight_bytes / 2**20:,.0f} MiB of weights, more than model_memory "
            f"({config.model_memory}). Raise model_memory, quantize the model, or remove `sleep` from its pool."
        )


def _find_files(model: FleetModelConfig) -> Path:
    """Return the path of a model's files, which need not exist. Raises ModelStoreError if the store is damaged."""
    source = model.source or ""
    stored = open_model_store().model_path(model.digest or "")
    return stored or BUNDLED_MODELS.get(source) or Path(source)


def _name_from(path: Path) -> str:
    """Return a fleet's name from the name of its file, with what a name may not contain replaced by dashes."""
    return re.sub(r"[^a-z0-9]+", "-", path.stem.lower())[:40].strip("-") or "fleet"
