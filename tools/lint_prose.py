"""Check the English of docstrings, comments and documentation against docs/contributing/style.md.

Compare with tools/prose_baseline.json; exit 1 if a file has more or fewer findings:

    python tools/lint_prose.py

List every finding in some files:

    python tools/lint_prose.py FILE...

Write the baseline again, which fails if it would grow:

    python tools/lint_prose.py --update

The baseline holds the number of findings that each file still has. It only shrinks.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "tools/prose_baseline.json"
MAX_WORDS = 30
SOURCES = ("src", "tests", "benchmarks", "models", "tools")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs")
# Decisions are exempt, because their readers know the context.
EXEMPT = ("docs/decisions/", "tools/lint_prose.py")

BANNED = {
    "tell": r"tells?|told|telling",
    "person instead of component": r"whoever|somebody|nobody|who asks|anybody at all|of ours",
    "metaphor": r"journey|custody|vigil|bury|buried|innocent|last words|doorkeep\w*|let in|turned away|"
    r"looked after|look after|in vain|carried on|carries on|the house|the floors?|a room|the rooms?",
    "quantity without a name": r"so many|so much|so long(?! as)",
    "vague existence": r"what is there|what there is|what comes?|what came|there is nothing more",
}
PATTERNS = {rule: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for rule, words in BANNED.items()}
BAD_START = re.compile(r"(?:It|One|Those|What|Who|Whoever|Somebody|Nobody|That which|Of)\b(?!-)")
SEE_ONLY = re.compile(r"See `[^`]+`\.?")
CODE = re.compile(r"``.*?``|`[^`]*`|\[([^\]]*)\]\([^)]*\)|<[^>]+>|https?://\S+")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\[0-9\"(])")
BLOCK_START = re.compile(r"\n\s*\n|\n\s*[-*] |\n\s*(?:[A-Z]\w+:$|[\w*]+(?:, \w+)*: )", re.MULTILINE)
"""Starts of paragraphs, list items and entries of `Args:` and its like."""
WORD = re.compile(r"[A-Za-z][\w'-]*")


class Finding(NamedTuple):
    """Violation of a rule."""

    line: int
    rule: str
    text: str


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, including those of attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for position, statement in enumerate(body):
            if not (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                continue
            owner = isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            )
            before = body[position - 1] if position else None
            if (position == 0 and owner) or isinstance(before, ast.Assign | ast.AnnAssign):
                yield statement.lineno, statement.value.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each paragraph, list item and table cell, without code blocks and headings."""
    fenced, start, lines = False, 0, list[str]()
    for number, line in enumerate([*markdown.splitlines(), ""], 1):
        stripped = line.strip()
        if stripped.startswith("```"):
            fenced = not fenced
        item = re.match(r"(?:[-*+]|\d+\.)\s+", stripped)
        ends = fenced or not stripped or item or stripped.startswith(("#", "|", "```", ">"))
        if ends and lines:
            yield start, " ".join(lines)
            lines = []
        if fenced or not stripped or stripped.startswith(("#", "```")):
            continue
        if stripped.startswith("|"):
            for cell in stripped.strip("|").split("|"):
                yield number, cell.strip()
            continue
        if not lines:
            start = number
        lines.append(stripped[item.end() :] if item else stripped)


def check_words(line: int, text: str) -> Iterator[Finding]:
    """Find banned words."""
    plain = CODE.sub(r" \1 ", text)
    for rule, pattern in PATTERNS.items():
        for match in pattern.finditer(plain):
            yield Finding(line, rule, match.group())


def check_sentences(line: int, text: str) -> Iterator[Finding]:
    """Find sentences that are too long."""
    for block in BLOCK_START.split(text):
        plain = CODE.sub(r" \1code ", " ".join(block.split()))
        for sentence in SENTENCE_END.split(plain):
            count = len(WORD.findall(sentence))
            if count > MAX_WORDS:
                yield Finding(line, f"sentence of {count} words", sentence[:60])


def check_python(text: str) -> Iterator[Finding]:
    """Check one Python file."""
    for line, docstring in docstrings(ast.parse(text)):
        if SEE_ONLY.fullmatch(docstring.strip()):
            yield Finding(line, "only a reference", docstring)
        if match := BAD_START.match(docstring.lstrip()):
            yield Finding(line, "starts without a subject", match.group())
        yield from check_words(line, docstring)
        yield from check_sentences(line, docstring)
    for line, comment in comments(text):
        yield from check_words(line, comment)


def check_markdown(text: str) -> Iterator[Finding]:
    """Check one document."""
    for line, paragraph in paragraphs(text):
        yield from check_words(line, paragraph)
        yield from check_sentences(line, paragraph)


def check(path: Path) -> list[Finding]:
    """Return the findings of a file."""
    text = path.read_text()
    return list(check_python(text) if path.suffix == ".py" else check_markdown(text))


def files() -> Iterator[Path]:
    """Yield every file that the rules apply to."""
    found = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    for document in DOCUMENTS:
        path = ROOT / document
        found += path.rglob("*.md") if path.is_dir() else [path] if path.exists() else []
    for path in sorted(found):
        name = str(path.relative_to(ROOT))
        if "node_modules" not in path.parts and not name.startswith(EXEMPT):
            yield path


def main(arguments: list[str]) -> int:
    """Run the command line described above and return the exit status."""
    if arguments and arguments != ["--update"]:
        found = [(path, finding) for path in map(Path, arguments) for finding in check(path)]
        for path, (line, rule, text) in found:
            print(f"{path}:{line}: {rule}: {text}")
        return bool(found)
    counts = {str(path.relative_to(ROOT)): len(check(path)) for path in files()}
    counts = {name: count for name, count in counts.items() if count}
    known: dict[str, int] = json.loads(BASELINE.read_text()) if BASELINE.exists() else counts
    grown = [name for name, count in counts.items() if count > known.get(name, 0)]
    for name in grown:
        print(f"{name}: {counts[name]} findings, {known.get(name, 0)} allowed:", file=sys.stderr)
        main_file = ROOT / name
        for line, rule, text in check(main_file):
            print(f"  {name}:{line}: {rule}: {text}", file=sys.stderr)
    if grown:
        return 1
    if arguments or not BASELINE.exists():
        BASELINE.write_text(json.dumps(counts, indent=1) + "\n")
    elif counts != known:
        print("The prose got better: run `python tools/lint_prose.py --update`.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
