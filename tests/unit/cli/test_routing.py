"""`argosy routing`: labelled prompts become a classifier, whose file the settings of a gateway name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random

import msgspec
import pytest
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from typer.testing import CliRunner, Result

from argosy.cli.app import app
from argosy.deployment import load_config

GATEWAY = """
models:
  - {name: large, replicas: [{url: "http://large:1"}]}
  - {name: small, replicas: [{url: "http://small:1"}]}
routes:
  - {model: large, target_model: small, classifier: {file: FILE, quality_share: 0.95}}
"""


def write_rows(path: Path, count: int = 200) -> Path:
    rng = Random(1)
    lines = []
    for _ in range(count):
        top = rng.choice((9, 99_999))
        text = f"What is {rng.randint(0, top)} + {rng.randint(0, top)}?"
        small = {"quality": float(len(text) < 16), "cost": 1}
        prompt = (
            {"prompt": text}
            if rng.random() < 0.5
            else {"messages": [{"role": "user", "content": text}]}
        )
        lines.append(
            json.dumps(prompt | {"small": small, "large": {"quality": 1, "cost": 6}, "id": 7})
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["routing", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


def test_trained_classifier_is_reported_and_read_by_a_gateway(tmp_path: Path) -> None:
    data, file = write_rows(tmp_path / "data.jsonl"), tmp_path / "simple.json"
    models = ("--small", "argosy-mini-draft", "--large", "sha256:" + "1" * 64)
    printed = run("train", "--data", data, *models, "--output", file)
    assert "Mean quality of argosy-mini-draft" in printed
    report = json.loads(run("report", file, "--data", data, "--json"))
    assert report["is_training_data"]
    assert [each["router"] for each in report["routers"]] == [
        "classifier",
        "random",
        "length",
        "oracle",
    ]
    assert "random" in run("report", file, "--data", data)
    settings = tmp_path / "gateway.yaml"
    settings.write_text(GATEWAY.replace("FILE", "simple.json"))
    (route,) = load_config(settings).routes
    assert route.classifier is not None
    assert route.classifier.file is None
    assert msgspec.json.encode(route.classifier.trained) == msgspec.json.encode(
        msgspec.json.decode(file.read_bytes())
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "has no prompts"),
        ("{", "line 1"),
        ('{"prompt": [1, 2], "small": {"quality": 1}, "large": {"quality": 1}}', "line 1"),
        ('{"messages": [], "small": {"quality": 1}, "large": {"quality": 1}}', "give `prompt`"),
        ('{"prompt": "x", "small": {"quality": 2}, "large": {"quality": 1}}', "<= 1"),
        ('{"prompt": "x", "small": {"quality": 1}, "large": {"quality": 1}}', "each needs 40"),
    ],
)
def test_unusable_data_is_refused(tmp_path: Path, line: str, problem: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(line)
    models = ["--small", "argosy-mini-draft", "--large", "argosy-mini-draft"]
    output = str(tmp_path / "out.json")
    result = CliRunner().invoke(
        app, ["routing", "train", "--data", str(data), *models, "--output", output]
    )
    assert result.exit_code == 2
    assert problem in result.output


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot read"),
        ("{}", "no classifier"),
        ("[", "no classifier"),
        ("1" * (2 << 20), "no classifier"),
    ],
)
def test_gateway_names_an_unusable_file(tmp_path: Path, content: str | None, problem: str) -> None:
    settings, file = tmp_path / "gateway.yaml", tmp_path / "c.json"
    settings.write_text(GATEWAY.replace("FILE", "c.json"))
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=rf"routes\[0\]\.classifier\.file: .*{problem}"):
        load_config(settings)


def respond(request: UpstreamRequest) -> str:
    """Answer as a small, a large, or a judging model."""
    prompt = str(request.body["messages"])
    if request.body["model"] == "judge":
        return (
            "8" if "<answer>\\nlong" in prompt else "Grade: 3 of 10" if "ok" in prompt else "none"
        )
    return "long" if request.body["model"] == "large" else "odd" if "odd" in prompt else "ok Paris"


async def answer(request: UpstreamRequest) -> None:
    message = {"role": "assistant", "content": respond(request)}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    request.send_json(200, {"choices": [choice], "usage": usage})


METRICS = """# TYPE argosy_gateway_route_decisions_total counter
argosy_gateway_route_decisions_total{route="a",decision="simple",dry_run="true"} 7.0
argosy_gateway_route_decisions_total{route="a",decision="not_simple",dry_run="true"} 3.0
argosy_gateway_route_decisions_total{route="b",decision="degraded",dry_run="false"} 1e+03
"""


async def test_prompts_are_labelled_by_what_is_expected_or_by_a_judge(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "labelled.jsonl"
    lines = [{"prompt": "Capital?", "expected": "paris", "group": "g"}, {"prompt": "Write"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    async with fake_upstream(answer) as server:
        server.get_pages = lambda: {"/metrics": METRICS}  # type: ignore[method-assign]
        common = [
            "--small",
            "small",
            "--large",
            "large",
            "--cost-ratio",
            "6",
            "--output",
            str(output),
        ]

        async def label(*more: str) -> Result:
            command = ["routing", "label", str(prompts), *common, "--url", server.url, *more]
            return await asyncio.to_thread(CliRunner().invoke, app, command)

        assert "no `expected`" in (await label()).output
        assert (await label("--judge", "judge")).exit_code == 0
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert [(row["group"], row["small"], row["large"]) for row in rows] == [
            ("g", {"quality": 1.0, "cost": 10.0}, {"quality": 0.0, "cost": 60.0}),
            ("", {"quality": 0.3, "cost": 10.0}, {"quality": 0.8, "cost": 60.0}),
        ]
        prompts.write_text('{"prompt": "odd"}')
        failed = await label("--judge", "judge")
        assert failed.exit_code == 1
        assert "no grade" in failed.output
        decisions = ["routing", "decisions", "--url", server.url, "--json"]
        shown = await asyncio.to_thread(CliRunner().invoke, app, decisions)
        assert json.loads(shown.output) == [
            {
                "route": "a",
                "dry_run": True,
                "simple": 7,
                "not_simple": 3,
                "escalated": 0,
                "degraded": 0,
            },
            {
                "route": "b",
                "dry_run": False,
                "simple": 0,
                "not_simple": 0,
                "escalated": 0,
                "degraded": 1000,
            },
        ]
