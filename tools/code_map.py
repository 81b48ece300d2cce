"""The page that maps the code, made from the import contracts and the first sentence of each package."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tools.settings_docs import table

ROOT = Path(__file__).parents[1]
PUBLIC = "Other packages import only the public names of "
"""Start of the name of a contract of which each package has one."""
INTRO = """# Map of the code

A package imports only packages of the rows below its own, and packages in one row do not import each other.
`lint-imports` checks this, with the contracts in `pyproject.toml`. [Layers](layers.md) shows how to work with them.
"""


def first_sentence(module: str) -> str:
    """Return the first sentence of a module's docstring, or of that of a package."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    paragraph = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    sentence = re.split(r"(?<=\.) (?=[A-Z])", " ".join(paragraph.split()))[0]
    return sentence.rstrip(".")


def layer_rows(container: str, layers: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each package of a contract, with the number of its layer on the first one."""
    for number, layer in enumerate(layers, 1):
        shown = str(number)
        for name in sorted(re.findall(r"\w+", layer)):
            yield shown, f"`{name}`", first_sentence(f"{container}.{name}")
            shown = ""


def inner_packages(package: Path) -> Iterator[tuple[str, str]]:
    """Yield a row for each package that lies in another one."""
    for inner in sorted(package.glob("*/__init__.py")):
        module = ".".join(inner.parent.relative_to(ROOT / "src").parts)
        yield f"`{inner.parent.name}`", first_sentence(module)


def code_map() -> str:
    """Return the page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    layers = {c["containers"][0]: c["layers"] for c in contracts if c["type"] == "layers"}
    parts = [INTRO]
    for name in sorted(
        {*layers, "argosy.engine", "argosy.engine.serving", "argosy.fleet", "argosy.policy"}
    ):
        if name in layers:
            rows = table(("layer", "package", "what it is"), layer_rows(name, layers[name]))
        else:
            package = ROOT / "src" / name.replace(".", "/")
            rows = table(("package", "what it is"), inner_packages(package))
        parts += [f"## `{name}`\n", rows]
    rules = [contract["name"] for contract in contracts if contract["type"] != "layers"]
    public = [f"`{rule.removeprefix(PUBLIC)}`" for rule in rules if rule.startswith(PUBLIC)]
    rules = [rule for rule in rules if not rule.startswith(PUBLIC)]
    rules.append(f"{PUBLIC}{', '.join(public)}")
    parts += ["## Rules beside the layers\n", "\n".join(f"* {rule}." for rule in rules), ""]
    return "\n".join(parts)
