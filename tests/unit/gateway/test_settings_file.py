"""Settings files: errors name the key and its remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.deployment import RENAMED_SETTINGS, load_config

MODELS = "models: [{name: m, replicas: [{url: 'http://x', %s}]}]"


def yaml_at(path: str) -> str:
    """Return a settings file with a value at the path, which may end with `=VALUE`."""
    path, _, value = path.partition("=")
    *parents, name = path.split(".")
    if parents == ["models", "replicas"]:
        return MODELS % f"{name}: 1"
    if parents == ["routes"]:
        return f"routes: [{{{name}: m}}]"
    text = f"{{{name}: {value or 1}}}"
    for parent in reversed(parents):
        text = f"{{{parent}: {text}}}"
    return text


@pytest.mark.parametrize(("old", "new"), RENAMED_SETTINGS.items())
def test_error_names_new_spelling_of_renamed_setting(tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(yaml_at(old))
    with pytest.raises(ValueError, match=rf"it is called `{new}` now$") as error:
        load_config(file)
    name = old.rpartition("=")[2] if "=" in old else old.rpartition(".")[2]
    assert f"unknown field `{name}`" in str(error.value) or f"'{name}'" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new"), [("models.replicas.carry", "resume_mode"), ("auth.mode=keys", "required")]
)
def test_table_has_well_known_renamings(old: str, new: str) -> None:
    assert RENAMED_SETTINGS[old] == new


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("prot: 1", "; did you mean `port`?"),
        ("auth: {mode: keyz}", "; write auto, disabled or required"),
    ],
)
def test_error_suggests_similar_key_or_valid_values(tmp_path: Path, text: str, remedy: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"fleet\.yaml: ") as error:
        load_config(file)
    assert str(error.value).endswith(remedy)
