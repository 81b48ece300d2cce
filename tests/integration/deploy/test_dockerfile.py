"""The Dockerfile as tools/image_check.py reads it: its commands exist, and its context has what the images need."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer.main
from tools.dockerfile_steps import Stage, context_files, expand, parse_stages
from tools.image_check import DOCKERFILE, REPOSITORY
from tools.lock_requirements import find_problems

from argosy.cli.app import app


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return {stage.name: stage for stage in parse_stages(DOCKERFILE)}


@pytest.mark.parametrize("name", ["gateway", "replica"])
def test_image_runs_a_command_of_argosy_as_an_unprivileged_user(
    stages: dict[str, Stage], name: str
) -> None:
    stage = stages[name]
    settings = {step.instruction: step.value for step in stages[stage.base].steps + stage.steps}
    assert settings["USER"] == "10001:10001"
    assert json.loads(settings["ENTRYPOINT"]) == ["argosy"]
    command, *arguments = json.loads(settings["CMD"])
    commands = typer.main.get_command(app)
    found = commands.get_command(typer.Context(commands), command)  # type: ignore[attr-defined]
    found.make_context(command, arguments)
    assert "/health" in settings["HEALTHCHECK"]


def test_build_arguments_select_the_base(tmp_path: Path) -> None:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(
        "ARG BASE=debian\n# a comment\nFROM ${BASE} AS a\nRUN one \\\n two\nFROM a\n"
    )
    first, second = parse_stages(dockerfile)
    assert (first.name, first.base, second.name, second.base) == ("a", "debian", "1", "a")
    assert [(step.instruction, step.value.split()) for step in first.steps] == [
        ("RUN", ["one", "two"])
    ]


@pytest.mark.parametrize(
    ("text", "expanded"),
    [("$A/b", "1/b"), ("${A}b", "1b"), ("$AB", ""), ("a", "a"), ("$A${A}", "11")],
)
def test_variables_expand(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1"}) == expanded


def test_context_is_what_dockerignore_leaves(tmp_path: Path) -> None:
    (tmp_path / ".dockerignore").write_text("# all but\n*\n!src\n!README.md\n**/cache\nsrc/*.log\n")
    kept = ["README.md", "src/a.py", "src/deep/b.log"]
    for name in [*kept, "src/a.log", "src/deep/cache/c", "tests/src/a.py", "other"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [str(path) for path in context_files(tmp_path, ".")] == kept
    assert context_files(tmp_path, "tests") == []


def test_context_of_the_images_has_sources_and_nothing_else() -> None:
    assert Path("src/argosy/cli/app.py") in context_files(REPOSITORY, "src/argosy/cli")
    assert context_files(REPOSITORY, "tests/support") == []
    assert Path("requirements/base.txt") in context_files(REPOSITORY, "requirements")


def test_all_packages_of_images_and_checks_are_locked_by_hashes(stages: dict[str, Stage]) -> None:
    assert find_problems() == []
    installs = [
        part
        for stage in stages.values()
        for step in stage.steps
        for part in re.split("&&|;", step.value)
        if "pip install " in part
    ]
    assert len(installs) == 6
    for part in installs:
        assert "--require-hashes" in part or "--no-index" in part
