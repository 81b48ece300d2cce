"""Types on the path of a request: the documentation lists those that the code has, so that one is added on purpose."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "request-lifecycle.md"
ROW = re.compile(r"^\| `(\w+)` \| `([\w.]+)` \| (.+) \|$", re.MULTILINE)
RECORDS = {"NamedTuple", "Struct", "dataclass"}
MODULES_ON_THE_PATH = (
    "argosy.constraints.output_constraint",
    "argosy.constraints.tools",
    "argosy.engine.engine_request",
    "argosy.engine.serving.core_messages",
    "argosy.engine.serving.preprocessing.output_planner",
    "argosy.engine.serving.preprocessing.prompt_tokenizer",
    "argosy.engine.serving.preprocessing.request_processor",
    "argosy.engine.serving.preprocessing.response_spec",
    "argosy.engine.serving.preprocessing.sampling_params",
    "argosy.engine.serving.text.choice",
    "argosy.engine.serving.text.detokenizer",
)
BESIDE_THE_PATH = {
    "argosy.constraints.output_constraint": {"JsonWhitespace", "Relaxation"},
    "argosy.constraints.tools": {"Tool", "ToolChoice"},
    "argosy.engine.serving.core_messages": {
        *("AbortRequests", "CoreFailed", "CoreReady", "Heartbeat"),
        *("KvChange", "LoadProgress", "Shutdown"),
    },
    "argosy.engine.serving.text.detokenizer": {"StopMatch"},
}
"""Records of these modules that hold neither a prompt nor a token: their parts, and messages about the core itself."""


def listed_types() -> list[tuple[str, str]]:
    """Return the name and the module of each row of the tables."""
    section = PAGE.read_text().partition("## Types on the path")[2].partition("\n## ")[0]
    return [(name, module) for name, module, _ in ROW.findall(section)]


def parse_module(module: str) -> ast.Module:
    return ast.parse((ROOT / "src" / Path(*module.split("."))).with_suffix(".py").read_text())


def find_records(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the classes that only hold values."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            marks = [*node.bases, *node.decorator_list]
            if RECORDS & {word for mark in marks for word in re.findall(r"\w+", ast.unparse(mark))}:
                yield node.name


@pytest.mark.parametrize(("name", "module"), listed_types())
def test_listed_type_exists(name: str, module: str) -> None:
    names = {
        target.id
        for node in parse_module(module).body
        for target in (node.targets if isinstance(node, ast.Assign) else ())
        if isinstance(target, ast.Name)
    } | {node.name for node in parse_module(module).body if isinstance(node, ast.ClassDef)}
    assert name in names


@pytest.mark.parametrize("module", MODULES_ON_THE_PATH)
def test_records_on_the_path_are_listed(module: str) -> None:
    listed = {name for name, place in listed_types() if place == module}
    unlisted = {*find_records(parse_module(module))} - listed - BESIDE_THE_PATH.get(module, set())
    assert not unlisted, f"{PAGE.name} lacks these types: merge them into a listed one, or add them"


def test_types_are_listed_once() -> None:
    names = [name for name, _ in listed_types()]
    assert len(names) == len(set(names))
