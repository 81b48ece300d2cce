"""Guides of the documentation (tutorials and how-tos), with their code blocks and commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = sorted([*(DOCS / "tutorials").glob("*.md"), *(DOCS / "how-to").glob("*.md")])
SHELLS = {"sh", "console"}
OPERATORS = set("();<>|&")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    title: str
    """`Server`, `Output`, `Change in FILE`, the name of a file to write, or empty."""
    text: str


def read_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in their order. The program that a `console` block shows has no prompts."""
    pattern = r'^```(\w*)(?: title="([^"]*)")?\n(.*?)^```$'
    found = re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(*parts) for parts in found]


def split_commands(block: Block) -> list[str]:
    """Return what is run at once: the whole block, or each line with a prompt of a `console` block."""
    if block.language != "console":
        return [block.text]
    return [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]


def find_argosy_commands(code: str) -> Iterator[list[str]]:
    """Yield the arguments of each `argosy` command of a program in shell, in containers too."""
    start = r"(?:^|[\s$(])(?:\S*bin/)?argosy(?:-gateway)?(?::[\d.]+)? +(?=[a-z])"
    for line in code.replace("\\\n", " ").splitlines():
        for found in re.finditer(start, line):
            lexer = shlex.shlex(line[found.end() :], posix=True, punctuation_chars="();<>|&")
            lexer.whitespace_split = True
            words = list(lexer)
            end = next((at for at, word in enumerate(words) if set(word) <= OPERATORS), len(words))
            is_redirected = words[end : end + 1] == [">"] and words[end - 1].isdigit()
            yield words[: end - is_redirected]
