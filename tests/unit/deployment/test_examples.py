"""Example files: each one loads and round-trips, and is refused with the path of whatever is wrong in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from argosy.deployment import (
    FleetConfig,
    build_gateway_config,
    check_files,
    compare_fleets,
    dump_fleet,
    load_fleet,
    parse_fleet,
    replica_digest,
    validate_fleet,
)
from argosy.deployment.declaration.validation import find_fleet_problems
from argosy.settings import (
    SettingError,
    convert_settings,
    convert_valid_settings,
    dump_yaml,
    format_path,
)

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
OVERLAY = EXAMPLES / "prod.yaml"
FILES = sorted(path for path in EXAMPLES.glob("*.yaml") if path != OVERLAY)
DOCUMENTS = {path.name: yaml.safe_load(path.read_text()) for path in FILES}
SCHEMA = jsonschema_rs.validator_for(
    msgspec.json.decode((ROOT / "docs/reference/fleet.schema.json").read_bytes())
)
FREE_MAPPINGS = frozenset({"environment", "headers", "labels"})
"""Mappings whose keys are names that the user chooses."""

Path_ = tuple[str | int, ...]


def test_every_example_has_a_purpose_and_a_schema() -> None:
    assert len(FILES) >= 7
    for path in FILES:
        lines = path.read_text().splitlines()
        assert lines[0] == "# yaml-language-server: $schema=../docs/reference/fleet.schema.json"
        assert lines[1].startswith("# ")


@pytest.mark.parametrize(
    "files", [[path] for path in FILES] + [[EXAMPLES / "two-pools.yaml", OVERLAY]]
)
def test_example_loads_and_round_trips(files: list[Path]) -> None:
    config = load_fleet(files)
    assert parse_fleet(dump_fleet(config)) == config
    assert parse_fleet(dump_fleet(config, "json")) == config
    assert compare_fleets(config, config) == ()
    assert SCHEMA.is_valid(msgspec.json.decode(dump_fleet(config, "json")))
    assert [model.name for model in build_gateway_config(config).models] == [
        model.name for model in config.models
    ]
    assert len({replica_digest(config, pool) for pool in config.pools}) == len(config.pools)


def list_values(document: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:  # noqa: ANN401
    """Yield all values of a document with their paths, mappings and lists included."""
    yield path, document
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield from list_values(value, (*path, key))


def replace_value(document: Any, path: Path_, value: Any) -> Any:  # noqa: ANN401
    changed = copy.deepcopy(document)
    if not path:
        return value
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return changed


def list_broken_documents(document: Any) -> Iterator[tuple[Path_, Any]]:  # noqa: ANN401
    """Yield documents with one invalid value each, and the path of the value."""
    engines = [pool.get("engine", "argosy") for pool in document["pools"]]
    for path, value in list_values(document):
        is_option = "options" in path and engines[int(path[1])] != "argosy"
        yield path, replace_value(document, path, [[]])  # no setting is a list of lists
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not is_option:
            yield path, replace_value(document, path, -1)
        if isinstance(value, dict) and not is_option and path and path[-1] not in FREE_MAPPINGS:
            yield path, replace_value(document, path, {**value, "unknwon_setting": 1})


BROKEN = {name: list(list_broken_documents(document)) for name, document in DOCUMENTS.items()}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_broken_value_is_refused_with_its_path(name: str) -> None:
    assert len(BROKEN[name]) >= 20
    for path, document in BROKEN[name]:
        with pytest.raises(SettingError) as error:
            validate_fleet(convert_settings(document, FleetConfig))
        shown = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
        assert shown.removeprefix(".") in str(error.value)
        assert error.value.path[: len(path)] == path


@given(data=st.data())
@settings(max_examples=40)
def test_check_shows_both_of_two_broken_values(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(DOCUMENTS)))
    first, broken = data.draw(st.sampled_from(BROKEN[name]))
    second, other = data.draw(st.sampled_from(BROKEN[name]))
    assume(first[: len(second)] != second[: len(first)])
    broken = replace_value(broken, second, reduce(getitem, second, other))
    file = tmp_path_factory.mktemp("check") / "fleet.yaml"
    file.write_text(dump_yaml(broken))
    checked = check_files([file])
    found = [line.split(":", 2)[2].strip() for line in checked.errors]
    shown = [
        any(line.startswith(format_path(path)[1:]) for line in found) for path in (first, second)
    ]
    assert all(shown) or (any(shown) and not checked.is_complete)
    lines = [int(line.removeprefix(f"{file}:").partition(":")[0]) for line in checked.errors]
    assert lines == sorted(lines)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_schema_refuses_unknown_settings_and_wrong_types(name: str) -> None:
    for path, document in BROKEN[name]:
        assert not SCHEMA.is_valid(document), path


@given(data=st.data())
@settings(max_examples=20)
def test_any_value_anywhere_is_refused_or_round_trips(data: st.DataObject) -> None:
    document = DOCUMENTS[data.draw(st.sampled_from(sorted(DOCUMENTS)))]
    path, _ = data.draw(st.sampled_from(list(list_values(document))))
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("1GiB")
    value = data.draw(
        st.recursive(
            leaf, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4
        )
    )
    changed = replace_value(document, path, value)
    _, errors = convert_valid_settings(copy.deepcopy(changed), FleetConfig, find_fleet_problems)
    try:
        config = convert_settings(changed, FleetConfig)
        validate_fleet(config)
    except SettingError:
        assert errors
        return
    assert not errors
    assert parse_fleet(dump_fleet(config, "json")) == config
    assert parse_fleet(dump_fleet(config)) == config


def test_truncated_file_is_refused_by_name_or_is_valid(tmp_path: Path) -> None:
    content = (EXAMPLES / "two-pools.yaml").read_bytes()
    path = tmp_path / "fleet.yaml"
    errors = []
    for length in range(0, len(content) - 1, 5):
        path.write_bytes(content[:length])
        try:
            load_fleet([path])
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) > 50
    assert all(error.startswith(f"{path}: ") for error in errors)
