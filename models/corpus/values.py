"""Values of tool parameters and JSON fields: how a value appears in JSON, and how a user writes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from models.corpus.copying import NAMES, draw_phrase
from models.corpus.lists import KINDS, join_members
from models.corpus.numbers import spell_number
from models.corpus.patterns import DATA, capitalise
from models.corpus.unknown import draw_nonsense

MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
_CITIES = (
    "Paris", "London", "Rome", "Berlin", "Madrid", "Tokyo", "New York", "Cairo", "Vienna", "Sydney",
    "Oslo", "Lisbon", "Dublin", "Prague", "Athens", "Boston", "Chicago", "Toronto", "Mumbai",
    "Hamburg", "San Francisco", "Milan", "Seoul", "Zurich", "Munich", "Warsaw", "Lima", "Kyoto",
)  # fmt: skip
_SURNAMES = (
    "Miller",
    "Baker",
    "Stone",
    "Hill",
    "Wood",
    "Carter",
    "Fisher",
    "Young",
    "Reed",
    "Frost",
    "Cole",
)
_LANGUAGES = ("French", "German", "Spanish", "Italian", "Japanese", "Chinese", "English", "Dutch")
_CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "AUD", "SEK")
_COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple", "grey")
_DAYS = (
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "today",
    "tomorrow",
)
_FOLDERS = (
    "docs",
    "src",
    "home",
    "data",
    "tmp",
    "notes",
    "images",
    "reports",
    "tests",
    "music",
    "build",
)
_ENDINGS = ("txt", "md", "py", "json", "csv", "log", "png", "pdf", "html", "yaml")
_DOMAINS = ("example.com", "mail.com", "example.org", "test.net", "work.com")
_COMMANDS = (
    "ls -la", "pwd", "git status", "make test", "cat {0}.txt", "grep {0} notes.md",
    "python {0}.py", "mkdir {0}", "rm {0}.log", "echo {0}",
)  # fmt: skip


def _read_words() -> tuple[str, ...]:
    """Return the lower-case words of the topic files. The words of `held_out.json` are not among these files."""
    words: dict[str, None] = {}
    for path in sorted(DATA.glob("*.txt")):
        for word in re.findall(r"\b[a-z]{4,10}\b", path.read_text(encoding="utf-8")):
            words.setdefault(word)
    return tuple(words)


WORDS = _read_words()


@dataclass(frozen=True, slots=True)
class Value:
    """Value in JSON, and the text by which a user gives it."""

    json: Any
    text: str


def draw_word(rng: Random) -> str:
    """Return an ordinary word, or a word that does not exist."""
    return draw_nonsense(rng) if rng.random() < 0.3 else rng.choice(WORDS)


def _text(draw: Callable[[Random], str]) -> Callable[[Random], Value]:
    def make(rng: Random) -> Value:
        text = draw(rng)
        return Value(text, text)

    return make


def _quoted(draw: Callable[[Random], str]) -> Callable[[Random], Value]:
    def make(rng: Random) -> Value:
        text = draw(rng).replace('"', "")
        return Value(text, f'"{text}"' if rng.random() < 0.7 else f"'{text}'")

    return make


def _integer(low: int, high: int) -> Callable[[Random], Value]:
    def make(rng: Random) -> Value:
        number = rng.randint(low, high)
        spelled = number <= 12 and rng.random() < 0.15
        return Value(number, spell_number(number) if spelled else str(number))

    return make


def _decimal(rng: Random) -> Value:
    number = rng.randint(1, 99) + rng.choice((0.5, 0.25, 0.1, 0.75, 0.9, 0.99))
    return Value(number, str(number))


def _city(rng: Random) -> str:
    return capitalise(draw_nonsense(rng)) if rng.random() < 0.2 else rng.choice(_CITIES)


def _name(rng: Random) -> str:
    return capitalise(draw_nonsense(rng)) if rng.random() < 0.15 else rng.choice(NAMES)


def _full_name(rng: Random) -> str:
    surname = rng.choice((rng.choice(_SURNAMES), capitalise(draw_nonsense(rng))))
    return f"{_name(rng)} {surname}"


def _url(rng: Random) -> str:
    page = rng.choice(("", f"/{draw_word(rng)}"))
    return f"https://{draw_word(rng)}.{rng.choice(('com', 'org', 'net'))}{page}"


def _code(rng: Random) -> str:
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 5)))
    mark = rng.choice(("-", "-", "", "_"))
    return rng.choice(
        (
            f"{letters}{mark}{digits}",
            f"{letters}{mark}{digits}",
            digits,
            f"{letters.lower()}{digits}",
        )
    )


def _email(rng: Random) -> str:
    return f"{_name(rng).lower()}@{rng.choice(_DOMAINS)}"


def _file(rng: Random) -> str:
    return f"{draw_word(rng)}.{rng.choice(_ENDINGS)}"


def _directory(rng: Random) -> str:
    return rng.choice(("/", "", "./")) + "/".join(
        rng.choice((rng.choice(_FOLDERS), draw_word(rng))) for _ in range(rng.randint(1, 2))
    )


def _date(rng: Random) -> str:
    return f"{rng.randint(2020, 2029)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _topic(rng: Random) -> str:
    _, plural, members = rng.choice(KINDS)
    return rng.choice((plural, rng.choice(members), draw_word(rng), f"{draw_word(rng)} {plural}"))


def _expression(rng: Random) -> str:
    signs = [rng.choice("+-*/") for _ in range(rng.choice((1, 1, 1, 2)))]
    gap = rng.choice((" ", " ", ""))
    return str(rng.randint(2, 999)) + "".join(f"{gap}{s}{gap}{rng.randint(2, 99)}" for s in signs)


def _phone(rng: Random) -> str:
    return "+" + " ".join(str(rng.randint(10, 999)) for _ in range(3))


def _titled(rng: Random) -> str:
    words = [draw_word(rng) for _ in range(rng.randint(1, 3))]
    return rng.choice((capitalise(" ".join(words)), " ".join(map(capitalise, words))))


def _time(rng: Random) -> str:
    return f"{rng.randint(0, 23):02}:{rng.choice((0, 15, 30, 45, 5, 20)):02}"


def _things(rng: Random) -> Value:
    size = rng.choice((1, 2, 2, 3, 3, 4))
    members = rng.choice(KINDS)[2]
    source = (
        members
        if rng.random() < 0.5 and len(members) >= size
        else [draw_word(rng) for _ in range(size)]
    )
    picked = tuple(rng.sample(source, size))
    return Value(list(picked), join_members(picked))


def _people(rng: Random) -> Value:
    picked = tuple(rng.sample(NAMES, rng.choice((1, 2, 2, 3))))
    return Value(list(picked), join_members(picked))


def _numbers(rng: Random) -> Value:
    picked = [rng.randint(1, 100) for _ in range(rng.choice((2, 3, 3, 4)))]
    return Value(picked, join_members(tuple(map(str, picked))))


VALUES: dict[str, Callable[[Random], Value]] = {
    "city": _text(_city),
    "country": _text(lambda rng: rng.choice(next(m for s, _, m in KINDS if s == "country"))),
    "name": _text(_name),
    "full_name": _text(_full_name),
    "email": _text(_email),
    "file": _text(_file),
    "path": _text(lambda rng: f"{_directory(rng)}/{_file(rng)}" if rng.random() < 0.6 else _file(rng)),
    "directory": _text(_directory),
    "url": _text(_url),
    "date": _text(_date),
    "month": _text(lambda rng: rng.choice(MONTHS)),
    "day": _text(lambda rng: rng.choice(_DAYS)),
    "time": _text(_time),
    "code": _text(_code),
    "word": _text(draw_word),
    "topic": _text(_topic),
    "title": _quoted(_titled),
    "phrase": _quoted(draw_phrase),
    "language": _text(lambda rng: rng.choice(_LANGUAGES)),
    "currency": _text(lambda rng: rng.choice(_CURRENCIES)),
    "colour": _text(lambda rng: rng.choice(_COLOURS)),
    "symbol": _text(lambda rng: "".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(3, 4)))),
    "phone": _text(_phone),
    "expression": _text(_expression),
    "command": _quoted(lambda rng: rng.choice(_COMMANDS).format(draw_word(rng))),
    "count": _integer(1, 12),
    "number": _integer(1, 100),
    "amount": _integer(10, 2000),
    "year": _integer(1900, 2030),
    "age": _integer(18, 90),
    "degrees": _integer(-10, 38),
    "decimal": _decimal,
    "things": _things,
    "people": _people,
    "numbers": _numbers,
}  # fmt: skip
"""Drawers of values by kind."""

ITEM_SCHEMAS: dict[str, dict[str, Any]] = {
    **{kind: {"type": "string"} for kind in VALUES},
    **{
        kind: {"type": "integer"}
        for kind in ("count", "number", "amount", "year", "age", "degrees")
    },
    "decimal": {"type": "number"},
    "things": {"type": "array", "items": {"type": "string"}},
    "people": {"type": "array", "items": {"type": "string"}},
    "numbers": {"type": "array", "items": {"type": "integer"}},
}
"""JSON schema of each kind."""
