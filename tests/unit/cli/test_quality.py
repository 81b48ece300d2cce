"""`argosy quality`: sets in the store, runs with reports, and exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from argosy.cli.app import app

ROWS = "".join(json.dumps({"input": f"{each}", "target": f"{each}"}) + "\n" for each in range(120))


def answer(request: httpx2.Request) -> httpx2.Response:
    body = json.loads(request.content)
    text = body["messages"][-1]["content"] if body["model"] != "bad" else "?"
    choice = {"message": {"role": "assistant", "content": text}}
    return httpx2.Response(200, json={"choices": [choice], "system_fingerprint": body["model"]})


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def open_client(url: str, api_key: str | None) -> httpx2.Client:
        return httpx2.Client(base_url=url, transport=httpx2.MockTransport(answer))

    monkeypatch.setattr("argosy.cli.quality.open_client", open_client)


def test_sets_are_imported_run_listed_and_deleted(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'store.db'}"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(ROWS)

    def run(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["quality", *arguments, "--store", store])
        assert result.exit_code == status, result.output
        return result.output

    assert "numbers@1 has 120 items" in run("import", "numbers", str(rows))
    assert "numbers@1" in run("import", "numbers", str(rows))
    rows.write_text(ROWS + json.dumps({"input": "x", "target": "y"}) + "\n")
    assert "numbers@2 has 121 items" in run("import", "numbers", str(rows))
    reports = [str(tmp_path / name) for name in ("out.jsonl", "out.xml")]
    shown = run(
        *("run", "numbers@1", "--model", "new", "--against", "old"),
        *("--output", reports[0], "--junit", reports[1]),
    )
    assert "not worse by 5 points or more. Difference +0.0 points" in shown
    assert json.loads(Path(reports[0]).read_text().splitlines()[-1])["summary"]["model"] == "new"
    assert 'failures="0"' in Path(reports[1]).read_text()
    worse = run("run", "numbers@1", "--model", "bad", "--against", "old", "--json", status=3)
    assert json.loads(worse)["comparison"]["verdict"] == "worse"
    assert "undecided" in run(
        *("run", "numbers", "--model", "new", "--against", "old", "--margin", "0"), status=4
    )
    run("run", "numbers", "--model", "new", "--min-score", "1", status=3)
    listed = json.loads(run("runs", "numbers@1", "--json"))
    assert [(each["model"], each["verdict"]) for each in listed] == [
        *(("new", "not_worse"), ("bad", "worse")),
    ]
    assert [each["version"] for each in json.loads(run("list", "--json"))] == [1, 2]
    assert "numbers@1 is deleted" in run("delete", "numbers@1")
    assert "no golden set 'numbers@1'" in run("runs", "numbers@1", status=2)
    assert "no file and no golden set" in run("run", "none", "--model", "new", status=2)


def test_files_run_without_a_store_and_refuse_code(tmp_path: Path) -> None:
    config = tmp_path / "promptfooconfig.yaml"
    config.write_text(
        "prompts: ['{{ a }}']\ntests: [{vars: {a: x}, assert: [{type: equals, value: x}]}]\n"
    )
    run = ["quality", "run", str(config), "--model", "new"]
    result = CliRunner().invoke(app, run)
    assert "mean score 1.000, 1 of 1 items pass" in result.output
    config.write_text("prompts: [a]\ntests: [{assert: [{type: python, value: x}]}]\n")
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 2
    assert "`python` is refused: code is never run" in result.output.replace("\n", " ")
