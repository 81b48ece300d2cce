"""Short exercises that need exact copies: values by name, JSON of a list, and names of tools for requests."""

from __future__ import annotations

import json
from random import Random

from models.corpus.documents import Document, Message
from models.corpus.noise import punctuate
from models.corpus.patterns import capitalise
from models.corpus.tools import draw_tools
from models.corpus.values import VALUES, draw_word

_TEXTS = [
    kind
    for kind in VALUES
    if kind not in {"things", "people", "numbers", "title", "phrase", "command", "decimal"}
]


def draw_pairs(rng: Random, count: int) -> dict[str, str]:
    """Return random names with values."""
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        name = draw_word(rng)
        if rng.random() < 0.3:
            name = f"{name}{rng.choice('_ ')}{draw_word(rng)}"
        pairs[name] = str(VALUES[rng.choice(_TEXTS)](rng).json)
    return pairs


def lookup_drill(rng: Random) -> list[Message]:
    """Return a list of names with values, and questions for values or names."""
    pairs = draw_pairs(rng, rng.randint(3, 9))
    form = rng.choice(("{0}: {1}", "{0} = {1}", "- {0}: {1}", "The {0} is {1}."))
    text = "\n".join(form.format(name, value) for name, value in pairs.items())
    messages = [Message("system", text)] if rng.random() < 0.5 else []
    lead = "" if messages else f"{text}\n\n"
    for name in rng.sample(list(pairs), rng.randint(2, len(pairs))):
        asked = rng.choice(
            (f"What is the {name}", f"Give me the {name}", f"{capitalise(name)}", f"Tell me {name}")
        )
        messages += [
            Message("user", lead + punctuate(asked, rng)),
            Message("assistant", f"The {name} is {pairs[name]}."),
        ]
        lead = ""
    return messages


def json_drill(rng: Random) -> list[Message]:
    """Return a list of names with values, and the list as JSON."""
    pairs = draw_pairs(rng, rng.randint(2, 6))
    form, joint = rng.choice(
        (("{0}: {1}", "\n"), ("{0} is {1}", ", "), ("{0} {1}", ", "), ("{0} = {1}", "\n"))
    )
    text = joint.join(form.format(name, value) for name, value in pairs.items())
    asked = rng.choice(
        (f"As JSON: {text}", f"{text}\n\nWrite this as JSON.", f"Turn this into JSON:\n{text}")
    )
    return [Message("user", asked), Message("assistant", json.dumps(pairs, ensure_ascii=False))]


def choice_drill(rng: Random) -> list[Message]:
    """Return a list of tools, and requests with the name of the tool that fits."""
    tools = draw_tools(rng, rng.randint(2, 7))
    listed = "\n".join(
        f"- {tool.name}: {tool.definition.get('description', '')}".rstrip(": ") for tool in tools
    )
    messages = [Message("system", f"Answer with the name of the tool that fits.\n{listed}")]
    for tool in rng.choices(tools, k=rng.randint(3, 6)):
        messages += [
            Message("user", punctuate(tool.request(rng).text, rng)),
            Message("assistant", tool.name),
        ]
    return messages


def draw_drill(rng: Random) -> Document:
    """Return a random exercise."""
    return Document(tuple(rng.choice((lookup_drill, lookup_drill, json_drill, choice_drill))(rng)))
