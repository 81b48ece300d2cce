"""Parser of topic files, and expansion of their small grammar of questions, answers and tables.

A topic file has blocks separated by blank lines. Lines with `?` are ways to ask. Lines with `!` are answers, which may
continue on the following lines. A line with `@` names the columns of a table, and lines like `- a | b` are its rows.
In every text `[a|b]` selects one alternative, and `{column}` is replaced by the row's cell.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

DATA = Path(__file__).resolve().parent.parent / "data"
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Question with its answer. The case and punctuation of an `exact` question must not be varied."""

    user: str
    reply: str
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """Paraphrases of a question, and answers that fit all of them."""

    questions: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topic:
    """Parsed topic file. `rows` is empty if the file has no table."""

    name: str
    weight: int
    rows: tuple[dict[str, str], ...]
    blocks: tuple[Block, ...]

    def draw(self, rng: Random) -> Exchange:
        """Return a random exchange. The probability of a block is proportional to its number of paraphrases."""
        block = rng.choices(self.blocks, [len(block.questions) for block in self.blocks])[0]
        slots = rng.choice(self.rows) if self.rows else {}
        question = rng.choice(block.questions)
        answer = rng.choice(block.answers)
        return Exchange(expand(question, rng, slots), expand(answer, rng, slots))


def expand(template: str, rng: Random, slots: dict[str, str] | None = None) -> str:
    """Select among `[a|b]` alternatives, then fill `{slot}`. `{Slot}` gets an upper-case first letter."""
    text = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), template)
    return _SLOT.sub(lambda match: _cell(match.group(1), slots or {}), text).strip()


def capitalise(text: str) -> str:
    """Return the text with its first letter in upper case and the rest unchanged."""
    return text[:1].upper() + text[1:]


def _cell(name: str, slots: dict[str, str]) -> str:
    if name in slots:
        return slots[name]
    return capitalise(slots[name.lower()])


def read_topic(path: Path) -> Topic:
    """Parse a topic file.

    Raises:
        ValueError: A line has an unknown mark. The message contains the line.
    """
    weight, columns = 1, list[str]()
    rows: list[dict[str, str]] = []
    blocks: list[Block] = []
    for chunk in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
        questions: list[str] = []
        answers: list[str] = []
        for line in chunk.strip("\n").splitlines():
            mark, _, rest = line.partition(" ")
            if answers and mark not in {"!", "?"}:
                answers[-1] += "\n" + line
            elif mark == "%":
                weight = int(rest.split()[-1])
            elif mark == "@":
                columns = rest.split()
            elif mark == "-":
                cells = [cell.strip() for cell in rest.split("|")]
                rows.append(dict(zip(columns, cells, strict=True)))
            elif mark == "?":
                questions.append(rest)
            elif mark == "!":
                answers.append(rest)
            elif mark != "#":
                message = f"{path.name}: a line must start with one of % @ - ? ! #: {line!r}"
                raise ValueError(message)
        if questions:
            blocks.append(Block(_spread(questions), tuple(answers)))
    return Topic(path.stem, weight, tuple(rows), tuple(blocks))


def _spread(questions: list[str]) -> tuple[str, ...]:
    """Split whole-line alternatives, so that each way to ask is equally likely."""
    spread: list[str] = []
    for question in questions:
        is_alternatives = (
            question.startswith("[") and question.endswith("]") and question.count("[") == 1
        )
        spread.extend(question[1:-1].split("|") if is_alternatives else [question] * 4)
    return tuple(spread)


def read_lines(name: str) -> tuple[str, ...]:
    """Return the non-empty lines of a data file."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def read_paragraphs(name: str) -> tuple[str, ...]:
    """Return the paragraphs of a data file, which are separated by blank lines."""
    chunks = re.split(r"\n\s*\n", (DATA / name).read_text(encoding="utf-8"))
    return tuple(chunk.strip() for chunk in chunks if chunk.strip())


def read_topics() -> tuple[Topic, ...]:
    """Return all topic files of the data folder, in the order of their names."""
    plain = {
        "lists.txt", "names.txt", "plots.txt", "prose.txt", "tool_nouns.txt", "tool_verbs.txt",
    }  # fmt: skip
    paths = sorted(path for path in DATA.glob("*.txt") if path.name not in plain)
    return tuple(read_topic(path) for path in paths)
