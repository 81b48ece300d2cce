"""The documentation names only what exists: links, settings, metrics, log events, error codes, tests."""

from __future__ import annotations

import ast
import configparser
import json
import re
import subprocess
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jsonschema_rs
import msgspec
import pytest
import typer

from argosy.cli.app import app
from argosy.deployment import check_files
from argosy.extras import Extra
from argosy.protocol import ERROR_CODES
from argosy.series import SCHEMAS, metric_names
from argosy.telemetry import GatewayGauges, GatewayMetrics, QuotaBackendGauges
from tests.support.pages import (
    DOCS,
    GUIDES,
    ROOT,
    SHELLS,
    find_argosy_commands,
    read_blocks,
    split_commands,
)

SOURCE = ROOT / "src/argosy"
PAGES = sorted(DOCS.rglob("*.md"))
CURRENT_PAGES = [page for page in PAGES if "decisions" not in page.parts]
"""Pages without decisions, which are records."""
OPERATOR_PAGES = [DOCS / "how-to/troubleshoot.md", DOCS / "how-to/alerts.md"]
CODE = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"[a-z]+(?:_[a-z0-9]+)+")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LOGGER = re.compile(r"\b(log|_log)\.")
LOG_METHODS = {"debug", "info", "warning", "error", "exception"}
LOGGED_BY_A_VARIABLE_METHOD = {"replica_phase_changed", "request"}
"""Events whose level depends on the phase or the route, which the search for calls of a logger misses."""


def page_id(page: Path) -> str:
    return str(page.relative_to(DOCS))


def slugify(heading: str) -> str:
    """Return the anchor of a heading, as the site and GitHub make it."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"\s+", "-", plain)


def anchors(page: Path) -> set[str]:
    text = FENCED.sub("", page.read_text())
    return {slugify(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_point_to_existing_pages_and_headings(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(DOCS), f"{link} leaves the documentation"
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_first_pages_lead_to_files_and_what_they_name(page: str) -> None:
    text = FENCED.sub("", (ROOT / page).read_text())
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = ROOT / (path or page)
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for path, name in re.findall(r"\]\((src/[^)]+)\), `(\w+)`", text):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"


def test_extras_exist_and_are_installed_from_the_checkout() -> None:
    """Every mention names an extra of this project, never a package that anyone could register under its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    table = (DOCS / "how-to/install.md").read_text().partition("## Extras")[2]
    named = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert set(CODE.findall(" ".join(named))) == extras
    assert set(get_args(Extra)) <= extras
    examples = (path for path in (ROOT / "examples").rglob("*") if path.is_file())
    for path in (ROOT / "README.md", *CURRENT_PAGES, *SOURCE.rglob("*.py"), *examples):
        text = path.read_text()
        assert not re.search(r"\bargosy\[", text), path
        for listed in re.findall(r"'\.\[([\w,]+)\]'", text):
            assert set(listed.split(",")) <= extras, path


FOREIGN_YAML = {
    "model_list": "LiteLLM's settings",
    "route": "Envoy's settings",
    "apiVersion": "objects of Kubernetes",
}
"""First keys of documents that are not Argosy's, and are only parsed."""
BASE = """
models: [{name: chat, source: argosy-mini}]
pools: [{name: chat, model: chat, options: {max_seqs: 16}}]
store: {}
"""
POOL = """
pools:
- name: chat
  min_replicas: 1
  max_replicas: 8
"""


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_yaml_examples_are_valid(page: Path, tmp_path: Path) -> None:
    """Each is a file of a gateway or a fleet, an overlay of one, or values of the chart."""
    path, base = tmp_path / "fleet.yaml", tmp_path / "base.yaml"
    base.write_text(BASE)
    for language, title, block in read_blocks(page):
        if language != "yaml" or title.startswith("Change in "):
            continue
        document = msgspec.yaml.decode(block)
        path.write_text(block)
        if "image" in document:
            schema = json.loads((ROOT / "deploy/helm/argosy/values.schema.json").read_text())
            jsonschema_rs.validate(schema, document)
            document = document["fleet"]["declaration"]
            path.write_bytes(msgspec.yaml.encode(document))
        elif "autoscaling" in document:  # of a pool
            path.write_text(POOL + textwrap.indent(block, "  "))
        if "models" in document:
            assert not check_files([path]).errors
        elif page in GUIDES and not document.keys() & FOREIGN_YAML.keys():
            assert not check_files([base, path]).errors


def test_programs_of_guides_can_be_parsed() -> None:
    """The programs that tests run, and those that need more than tests have. Loops among them have a bound."""
    programs = []
    for page in GUIDES:
        for block in read_blocks(page):
            match block.language:
                case "json":
                    json.loads(block.text)
                case "toml":
                    tomllib.loads(block.text)
                case "ini":
                    configparser.ConfigParser(strict=False).read_string(block.text)
                case "sh" | "console":
                    programs += split_commands(block)
                case language:
                    assert language in {"", "mermaid", "nginx", "python", "text", "yaml"}, page
    program = "\n".join(programs)
    subprocess.run(["bash", "-n"], input=program, text=True, check=True)
    assert not re.search(r"^\s*(until|while) ", program, re.MULTILINE), "use `timeout`"
    for path in re.findall(r"(?<![\w/])(?:deploy|examples|requirements|tests)/[\w./-]+", program):
        assert (ROOT / path).exists(), path


def test_rows_of_tables_that_guides_show_are_those_of_the_source() -> None:
    source = "".join(
        (ROOT / path).read_text()
        for path in (
            "src/argosy/engine/execution/architectures/decoder_families.py",
            "tests/engine/test_families.py",
        )
    )
    rows = read_blocks(DOCS / "how-to/add-a-model-family.md")
    lines = [line for row in rows if row.language == "python" for line in row.text.splitlines()]
    assert [line for line in lines if line.strip() not in source] == []


def test_commands_that_pages_name_exist_with_their_options() -> None:
    command = typer.main.get_command(app)
    for page in (ROOT / "README.md", *CURRENT_PAGES):
        blocks = [block.text for block in read_blocks(page) if block.language in {*SHELLS, "ini"}]
        named = CODE.findall(FENCED.sub("", page.read_text()))
        for code in blocks + [code for code in named if re.match(r"\S*argosy ", code)]:
            for words in find_argosy_commands(code):
                check_command(command, words, f"{page.name}: {code}")


def test_targets_and_tools_that_pages_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *CURRENT_PAGES):
        text = page.read_text()
        for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE):
            assert re.search(rf"^[\w -]*\b{target}\b[\w -]*:", makefile, re.MULTILINE), page
        for module in re.findall(r"python -m ((?:tools|benchmarks)[\w.]*\w)", text):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), page


def check_command(command: Any, words: list[str], where: str) -> None:  # noqa: ANN401 - typer's
    """Assert that words name a command and its options. Their values are not checked."""
    while True:
        _, words, _ = command.make_parser(typer.Context(command)).parse_args(words)
        name, *words = words or [""]
        if not hasattr(command, "commands"):
            assert not name, where
            return
        if not name:
            return
        assert name in command.commands, where
        command = command.commands[name]


def test_pages_name_existing_tests_and_results() -> None:
    for page in CURRENT_PAGES:
        for code in CODE.findall(FENCED.sub("", page.read_text())):
            if re.fullmatch(r"(tests|tools|benchmarks)/[\w/.-]+", code):
                assert (ROOT / code).exists(), f"{page}: {code}"
            if re.fullmatch(r"20\d\d-[\w-]+\.json", code):
                assert (ROOT / "benchmarks/results" / code).exists(), f"{page}: {code}"


DOUBLE = re.compile(r"(fake_(?!clock)|kubernetes_(api|cluster)|scripted|simulated|virtual)")


def test_doubles_say_whether_they_were_compared_with_the_real_thing() -> None:
    doubles = [path for path in (ROOT / "tests/support").glob("*.py") if DOUBLE.match(path.name)]
    silent = [
        path.name
        for path in doubles
        if "compared" not in (ast.get_docstring(ast.parse(path.read_text())) or "").lower()
    ]
    assert doubles
    assert not silent


def gateway_metrics() -> set[str]:
    quota = QuotaBackendGauges(is_connected=True, degraded_allowed=0, degraded_rejected=0)
    gauges = GatewayGauges(store_up=True, quota_backend=quota)
    exposition = GatewayMetrics().exposition(gauges).decode()
    return set(re.findall(r"^# TYPE (\S+)", exposition, re.MULTILINE))


def test_pages_name_existing_gateway_metrics() -> None:
    known = gateway_metrics()
    for page in CURRENT_PAGES:
        named = set(re.findall(r"\bargosy_gateway_\w+", page.read_text()))
        samples = {re.sub(r"_(bucket|count|sum)$", "", name) for name in named}
        assert samples - known == set(), page


def test_series_page_lists_every_metric() -> None:
    listed = set(CODE.findall((DOCS / "reference/series.md").read_text()))
    assert {name for kind in SCHEMAS for name in metric_names(kind)} - listed == set()


def test_operator_pages_name_existing_events_codes_and_settings() -> None:
    words = set(re.findall(r"\w+", "".join(path.read_text() for path in SOURCE.rglob("*.py"))))
    known = words | gateway_metrics() | {error.code for error in ERROR_CODES}
    for page in OPERATOR_PAGES:
        named = {name for code in CODE.findall(page.read_text()) for name in NAME.findall(code)}
        assert named - known == set(), page


def test_glossary_names_existing_code() -> None:
    files = [path for path in SOURCE.rglob("*") if path.suffix in {".py", ".cpp", ".lua"}]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text())}
    known = words | {path.stem for path in SOURCE.rglob("*")} | {"py", "pyproject", "toml"}
    page = (DOCS / "explanation/glossary.md").read_text()
    columns = re.findall(r"\|([^|]*)\|$", page, re.MULTILINE)
    named = {word for code in CODE.findall(" ".join(columns)) for word in re.findall(r"\w+", code)}
    assert named - known == set()


def logged_events() -> Iterator[tuple[str, str, set[str]]]:
    """Yield name, level and fields of each call that logs an event."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if LOGGER.search(text) else ():
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("_problem.report")
                and isinstance(node.args[0], ast.Constant)
            ):  # a `RepeatedWarning`
                yield str(node.args[0].value), "warning", {"reason", "left_out"}
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in LOG_METHODS
                and ast.unparse(node.func.value) in {"log", "self._log"}
                and isinstance(node.args[0], ast.Constant)
            ):
                continue
            name = node.args[0].value
            if isinstance(name, str) and re.fullmatch(r"[a-z_]+", name):
                fields = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                if node.func.attr == "exception":
                    yield name, "error", fields | {"traceback"}
                else:
                    yield name, node.func.attr, fields


def documented_events() -> Iterator[tuple[str, set[str], set[str]]]:
    """Yield name, levels and fields of each row of the page of log events."""
    page = (DOCS / "reference/log-events.md").read_text()
    for name, levels, fields in re.findall(
        r"^\| `([a-z_]+)` \| ([a-z, ]+) \|([^|]*)\|[^|]*\|$", page, re.MULTILINE
    ):
        named = set(CODE.findall(fields)) | ({"traceback"} if "traceback" in fields else set())
        yield name, set(levels.split(", ")), named


def test_log_events_page_lists_every_event_with_its_level_and_fields() -> None:
    levels, fields = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for name, level, named in logged_events():
        levels[name].add(level)
        fields[name] |= named
    shown_levels, shown_fields = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for name, all_levels, named in documented_events():
        shown_levels[name] |= all_levels
        shown_fields[name] |= named
    for name in LOGGED_BY_A_VARIABLE_METHOD:
        del shown_levels[name], shown_fields[name]
    assert shown_levels == levels
    for name, named in fields.items():
        assert named <= shown_fields[name], name
