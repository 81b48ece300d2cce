"""Print the shape of the code: sizes, concepts, and rules about imports and functions.

    python -m tools.shape [--root FOLDER] [--json] [--places] [--check]

`--places` lists what each rule found; only files that git knows are counted. `--check`, a part of `make check`,
fails if a rule finds more than its limit in `LIMITS`. Limits only fall: lower one when you made its count smaller.

Private module: a module of `argosy` that lies in a package with public names (what its `__init__.py` imports), is not
one of them, and is no such package itself. A test may import it if it lies in `tests/unit/X` or `tests/X` and one of
the module's packages is called X.

Circle: modules that import each other, at any level and also for types only.

Long function: more than 60 lines from `def` to its end. A list is not counted: a function with at most
five statements that branch or loop, such as one that only declares, registers, builds or copies. A kernel is
not counted either: a function below `execution/kernels`, whose loop a reader wants to see whole.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_LINES = 60
MAX_BRANCHES_OF_LIST = 5
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.Match)
LIMITS = {
    "test files that import foreign private modules": 81,
    "circles of imports": 0,
    "functions over 60 lines that are no list or kernel": 0,
}
RECORDS = {"NamedTuple", "Struct", "TypedDict", "dataclass"}
# Where the kernels for GPUs were before they had a folder with the others: earlier commits are measured, too.
KERNELS = (".execution.kernels.", ".execution.gpu.")
PATH_TABLE = "docs/explanation/request-lifecycle.md"
CALLS_TEST = "tests/unit/test_request_path.py"


@dataclass
class Module:
    """A Python file of the source: its name, its tree and the modules that it imports."""

    name: str
    path: str
    tree: ast.Module
    imports: set[str] = field(default_factory=set)


def list_files(root: Path, *patterns: str) -> list[str]:
    """Return the Python files that git knows and the folder has, as paths below the root."""
    done = subprocess.run(
        ["git", "-C", str(root), "ls-files", *patterns], capture_output=True, text=True, check=True
    )
    return [path for path in done.stdout.splitlines() if (root / path).is_file()]


def name_module(path: str) -> str:
    """Return the dotted name of a file below `src`."""
    parts = Path(path).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def list_imports(tree: ast.Module, package: str, names: set[str]) -> set[str]:
    """Return the modules of `argosy` that a file imports.

    `from argosy.x import y` imports the module `argosy.x.y` where there is one, and else `argosy.x`.
    """
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if whole in names or base in names:
                    found.add(whole if whole in names else base)
    return found


def read_source(root: Path, paths: list[str]) -> dict[str, Module]:
    """Parse the source and return its modules by name."""
    modules = {}
    for path in paths:
        name = name_module(path)
        modules[name] = Module(name, path, ast.parse((root / path).read_text()))
    for module in modules.values():
        package = module.name
        if not module.path.endswith("__init__.py"):
            package = package.rpartition(".")[0]
        module.imports = list_imports(module.tree, package, set(modules)) - {module.name}
    return modules


def list_public_names(module: Module) -> set[str]:
    """Return what the `__init__.py` of a package imports from the package, or lists in `__all__`."""
    if not module.path.endswith("__init__.py"):
        return set()
    names = set()
    for node in module.tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("argosy."):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names |= set(ast.literal_eval(node.value))
    return names


def find_private_modules(modules: dict[str, Module]) -> set[str]:
    """Return the modules that lie in a package with public names and have none themselves."""
    public = {name: list_public_names(module) for name, module in modules.items()}
    packages = {name for name, names in public.items() if names} - {"argosy"}
    return {
        name
        for name in modules.keys() - packages
        if any(name.startswith(f"{package}.") for package in packages)
        and name.rpartition(".")[2] not in public.get(name.rpartition(".")[0], set())
    }


def is_owner(test: str, module: str) -> bool:
    """Whether a test is a test of one of a module's packages, so that it may import the module."""
    folders = [folder for folder in Path(test).parts[1:-1] if folder not in {"unit", "integration"}]
    in_tier = not test.startswith(("tests/integration/", "tests/chaos/", "tests/e2e/"))
    return in_tier and bool(folders) and folders[0] in module.split(".")[:-1]


def find_private_imports(
    root: Path, tests: list[str], modules: dict[str, Module]
) -> dict[str, list[str]]:
    """Return, for each test file, the private modules that it may not import."""
    private = find_private_modules(modules)
    found = {}
    for test in tests:
        imports = list_imports(ast.parse((root / test).read_text()), "", set(modules)) & private
        if foreign := sorted(name for name in imports if not is_owner(test, name)):
            found[test] = foreign
    return found


def find_circles(modules: dict[str, Module]) -> list[list[str]]:
    """Return the groups of modules that import each other (strongly connected components)."""
    order: list[str] = []
    seen: set[str] = set()
    for start in modules:
        visit(start, {name: module.imports for name, module in modules.items()}, seen, order)
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for imported in module.imports:
            importers[imported].add(module.name)
    seen = set()
    circles = []
    for name in reversed(order):
        group: list[str] = []
        visit(name, importers, seen, group)
        if len(group) > 1:
            circles.append(sorted(group))
    return circles


def visit(start: str, edges: dict[str, set[str]], seen: set[str], order: list[str]) -> None:
    """Append what can be reached from a module and was not seen, each after what it reaches."""
    if start in seen:
        return
    seen.add(start)
    stack = [(start, iter(sorted(edges.get(start, ()))))]
    while stack:
        name, targets = stack[-1]
        for target in targets:
            if target not in seen:
                seen.add(target)
                stack.append((target, iter(sorted(edges.get(target, ())))))
                break
        else:
            order.append(name)
            stack.pop()


def names_of_bases(node: ast.ClassDef) -> set[str]:
    """Return the names of a class's bases and decorators, without their modules."""
    found = set()
    for expression in [*node.bases, *node.decorator_list]:
        target = expression.func if isinstance(expression, ast.Call) else expression
        target = target.value if isinstance(target, ast.Subscript) else target
        found.add(target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""))
    return found


def is_list(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function branches so seldom that its length is that of a list."""
    return sum(isinstance(node, BRANCHES) for node in ast.walk(function)) <= MAX_BRANCHES_OF_LIST


def find_long_functions(modules: dict[str, Module]) -> list[str]:
    """Return the functions that are long, and neither lists nor kernels, with their lengths."""
    found = []
    for module in modules.values():
        if any(folder in module.name for folder in KERNELS):
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_LINES and not is_list(node):
                found.append(f"{module.path}:{node.lineno} {node.name} ({lines})")
    return found


def read_path_types(root: Path) -> dict[str, int] | None:
    """Return how many types the documentation lists for a prompt, for a token and beside them, if it does."""
    page = root / PATH_TABLE
    text = page.read_text() if page.is_file() else ""
    section = text.partition("## Types on the path\n")[2].partition("\n## ")[0]
    counts = {"prompt": 0, "token": 0, "beside": 0}
    for part in section.split("\n### ")[1:]:
        title, _, table = part.partition("\n")
        kind = next((kind for kind in counts if kind in title), "beside")
        counts[kind] += len(re.findall(r"^\| `\w+`", table, re.MULTILINE))
    return counts if section else None


def read_calls(root: Path) -> dict[str, int] | None:
    """Return the recorded numbers of Python calls of a small request, if a test records them."""
    test = root / CALLS_TEST
    text = test.read_text() if test.is_file() else ""
    recorded = re.search(r"^MAX_CALLS = (\{[^}]*\})", text, re.MULTILINE)
    return ast.literal_eval(recorded.group(1)) if recorded else None


def count_lines(root: Path, paths: list[str]) -> int:
    """Return the lines of files, as `wc -l` counts them."""
    return sum((root / path).read_bytes().count(b"\n") for path in paths)


def measure(root: Path) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the numbers of a checkout, and the places that the rules found."""
    source = list_files(root, "src/*.py")
    tests = list_files(root, "tests/*.py")
    modules = read_source(root, source)
    classes = [n for m in modules.values() for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef)]
    bases = [names_of_bases(node) for node in classes]
    private = find_private_imports(root, tests, modules)
    circles = find_circles(modules)
    long_functions = find_long_functions(modules)
    numbers: dict[str, Any] = {
        "lines of source": count_lines(root, source),
        "lines of tests": count_lines(root, tests),
        "lines of tests/support": count_lines(root, list_files(root, "tests/support/*.py")),
        "files of source": len(source),
        "files of tests": len(tests),
        "classes": len(classes),
        "records (dataclass, Struct, NamedTuple, TypedDict)": sum(map(bool, map(RECORDS.intersection, bases))),
        "protocols": sum("Protocol" in names for names in bases),
        "types on the path": read_path_types(root),
        "Python calls of a small request": read_calls(root),
        "test files that import foreign private modules": len(private),
        "circles of imports": len(circles),
        "functions over 60 lines that are no list or kernel": len(long_functions),
    }  # fmt: skip
    places = {
        "foreign private modules": [f"{test}: {', '.join(names)}" for test, names in private.items()],
        "circles": [", ".join(circle) for circle in circles],
        "long functions": long_functions,
    }  # fmt: skip
    return numbers, places


def format_number(value: object) -> str:
    """Return the text of a number of the table."""
    if value is None:
        return "not listed yet"
    if isinstance(value, dict):
        return ", ".join(f"{count} {title}" for title, count in value.items())
    return f"{value:,}"


def main() -> int:
    """Print the table, or the numbers as JSON."""
    parser = argparse.ArgumentParser(description="Print the shape of the code.")
    parser.add_argument("--root", type=Path, default=Path(), help="checkout to measure")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--places", action="store_true", help="list what each rule found")
    parser.add_argument("--check", action="store_true", help="fail above the limits")
    options = parser.parse_args()
    numbers, places = measure(options.root)
    if options.json:
        head = ["git", "-C", str(options.root), "rev-parse", "HEAD"]
        commit = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
        print(json.dumps({"commit": commit, **numbers}, indent=2))
        return 0
    width = max(map(len, numbers))
    for title, value in numbers.items():
        print(f"{title:<{width}}  {format_number(value):>7}")
    for title, found in places.items() if options.places else ():
        print(f"\n{title}:")
        print("\n".join(f"  {place}" for place in found) or "  none")
    above = [rule for rule, limit in LIMITS.items() if numbers[rule] > limit]
    if options.check and above:
        print(f"Above the limit: {', '.join(above)}. --places lists them.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
