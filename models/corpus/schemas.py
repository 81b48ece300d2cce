"""Requests for JSON that follows a schema, and for facts of a text as JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from models.corpus.documents import Document, Message
from models.corpus.lists import join_members
from models.corpus.parameters import (
    TRAINING,
    Lexicon,
    Parameter,
    draw_parameters,
    make_enum,
    object_schema,
)
from models.corpus.patterns import DATA, capitalise, expand
from models.corpus.values import ITEM_SCHEMAS, VALUES, Value

_NATURAL = json.loads((DATA / "facts.json").read_text(encoding="utf-8"))
_WEATHER = ["sunny", "cloudy", "rainy", "windy"]


def natural_facts(rng: Random) -> tuple[tuple[Parameter, ...], list[Value], str]:
    """Return fields with values, and a sentence of ordinary English that gives the values."""
    entry = rng.choice(_NATURAL)
    parameters = tuple(
        make_enum(name, _WEATHER, required=True)
        if kind == "weather"
        else Parameter(name, kind, dict(ITEM_SCHEMAS[kind]), required=True, draw=VALUES[kind])
        for name, kind in entry["fields"].items()
    )
    values = [parameter.draw(rng) for parameter in parameters]
    text: str = rng.choice(entry["sentences"])
    for index, value in enumerate(values):
        text = text.replace(f"{{{index}}}", value.text)
    return parameters, values, text


def labelled_facts(rng: Random, lexicon: Lexicon) -> tuple[tuple[Parameter, ...], list[Value], str]:
    """Return random fields with values, and a text that names each field."""
    parameters = draw_parameters(rng, rng.choice((1, 2, 2, 3, 3, 4, 5)), lexicon)
    values = [parameter.draw(rng) for parameter in parameters]
    form = rng.choice(("{0}: {1}", "the {0} is {1}", "{0} {1}", "{0} is {1}", "{0} = {1}"))
    listed = [form.format(p.words, v.text) for p, v in zip(parameters, values, strict=True)]
    if rng.random() < 0.3:
        rng.shuffle(listed)
    joined = rng.choice(
        (
            ", ".join(listed),
            join_members(tuple(listed)),
            "\n".join(listed),
            ". ".join(map(capitalise, listed)),
        )
    )
    return parameters, values, capitalise(joined)


def schema_text(schema: dict[str, Any], rng: Random) -> str:
    """Return the words that ask for JSON of a schema."""
    text = json.dumps(schema, ensure_ascii=False)
    return rng.choice((
        f"Answer with JSON that follows this schema: {text}",
        f"Answer as JSON. Schema: {text}",
        f"Return a JSON object that matches the schema {text}",
        f"Reply only with JSON for this JSON schema:\n{text}",
        f"Your answer must be JSON and valid for this schema:\n{text}",
    ))  # fmt: skip


def draw_schema_document(rng: Random, turns: int = 1, lexicon: Lexicon = TRAINING) -> Document:
    """Return a conversation with facts as text and the same facts as JSON."""
    messages: list[Message] = []
    for index in range(turns):
        parameters, values, text = (
            natural_facts(rng)
            if rng.random() < 0.5 and lexicon is TRAINING
            else labelled_facts(rng, lexicon)
        )
        schema = object_schema(tuple(parameters), rng)
        schema["required"] = [p.name for p in parameters]
        if rng.random() < 0.3:
            schema["additionalProperties"] = False
        answer = json.dumps(
            {p.name: v.json for p, v in zip(parameters, values, strict=True)}, ensure_ascii=False
        )
        draw = rng.random()
        keys = join_members(tuple(p.name for p in parameters))
        if index == 0 and draw < 0.35:
            system = schema_text(schema, rng)
            if rng.random() < 0.4:
                system = f"You are a helpful assistant. {system}"
            messages.append(Message("system", system))
            lead = rng.choice(
                (
                    "",
                    "",
                    "",
                    "Extract the facts: ",
                    "Extract the data from this text: ",
                    "Read this: ",
                )
            )
            question = lead + text
        elif draw < 0.75:
            question = rng.choice(
                (
                    f"{text}\n\n{schema_text(schema, rng)}",
                    f"{schema_text(schema, rng)}\n\n{text}",
                    f"{text}. {schema_text(schema, rng)}",
                )
            )
        else:
            request = expand(
                "[Extract|Give me|Return|Write] [the facts|the data|this] as JSON with the keys",
                rng,
            )
            question = rng.choice(
                (
                    f"{request} {keys}: {text}",
                    f"{text}. {request} {keys}.",
                    f"{text}\n\n{request} {keys}",
                )
            )
        listed = ", ".join(
            f"{p.name} is {json.dumps(v.json, ensure_ascii=False)}"
            for p, v in zip(parameters, values, strict=True)
        )
        reasoning = (
            f"I write JSON. {capitalise(listed)}."
            if index == turns - 1 and rng.random() < 0.15 and len(listed) < 120
            else ""
        )
        messages += [Message("user", question), Message("assistant", answer, (), reasoning)]
        if draw < 0.35 and index == 0:  # the system prompt fixes one schema for the conversation
            break
    return Document(tuple(messages))
