"""Parameters of generated tools and fields of generated schemas: name, JSON schema, values and phrases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from models.corpus.lists import join_members
from models.corpus.patterns import capitalise
from models.corpus.values import ITEM_SCHEMAS, VALUES, Value, draw_word

LABELS: dict[str, tuple[str, ...]] = {
    "city": ("city", "location", "place", "town", "destination", "origin"),
    "country": ("country", "region"),
    "name": ("name", "person", "owner", "author", "customer", "recipient", "user", "guest", "to"),
    "full_name": ("full_name", "customer_name", "contact", "assignee"),
    "email": ("email", "email_address", "address", "recipient", "sender"),
    "file": ("file", "file_name", "filename", "document"),
    "path": ("path", "file_path", "source", "target"),
    "directory": ("directory", "folder", "dir"),
    "url": ("url", "link", "website", "page"),
    "date": ("date", "start_date", "end_date", "due_date", "day"),
    "month": ("month",),
    "day": ("day", "weekday"),
    "time": ("time", "start_time", "end_time", "at"),
    "code": ("id", "code", "order_id", "user_id", "number", "key", "reference", "ticket_id"),
    "word": ("name", "type", "category", "tag", "label", "group", "query", "key", "term", "value"),
    "topic": ("topic", "query", "subject", "keyword", "search"),
    "title": ("title", "subject", "headline", "summary"),
    "phrase": ("text", "message", "body", "content", "note", "comment", "description"),
    "language": ("language", "lang", "target_language"),
    "currency": ("currency", "from_currency", "to_currency"),
    "colour": ("color", "colour"),
    "symbol": ("symbol", "ticker"),
    "phone": ("phone", "phone_number"),
    "count": ("count", "limit", "quantity", "days", "nights", "guests", "pages", "max_results"),
    "number": ("number", "amount", "size", "width", "height", "minutes", "level", "a", "b", "x"),
    "amount": ("amount", "budget", "price", "total", "distance"),
    "year": ("year",),
    "age": ("age",),
    "degrees": ("temperature", "degrees"),
    "decimal": ("price", "weight", "rate", "score", "value"),
    "things": ("items", "tags", "names", "categories", "products", "topics"),
    "people": ("people", "attendees", "members", "recipients", "guests"),
    "numbers": ("numbers", "values", "scores"),
}
"""Usual names of parameters of each kind."""

_PHRASES: dict[str, tuple[str, ...]] = {
    "city": ("in {0}", "for {0}"), "country": ("in {0}",), "name": ("for {0}",), "full_name": ("for {0}",),
    "email": ("for {0}", "to {0}"), "file": ("in {0}", "from {0}"), "path": ("in {0}", "at {0}"),
    "directory": ("in {0}",), "url": ("from {0}", "at {0}"), "date": ("on {0}", "for {0}"),
    "month": ("in {0}",), "day": ("on {0}", "for {0}"), "time": ("at {0}",), "code": ("{0}", "with id {0}"),
    "topic": ("about {0}",), "title": ("called {0}", "named {0}"), "phrase": ("that says {0}", "with the text {0}"),
    "language": ("in {0}",), "currency": ("in {0}",), "people": ("with {0}", "for {0}"), "things": ("with {0}",),
    "colour": ("in {0}",),
}  # fmt: skip
_LABELLED = (
    "with {label} {value}", "with the {label} {value}", "with {label} {value}", "{label} {value}", "{label}: {value}",
    "where {label} is {value}", "where the {label} is {value}", "and {label} {value}", "{label} = {value}",
    "set the {label} to {value}", "using {value} as the {label}", "{value} as {label}",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Sources of words. Held-out tools are generated from a lexicon whose words do not occur in training."""

    word: Callable[[Random], str] = draw_word
    kinds: tuple[str, ...] = tuple(LABELS)
    labels: Callable[[str, Random], str] | None = None

    def label(self, kind: str, rng: Random) -> str:
        """Return the name of a parameter of the kind."""
        if self.labels:
            return self.labels(kind, rng)
        if rng.random() < 0.35:
            return (
                f"{self.word(rng)}_{rng.choice(LABELS[kind])}"
                if rng.random() < 0.3
                else self.word(rng)
            )
        return rng.choice(LABELS[kind])


TRAINING = Lexicon()


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a tool, or field of an object."""

    name: str
    kind: str
    schema: dict[str, Any]
    required: bool
    draw: Callable[[Random], Value]

    @property
    def words(self) -> str:
        """Name in words."""
        return self.name.replace("_", " ")

    def phrase(self, value: Value, rng: Random, *, labelled: bool) -> str:
        """Return the words by which a user gives the value."""
        if value.json is True or value.json is False:
            yes = value.json
            return rng.choice((
                f"{'with' if yes else 'without'} {self.words}", f"{self.words}: {'yes' if yes else 'no'}",
                f"with {self.words} {'on' if yes else 'off'}", f"{self.words} {'true' if yes else 'false'}",
            ))  # fmt: skip
        if not labelled and self.kind in _PHRASES:
            return rng.choice(_PHRASES[self.kind]).format(value.text)
        return rng.choice(_LABELLED).format(
            label=rng.choice((self.words, self.name)), value=value.text
        )


def draw_parameter(rng: Random, lexicon: Lexicon = TRAINING, *, depth: int = 0) -> Parameter:
    """Return a parameter of a random kind, sometimes an enumeration, a Boolean, an object or a list of objects."""
    draw = rng.random()
    if draw < 0.12:
        options = [lexicon.word(rng) for _ in range(rng.randint(2, 4))]
        return make_enum(lexicon.label("word", rng), options, required=rng.random() < 0.7)
    if draw < 0.19:
        return Parameter(
            rng.choice((lexicon.word(rng), "urgent", "verbose", "recursive", "include_" + lexicon.word(rng), "active")),
            "boolean", {"type": "boolean"}, rng.random() < 0.4, _boolean,
        )  # fmt: skip
    if draw < 0.25 and depth == 0:
        return _object(rng, lexicon)
    if draw < 0.29 and depth == 0:
        return _items(rng, lexicon)
    kind = rng.choice(lexicon.kinds)
    schema = dict(ITEM_SCHEMAS[kind])
    return Parameter(lexicon.label(kind, rng), kind, schema, rng.random() < 0.75, VALUES[kind])


def draw_parameters(
    rng: Random, count: int, lexicon: Lexicon = TRAINING, *, depth: int = 0
) -> tuple[Parameter, ...]:
    """Return parameters with different names."""
    drawn: dict[str, Parameter] = {}
    while len(drawn) < count:
        parameter = draw_parameter(rng, lexicon, depth=depth)
        drawn.setdefault(parameter.name, parameter)
    return tuple(drawn.values())


def describe(parameter: Parameter, rng: Random) -> dict[str, Any]:
    """Return the schema of a parameter, sometimes with a description."""
    schema = dict(parameter.schema)
    if rng.random() < 0.5 and "description" not in schema:
        words = parameter.words
        text = rng.choice(
            (
                f"The {words}",
                f"{capitalise(words)} to use",
                f"{capitalise(words)}.",
                f"The {words} as {schema.get('type', 'text')}",
            )
        )
        schema["description"] = text
    return schema


def object_schema(parameters: tuple[Parameter, ...], rng: Random) -> dict[str, Any]:
    """Return the JSON schema of an object with the parameters as properties."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {parameter.name: describe(parameter, rng) for parameter in parameters},
    }
    required = [parameter.name for parameter in parameters if parameter.required]
    if required:
        schema["required"] = required
    return schema


def make_enum(name: str, options: list[str], *, required: bool) -> Parameter:
    """Return a parameter with a fixed set of options."""
    return Parameter(
        name, "enum", {"type": "string", "enum": options}, required,
        lambda rng: Value(*[rng.choice(options)] * 2),
    )  # fmt: skip


def _boolean(rng: Random) -> Value:
    value = rng.random() < 0.6
    return Value(value, "yes" if value else "no")


def _object(rng: Random, lexicon: Lexicon) -> Parameter:
    fields = tuple(
        Parameter(field.name, field.kind, field.schema, required=True, draw=field.draw)
        for field in draw_parameters(rng, rng.choice((1, 2, 2, 3)), lexicon, depth=1)
    )

    def draw(rng: Random) -> Value:
        values = {field.name: field.draw(rng) for field in fields}
        text = join_members(
            tuple(f"{name.replace('_', ' ')} {value.text}" for name, value in values.items())
        )
        return Value({name: value.json for name, value in values.items()}, text)

    name = rng.choice(("address", "filter", "options", "customer", "settings", lexicon.word(rng)))
    return Parameter(name, "object", object_schema(fields, rng), rng.random() < 0.8, draw)


def _items(rng: Random, lexicon: Lexicon) -> Parameter:
    thing, number = rng.choice((("name", "quantity"), ("item", "count"), ("product", "amount")))

    def draw(rng: Random) -> Value:
        rows = [(lexicon.word(rng), rng.randint(1, 20)) for _ in range(rng.randint(1, 3))]
        text = join_members(tuple(f"{count} {word}" for word, count in rows))
        return Value([{thing: word, number: count} for word, count in rows], text)

    schema = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {thing: {"type": "string"}, number: {"type": "integer"}},
            "required": [thing, number],
        },
    }
    name = rng.choice(("items", "products", "order", lexicon.word(rng)))
    return Parameter(name, "items", schema, required=True, draw=draw)
