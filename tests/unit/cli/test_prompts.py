"""`argosy prompts`: versions from files, labels, rendering and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from argosy.cli.app import app


def test_versions_are_created_labelled_rendered_and_deleted(tmp_path: Path) -> None:
    store, folder = f"sqlite:///{tmp_path / 'store.db'}", tmp_path
    (folder / "chat.yaml").write_text(
        "messages: [{role: system, content: 'Help {{ who }}.'}]\nparameters: {temperature: 0}\n"
    )
    (folder / "late.txt").write_text("{{ who }}" + " is helped." * 20)
    (folder / "values.json").write_text('{"who": "Jo"}')

    def run(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["prompts", *arguments, "--store", store])
        assert result.exit_code == status, result.output
        return result.output

    assert "support@1 is production" in run("create", "support", str(folder / "chat.yaml"))
    created = run("create", "support", str(folder / "late.txt"), "--label", "staging")
    assert "Warning: text line 1 (who) stands before 220 characters" in created
    assert "support@2 is staging" in created
    rendered = json.loads(run("render", "support", "-v", "who=Jo"))
    assert rendered == [{"role": "system", "content": "Help Jo."}]
    values = str(folder / "values.json")
    assert run("render", "support@staging", "--variables", values).startswith("Jo is helped.")
    assert "the labels: staging, production" in run("label", "support@2", "production")
    assert json.loads(run("show", "support"))["version"] == 2
    assert "support@1 is deleted" in run("delete", "support@1")
    assert [each["version"] for each in json.loads(run("list", "--json"))] == [2]
    for arguments, problem in (
        (("show", "support@9"), "no prompt 'support' with the version '9'"),
        (("delete", "support", "-o", "none"), "none"),
        (("render", "support"), "'who' is undefined"),
        (("render", "support", "-v", "who"), "NAME=TEXT"),
        (("label", "support", "latest"), "a meaning of its own"),
    ):
        assert problem in run(*arguments, status=2)
