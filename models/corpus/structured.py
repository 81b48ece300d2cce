"""Requests for small JSON objects and lists."""

from __future__ import annotations

import json
from random import Random

from models.corpus.copying import NAMES
from models.corpus.lists import KINDS
from models.corpus.numbers import spell_number
from models.corpus.patterns import Exchange, expand

_CITIES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Tokyo", "Vienna", "Oslo")
_COUNTRIES = ("France", "England", "Italy", "Germany", "Spain", "Japan", "Austria", "Norway")
_COLOURS = ("red", "green", "blue", "yellow", "black", "white")
_JOBS = ("teacher", "doctor", "baker", "farmer", "engineer", "painter")
_TITLES = ("The Old Clock", "A Walk by the Sea", "The Silver Key", "Winter Stars")


def draw_field(name: str, rng: Random) -> str | int | float | bool:
    """Return a plausible value of the named field. An unknown field gets a word."""
    texts: dict[str, tuple[str, ...]] = {
        "name": NAMES[:40], "city": _CITIES, "country": _COUNTRIES, "color": _COLOURS,
        "colour": _COLOURS, "job": _JOBS, "title": _TITLES, "author": NAMES[:40],
        "animal": ("cat", "dog", "horse", "fox"), "food": ("bread", "soup", "pasta", "rice"),
        "message": ("hello", "all is well"), "status": ("ok", "ready"),
        "answer": ("yes", "no"), "weather": ("sunny", "rainy", "cloudy"),
    }  # fmt: skip
    numbers = {
        "age": (18, 60), "id": (1, 99), "year": (1990, 2025), "price": (1, 50), "count": (1, 20),
        "number": (1, 100), "score": (1, 10), "height": (150, 195), "temperature": (0, 30),
    }  # fmt: skip
    if name in texts:
        return rng.choice(texts[name])
    if name in numbers:
        return rng.randint(*numbers[name])
    if name in {"active", "done", "happy"}:
        return rng.random() < 0.7
    return rng.choice(("one", "two", "three"))


FIELDS = (
    "name", "age", "city", "country", "color", "colour", "job", "title", "author", "animal",
    "food", "message", "status", "answer", "weather", "id", "year", "price", "count", "number",
    "score", "height", "temperature", "active", "done", "happy",
)  # fmt: skip
_COMMON = (("name", "age"), ("name", "age", "city"), ("name", "city"), ("city", "country"))


def json_question(rng: Random) -> Exchange:
    """Ask for a JSON object with named fields."""
    common = rng.random() < 0.4
    names = (
        rng.choice(_COMMON) if common else tuple(rng.sample(FIELDS, rng.choice((1, 2, 2, 3, 4))))
    )
    described = [_article(name) for name in names] if rng.random() < 0.6 else list(names)
    listing = ", ".join(described[:-1]) + (" and " if len(described) > 1 else "") + described[-1]
    verb = "[Give me|Write|Return|Make|Show me|Create|Generate|Output|Answer with|Reply with]"
    thing = "[a JSON object|a JSON object|JSON|a small JSON object|a json|a JSON]"
    tail = "[with|with|with the keys|with the fields|that has|containing]"
    request = expand(f"{verb} {thing} {tail}", rng)
    return Exchange(
        f"{request} {listing}", json.dumps({name: draw_field(name, rng) for name in names})
    )


def plain_json_question(rng: Random) -> Exchange:
    """Ask for a JSON object without naming its fields, or about a person."""
    description = "[a JSON object|JSON|some JSON|an example of JSON|a JSON example|valid JSON]"
    about = rng.choice(("", "", " for a person", " about a person", " that describes a person"))
    request = expand(f"[Give me|Write|Return|Show me|Make|Create] {description}", rng)
    value = {
        "name": rng.choice(NAMES[:20]),
        "age": rng.randint(20, 60),
        "city": rng.choice(_CITIES),
    }
    return Exchange(request + about, json.dumps(value))


def json_list_question(rng: Random) -> Exchange:
    """Ask for a JSON list of things of a kind."""
    _, plural, members = rng.choice(KINDS)
    size = min(rng.choice((2, 3, 3, 3, 4, 5)), len(members))
    count = rng.choice((spell_number(size), str(size)))
    verb = "[Give me|Write|Return|Make|Show me]"
    ending = rng.choice(("a JSON list of {0} {1}", "a JSON array of {0} {1}", "{0} {1} as JSON"))
    request = expand(verb, rng) + " " + ending.format(count, plural)
    return Exchange(request, json.dumps(list(members[:size])))


def _article(name: str) -> str:
    article = "an" if name[0] in "aeiou" else "a"
    return f"{article} {name}"
