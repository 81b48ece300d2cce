"""Sampled mutation testing: change one place in the source and check that a test fails.

    python tools/mutants.py sample --seed 7 --count 60 --output mutants.json
    python tools/mutants.py run mutants.json --output results.json [--paths pathmap.json]

Requires `coverage` 7.14 or newer beside the development dependencies. Tests run on copies of the
working tree, which load this file as a pytest plugin. The index of a mutant counts places in a walk
of the syntax tree that ignores names, strings, annotations and log calls. With `--paths`, a JSON
object from old to new files and folders, a sample therefore stays valid after renames.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coverage

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED_TESTS = ["integration/gateway/test_shared*.py", "unit/gateway/test_limit_filter.py"]
STORE_TESTS = ["unit/store", "integration/store", "integration/test_admin*.py", *SHARED_TESTS]
GATEWAY_TESTS = ["unit/gateway", "integration/gateway", "integration/test_gateway*.py"]
AREAS = {
    "policy": ["unit"],
    "gateway": GATEWAY_TESTS,
    "store": [*STORE_TESTS, "integration/test_cli_accounts.py"],
}
"""Packages of `src/argosy`, each with the files, folders and patterns of its tests in `tests`."""
EXCLUDED = "/migrations/"
CACHE = ROOT / ".coverage_mutants"
MAX_TESTS = 60
MAX_FILES_S = 120.0
"""Whole test files are chosen for a mutant as long as they take no longer than this."""
TEST_TIMEOUT_S = 60
INTERRUPT_GRACE_S = 20
COVERAGE_SETTINGS = """[run]
source = {root}/src/argosy
data_file = {root}/.coverage
parallel = true
context = ${{MUTANTS_TEST-}}
patch = _exit
sigterm = true
disable_warnings = no-data-collected, module-not-measured, module-not-imported
"""
ONE_SIDE = (ast.Lt, ast.Gt, ast.Eq, ast.Is, ast.In)
OTHER_SIDE = (ast.LtE, ast.GtE, ast.NotEq, ast.IsNot, ast.NotIn)
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = dict(
    zip(ONE_SIDE + OTHER_SIDE, OTHER_SIDE + ONE_SIDE, strict=True)
)
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
SKIPPED_FIELDS = {"decorator_list", "annotation", "returns", "bases"}


# --- places that can be mutated ---


@dataclass(slots=True)
class Site:
    """A place that can be mutated."""

    index: int
    kind: str
    change: str
    line: int
    end_line: int
    statement_line: int
    function: str
    at_import: bool
    """Whether the place runs when the module is imported."""
    edit: tuple[int, int, str]
    """Start and end of the text to replace, in bytes, and the new text."""
    shape: str = ""
    """Digest of the enclosing function's syntax without names, and the position therein."""


def mutations(node: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
    """Kind, change and replacement of each mutation of one node."""
    match node:
        case ast.Compare(left, ops, comparators):
            for i, op in enumerate(ops):
                new = COMPARISONS[type(op)]
                changed = ast.Compare(left, [*ops[:i], new(), *ops[i + 1 :]], comparators)
                yield "comparison", f"{type(op).__name__} to {new.__name__}", changed
        case ast.BoolOp(op, values):
            is_and = isinstance(op, ast.And)
            changed_op = ast.Or() if is_and else ast.And()
            yield "boolean", "And to Or" if is_and else "Or to And", ast.BoolOp(changed_op, values)
        case ast.BinOp(left, ast.Add(), right):
            yield "arithmetic", "Add to Sub", ast.BinOp(left, ast.Sub(), right)
        case ast.AugAssign(target, ast.Add(), value):
            yield "arithmetic", "Add to Sub", ast.AugAssign(target, ast.Sub(), value)
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", "not removed", operand
        case ast.Constant(bool() as flag):
            yield "bool", f"{flag} to {not flag}", ast.Constant(not flag)
        case ast.Constant(int() | float() as number):
            yield "constant", f"{number} to {number + 1}", ast.Constant(number + 1)
        case ast.Return(ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", "value to None", ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call() | ast.Await(ast.Call())):
            yield "call", "call to pass", ast.Pass()


def is_text(node: object) -> bool:
    """Whether a node is a string, a formatted string, or a sum with one."""
    match node:
        case ast.JoinedStr() | ast.Constant(str()):
            return True
        case ast.BinOp(left, ast.Add(), right):
            return is_text(left) or is_text(right)
    return False


def is_skipped(node: ast.AST) -> bool:
    """Whether a node is a docstring, a log call, or a block for type checkers."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(attr=method))):
            return method in LOG_METHODS
        case ast.Expr(value):
            return is_text(value)
        case ast.If(test):
            return ast.unparse(test).endswith("TYPE_CHECKING")
    return False


class SiteFinder:
    """Collects the places of one module in the order of the walk."""

    def __init__(self, source: str) -> None:
        self.sites: list[Site] = []
        self._lines = source.encode().splitlines(keepends=True)
        self._scopes: list[str] = []
        self._functions = 0
        self._statement_line = 1
        self._trail: list[str] = []
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        """Visit a node and its children, except those that are no code."""
        if is_skipped(node):
            return
        self._trail.append("Text" if is_text(node) else type(node).__name__)
        if is_text(node):
            return
        first, start, outside = len(self.sites), len(self._trail), not self._functions
        if isinstance(node, ast.stmt):
            self._statement_line = node.lineno
        for kind, change, new in mutations(node):
            self._add(node, kind, change, new)
        scopes, is_class = len(self._scopes), isinstance(node, ast.ClassDef)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._scopes.append(node.name)
        for name, value in ast.iter_fields(node):
            if name in SKIPPED_FIELDS or (is_class and name == "keywords"):
                continue
            depth = is_function and name == "body"
            self._functions += depth
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)
            self._functions -= depth
        del self._scopes[scopes:]
        if is_function or (outside and isinstance(node, ast.stmt) and not is_class):
            digest = hashlib.sha256(" ".join(self._trail[start:]).encode()).hexdigest()[:12]
            for position, site in enumerate(self.sites[first:]):
                site.shape = site.shape or f"{digest}/{position}"

    def _add(self, node: Any, kind: str, change: str, new: ast.AST) -> None:  # noqa: ANN401 - any with a position
        start = sum(map(len, self._lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, self._lines[: node.end_lineno - 1])) + node.end_col_offset
        text = ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})"
        where = node.lineno, node.end_lineno, self._statement_line, ".".join(self._scopes)
        at_import = not self._functions
        self.sites.append(
            Site(len(self.sites), kind, change, *where, at_import, (start, end, text))
        )


def find_sites(file: Path) -> list[Site]:
    """All places of a file, none if there is no such file."""
    return SiteFinder(file.read_text()).sites if file.is_file() else []


def source_files(root: Path, area: str) -> list[str]:
    """Python files of an area, relative to the root of the tree."""
    names = (str(file.relative_to(root)) for file in (root / "src/argosy" / area).rglob("*.py"))
    return sorted(name for name in names if EXCLUDED not in name)


def sample(seed: int, count: int) -> list[dict[str, Any]]:
    """The places of each area with the lowest digests of seed, file and index."""
    mutants = []
    for area in AREAS:
        sites = {
            hashlib.sha256(f"{seed}:{name}:{site.index}".encode()).digest(): (name, site)
            for name in source_files(ROOT, area)
            for site in find_sites(ROOT / name)
        }
        for _, (name, site) in sorted(sites.items())[: count // len(AREAS)]:
            source = (ROOT / name).read_text().splitlines()[site.line - 1].strip()
            mutant = {"area": area, "file": name, **asdict(site), "source": source}
            del mutant["edit"]
            mutants.append(mutant)
    return mutants


def locate(
    root: Path, mutant: dict[str, Any], paths: dict[str, str]
) -> tuple[str, Site, str] | None:
    """File and place of a mutant in this tree, and what differs from its record."""
    name, change, shape = str(mutant["file"]), mutant["change"], mutant["shape"]
    old = max((p for p in paths if f"{name}/".startswith(f"{p}/")), key=len, default="")
    name = paths[old] + name.removeprefix(old) if old else name
    sites = find_sites(root / name)
    at_index = [s for s in sites if (s.index, s.change) == (mutant["index"], change)]
    if at_index and at_index[0].shape == shape:
        return name, at_index[0], ""
    for names in ([name], source_files(root, mutant["area"])):
        all_sites = [(n, site) for n in names for site in find_sites(root / n)]
        same = [(n, s) for n, s in all_sites if (s.change, s.shape) == (change, shape)]
        if len(same) == 1:
            return *same[0], "other index, same shape"
    return (name, at_index[0], "same index, other shape") if at_index else None


# --- pytest plugin ---


def pytest_runtest_logstart(nodeid: str) -> None:
    """Attribute the lines that run from now on, in child processes too, to this test function."""
    os.environ["MUTANTS_TEST"] = nodeid.partition("[")[0]
    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(os.environ["MUTANTS_TEST"])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write function, duration and failure of each phase of a test."""
    if "MUTANTS_REPORT" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ["MUTANTS_REPORT"]).open("a") as file:
            entry = report.nodeid.partition("[")[0], report.duration, report.failed
            file.write(json.dumps(entry) + "\n")


def pytest_sessionfinish() -> None:
    """Save the lines of this process, which pytest-xdist may end without notice."""
    if (current := coverage.Coverage.current()) is not None:
        current.stop()
        current.save()


# --- runs of pytest on a copy ---


@dataclass(frozen=True, slots=True)
class TestRun:
    """The result of one run of pytest."""

    code: int | None
    """Exit status; None after a timeout."""
    failed: list[str]
    seconds: dict[str, float]
    """Duration of each test function."""


class TreeCopy:
    """A copy of the working tree, whose code its tests import. It runs one pytest at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._writes = 0
        skipped = (".git", ".venv*", "__pycache__", ".*_cache", ".coverage*", ".hypothesis")
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*skipped))

    def environment(self, **variables: str) -> dict[str, str]:
        """Variables of the tests; with CI set, hypothesis draws the same examples each time."""
        inherited = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
        path = f"{self.root / 'src'}{os.pathsep}{self.root / 'tools'}"
        return inherited | {"PYTHONPATH": path, "CI": "1"} | variables

    def write(self, name: str, content: bytes) -> None:
        """Replace a file; a time of its own for each write invalidates the bytecode."""
        self._writes += 1
        (self.root / name).write_bytes(content)
        os.utime(self.root / name, (self._writes, self._writes))

    async def check_import(self) -> None:
        """Raise unless the package is imported from here."""
        code = "import argosy; print(argosy.__file__)"
        file = await output_of(sys.executable, "-c", code, cwd=self.root, env=self.environment())
        if not Path(file).is_relative_to(self.root / "src"):
            raise RuntimeError(f"tests in {self.root} would import {file}")

    async def pytest(self, *arguments: str, limit_s: float | None, **variables: str) -> TestRun:
        """Run pytest, and end every process that it leaves behind."""
        report = self.root / ".mutants_report"
        report.write_text("")
        with (self.root / ".mutants_output").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pytest", "-p", "mutants", "-p", "no:cacheprovider"),
                *("-q", "--tb=short", f"--timeout={TEST_TIMEOUT_S}", *arguments),
                cwd=self.root,
                env=self.environment(MUTANTS_REPORT=str(report), **variables),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code: int | None = await asyncio.wait_for(process.wait(), limit_s)
            except TimeoutError:
                code = None
                process.send_signal(signal.SIGINT)  # fixtures stop their servers
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), INTERRUPT_GRACE_S)
            finally:
                end_processes(process.pid, f"MUTANTS_REPORT={report}")
        entries = [json.loads(line) for line in report.read_text().splitlines()]
        seconds = dict.fromkeys((test for test, _, _ in entries), 0.0)
        for test, duration, _ in entries:
            seconds[test] += duration
        return TestRun(code, [test for test, _, failed in entries if failed], seconds)


def end_processes(group: int, setting: str) -> None:
    """Kill a process group, and all processes with this setting in their environment."""
    pids = [-group]
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if setting.encode() in file.read_bytes().split(b"\0"):
                pids.append(int(file.parent.name))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def output_of(*command: str, **options: Any) -> str:  # noqa: ANN401 - options of any type
    """Standard output of a command."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, **options)
    return (await process.communicate())[0].decode().strip()


# --- tests of a mutant ---


@dataclass(frozen=True, slots=True)
class TestMap:
    """Lines that the tests of one area execute without mutants."""

    seconds: dict[str, float]
    """Duration of each test function."""
    lines: dict[str, dict[str, list[str]]]
    """For each file and line, the test functions that execute it."""
    failed: list[str]

    def choose(self, root: Path, name: str, site: Site) -> tuple[list[str], str]:
        """Test functions or files for a mutant, and how they were found."""
        lines = self.lines.get(name, {})
        span = range(site.line, site.end_line + 1)
        executing = {test for line in span for test in lines.get(str(line), ())}
        executing = executing or set(lines.get(str(site.statement_line), ()))
        if executing and not site.at_import:
            return self._smallest(executing), "executing the line"
        if files := self._mentioning(root, name, site.function):
            return files, "mentioning the class"
        executing = {test for tests in lines.values() for test in tests}
        return self._smallest(executing), "executing the module" if executing else "uncovered"

    def _smallest(self, tests: set[str]) -> list[str]:
        """At most MAX_TESTS test functions, those with the fewest lines, grouped by file."""
        every = (tests for by_line in self.lines.values() for tests in by_line.values())
        sizes = Counter(itertools.chain.from_iterable(every))
        chosen = sorted(tests, key=lambda test: (sizes[test], test))[:MAX_TESTS]
        files = list(dict.fromkeys(map(file_of, chosen)))
        return sorted(chosen, key=lambda test: files.index(file_of(test)))

    def _mentioning(self, root: Path, name: str, function: str) -> list[str]:
        """Test files that mention the enclosing class, else any class of the module."""
        body = ast.parse((root / name).read_text()).body
        classes = {node.name for node in body if isinstance(node, ast.ClassDef)}
        names = {function.partition(".")[0]} & classes or classes
        word = re.compile(rf"\b(?:{'|'.join(names) or '(?!)'})\b")
        counts = {f: len(word.findall((root / f).read_text())) for f in map(file_of, self.seconds)}
        files = sorted(filter(counts.__getitem__, counts), key=lambda f: (-counts[f], f))
        while len(files) > 1 and self.duration(files) > MAX_FILES_S:
            files.pop()
        return files

    def duration(self, tests: list[str]) -> float:
        """Seconds that test functions or files take."""
        return sum(s for t, s in self.seconds.items() if t in tests or file_of(t) in tests)


def file_of(test: str) -> str:
    """The file of a test function."""
    return test.partition("::")[0]


async def map_tests(area: str, copy: TreeCopy, workers: int) -> TestMap:
    """Run the tests of an area under coverage, unless that was done for the same files."""
    root = copy.root
    tests = sorted(str(t.relative_to(root)) for p in AREAS[area] for t in (root / "tests").glob(p))
    digest = hashlib.sha256(repr(tests).encode())
    for file in sorted(file for top in ("src", "tests") for file in (root / top).rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    cached = CACHE / f"{area}-{digest.hexdigest()[:16]}.json"
    if not cached.exists():
        settings = root / "mutants.ini"
        settings.write_text(COVERAGE_SETTINGS.format(root=root))
        arguments = ["--numprocesses", str(workers), "--dist", "loadfile", *tests]
        run = await copy.pytest(*arguments, limit_s=None, COVERAGE_PROCESS_START=str(settings))
        measured = coverage.Coverage(data_file=str(root / ".coverage"), config_file=False)
        measured.combine()
        lines = {}
        for name in source_files(root, area):
            contexts = measured.get_data().contexts_by_lineno(str(root / name)).items()
            lines[name] = {str(n): [t for t in found if t] for n, found in contexts if any(found)}
        measured.erase()
        CACHE.mkdir(exist_ok=True)
        cached.write_text(json.dumps(asdict(TestMap(run.seconds, lines, run.failed))))
    return TestMap(**json.loads(cached.read_text()))


# --- results ---


class MutantRunner:
    """Runs mutants on copies, and remembers which tests pass without a mutant."""

    def __init__(self, copies: list[TreeCopy], maps: dict[str, TestMap]) -> None:
        self._copies: asyncio.Queue[TreeCopy] = asyncio.Queue()
        for copy in copies:
            self._copies.put_nowait(copy)
        self._maps = maps
        self._passing: dict[str, bool] = {}

    async def run(self, mutant: dict[str, Any], paths: dict[str, str]) -> dict[str, Any]:
        """The record of a mutant with its result."""
        copy = await self._copies.get()
        started = time.monotonic()
        try:
            if (place := locate(copy.root, mutant, paths)) is None:
                return mutant | {"status": "lost"}
            name, site, note = place
            tests = self._maps[mutant["area"]]
            chosen, why = tests.choose(copy.root, name, site)
            result = mutant | {"file": name, "line": site.line, "function": site.function}
            result |= {"note": note, "chosen": why, "status": "survived"}
            if chosen:
                limit_s = 60 + 3 * tests.duration(chosen)
                result |= await self._judge(copy, name, site.edit, chosen, limit_s)
            return result | {"seconds": round(time.monotonic() - started, 1)}
        finally:
            self._copies.put_nowait(copy)

    async def _judge(
        self,
        copy: TreeCopy,
        name: str,
        edit: tuple[int, int, str],
        tests: list[str],
        limit_s: float,
    ) -> dict[str, Any]:
        """Killed if a test fails twice with the mutant and passes without; others are set aside."""
        start, end, new = edit
        original = (copy.root / name).read_bytes()
        mutated = original[:start] + new.encode() + original[end:]
        unsteady: list[str] = []
        try:
            while True:
                copy.write(name, mutated)
                skipped = [f"--deselect={test}" for test in unsteady]
                run = await copy.pytest("-x", *tests, *skipped, limit_s=limit_s)
                result = {"tests": len(run.seconds), "unsteady": unsteady}
                if run.code is None:
                    return {"status": "timeout"} | result
                if run.code in {0, 5}:  # all passed, or none was left
                    return {"status": "survived"} | result
                if not run.failed:
                    return {"status": "killed", "killed_by": "error at collection"} | result
                test = run.failed[0]
                if (await copy.pytest(test, limit_s=limit_s)).code != 0:
                    copy.write(name, original)
                    if test not in self._passing:
                        clean = await copy.pytest(test, limit_s=limit_s)
                        self._passing[test] = clean.code == 0
                    if self._passing[test]:
                        return {"status": "killed", "killed_by": test} | result
                unsteady.append(test)
        finally:
            copy.write(name, original)


def write_json(file: Path, value: object) -> None:
    """Write a value, one item a line."""
    file.write_text(json.dumps(value, indent=1) + "\n")


async def run_mutants(
    mutants: list[dict[str, Any]], paths: dict[str, str], workers: int, output: Path
) -> None:
    """Run all mutants, and write the results after each."""
    started = time.monotonic()
    areas = [area for area in AREAS if any(mutant["area"] == area for mutant in mutants)]
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copies = [TreeCopy(Path(folder, str(i))) for i in range(workers)]
        for copy in copies:
            await copy.check_import()
        maps = {area: await map_tests(area, copies[0], workers) for area in areas}
        done: list[dict[str, Any]] = []
        report = {
            "machine": f"{platform.platform()}, {os.cpu_count()} CPUs",
            "python": platform.python_version(),
            "commit": await output_of("git", "describe", "--always", "--dirty", cwd=ROOT),
            "command": shlex.join(["python", "tools/mutants.py", *sys.argv[1:]]),
            "mapping_s": round(time.monotonic() - started, 1),
            "failed_without_mutants": [test for area in areas for test in maps[area].failed],
        }
        runner = MutantRunner(copies, maps)
        for next_done in asyncio.as_completed([runner.run(mutant, paths) for mutant in mutants]):
            done.append(result := await next_done)
            done.sort(key=lambda m: (areas.index(m["area"]), m["file"], m["index"]))
            counts = {a: Counter(m["status"] for m in done if m["area"] == a) for a in areas}
            results = {"seconds": round(time.monotonic() - started, 1), "counts": counts}
            write_json(output, report | results | {"mutants": done})
            where = f"{result['file']}:{result['line']}: {result['change']}"
            sys.stderr.write(f"{len(done)}/{len(mutants)} {where}: {result['status']}\n")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    sampling = commands.add_parser("sample", help="choose mutants")
    sampling.add_argument("--seed", type=int, default=7)
    sampling.add_argument("--count", type=int, default=60)
    running = commands.add_parser("run", help="run the tests on each mutant of a sample")
    running.add_argument("mutants", type=Path)
    running.add_argument("--paths", type=Path, help="JSON object from old to new paths")
    running.add_argument("--workers", type=int, default=2, help="number of copies")
    for command in (sampling, running):
        command.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "sample":
        mutants = sample(options.seed, options.count)
        write_json(options.output, mutants)
    else:
        mutants = json.loads(options.mutants.read_text())
        entries = json.loads(options.paths.read_text()) if options.paths else {}
        paths = {old.rstrip("/"): new.rstrip("/") for old, new in entries.items()}
        asyncio.run(run_mutants(mutants, paths, options.workers, options.output))


if __name__ == "__main__":
    main()
