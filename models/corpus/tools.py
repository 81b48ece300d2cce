"""Tools with requests for them: common tools from `tools.json`, and generated tools with random parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

from models.corpus.parameters import (
    TRAINING,
    Lexicon,
    Parameter,
    draw_parameters,
    make_enum,
    object_schema,
)
from models.corpus.patterns import DATA, capitalise, expand, read_lines
from models.corpus.values import ITEM_SCHEMAS, VALUES, Value


def _read_verbs() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the verbs of names of tools, each with the ways to ask for the action."""
    lines = (line.partition(": ") for line in read_lines("tool_verbs.txt"))
    return tuple((verb, tuple(rest.split(" | "))) for verb, _, rest in lines)


VERBS = _read_verbs()
NOUNS = read_lines("tool_nouns.txt")
_ERRORS = (
    "not found",
    "access denied",
    "timeout",
    "invalid {0}",
    "no such {0}",
    "{0} is missing",
    "service unavailable",
)
_DONE = ("ok", "done", "success", "OK", "Done")


@dataclass(frozen=True, slots=True)
class Request:
    """Words of a user, and the arguments that they give."""

    text: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """Tool with its definition, a generator of requests for it, and a generator of results."""

    name: str
    action: str
    definition: dict[str, Any]
    parameters: tuple[Parameter, ...]
    request: Callable[[Random], Request]
    result: Callable[[Random, dict[str, Any]], object]
    topics: frozenset[str] = field(default_factory=frozenset)


def style_name(words: str, rng: Random) -> str:
    """Return a name in one of the usual ways to write it."""
    draw = rng.random()
    if draw < 0.12:
        first, *rest = words.split("_")
        return first + "".join(map(capitalise, rest))
    if draw < 0.16:
        return words.replace("_", "-")
    if draw < 0.22:
        return f"{rng.choice(('mcp', 'api', 'app', 'db', 'github', 'home'))}_{words}"
    return words


def make_definition(
    name: str, description: str, parameters: tuple[Parameter, ...], rng: Random
) -> dict[str, Any]:
    """Return the definition of a function as clients send it, in one of several styles of JSON schema."""
    schema = object_schema(parameters, rng)
    draw = rng.random()
    if draw < 0.15:
        schema["additionalProperties"] = False
    elif draw < 0.3:  # as pydantic writes it
        for key, value in schema["properties"].items():
            value["title"] = capitalise(key.replace("_", " "))
        schema["title"] = f"{name}_args"
    elif draw < 0.36:
        schema["$schema"] = "http://json-schema.org/draft-07/schema#"
    definition: dict[str, Any] = {"name": name}
    if description:
        definition["description"] = description
    return {**definition, "parameters": schema}


def render_request(action: str, given: list[tuple[Parameter, Value]], rng: Random) -> str:
    """Return the words of a user who wants the action with the given values."""
    kinds = [parameter.kind for parameter, _ in given]
    phrases = [
        parameter.phrase(
            value, rng, labelled=kinds.count(parameter.kind) > 1 or rng.random() < 0.55
        )
        for parameter, value in given
    ]
    if rng.random() < 0.25:
        rng.shuffle(phrases)
    joint = rng.choice((" ", " ", ", ", " and "))
    text = " ".join((action, joint.join(phrases))).strip().replace("and and ", "and ")
    return capitalise(text) if rng.random() < 0.8 else text


def generate_tool(
    rng: Random, lexicon: Lexicon = TRAINING, *, noun: str = "", verb: str = ""
) -> Tool:
    """Return a tool with a random name, random parameters and requests that follow from them."""
    verb, actions = next((v for v in VERBS if v[0] == verb), None) or rng.choice(VERBS)
    if not noun:
        noun = (
            rng.choice(NOUNS) if lexicon is TRAINING and rng.random() < 0.5 else lexicon.word(rng)
        )
        if rng.random() < 0.3:
            noun = f"{lexicon.word(rng)}_{noun}"
    parameters = draw_parameters(
        rng, rng.choices((0, 1, 2, 3, 4, 5), (6, 34, 30, 18, 8, 4))[0], lexicon
    )
    words = noun.replace("_", " ")
    name = style_name(f"{verb}_{noun}", rng)
    description = rng.choice((
        f"{capitalise(verb)} the {words}.", f"{capitalise(verb)} a {words}", f"{capitalise(actions[0].format(words))}.",
        f"{capitalise(verb)}s the {words}.", f"This tool {verb}s a {words}.", f"Use this to {verb} the {words}.", "",
    ))  # fmt: skip

    def request(rng: Random) -> Request:
        given = [(p, p.draw(rng)) for p in parameters if p.required or rng.random() < 0.5]
        action = rng.choice(actions).format(words)
        return Request(
            render_request(action, given, rng), {p.name: value.json for p, value in given}
        )

    return Tool(
        name, f"{verb} the {words}", make_definition(name, description, parameters, rng), parameters, request,
        _generated_result(rng, lexicon), frozenset(noun.split("_")),
    )  # fmt: skip


def _generated_result(rng: Random, lexicon: Lexicon) -> Callable[[Random, dict[str, Any]], object]:
    fields = draw_parameters(rng, rng.choice((1, 1, 2, 2, 3)), lexicon, depth=1)
    kind = rng.random()

    def result(rng: Random, _arguments: dict[str, Any]) -> object:
        if kind < 0.25:
            return {"status": rng.choice(_DONE)}
        if kind < 0.35:
            return rng.choice(_DONE)
        if kind < 0.5:
            return VALUES[rng.choice(("word", "phrase", "number", "title", "topic"))](rng).json
        return {p.name: p.draw(rng).json for p in fields}

    return result


def draw_error(rng: Random, tool: Tool) -> object:
    """Return an error as result of a tool."""
    thing = next(iter(tool.topics), "request").replace("_", " ")
    text = rng.choice(_ERRORS).format(thing)
    return rng.choice(({"error": text}, f"Error: {text}"))


# --- common tools ---------------------------------------------------------------------------------


def read_tool_file(name: str) -> list[dict[str, Any]]:
    """Return the descriptions of tools of a JSON file."""
    content: list[dict[str, Any]] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return content


NUMBERED = {str(index): f"{{{index}}}" for index in range(9)}
"""Slots that stay in a text, to be filled with values."""
COMMON = read_tool_file("tools.json")


def make_common(entry: dict[str, Any], rng: Random) -> Tool:
    """Return a tool of `tools.json`, with one of its names, descriptions and sets of parameter names."""
    name = rng.choice(entry["names"])
    parameters: list[Parameter] = []
    for item in entry["parameters"]:
        required = not item.get("optional", False)
        label = rng.choice(item["names"])
        if "enum" in item:
            parameters.append(make_enum(label, item["enum"], required=required))
            continue
        schema = dict(ITEM_SCHEMAS[item["kind"]])
        if "description" in item and rng.random() < 0.7:
            schema["description"] = item["description"]
        parameters.append(Parameter(label, item["kind"], schema, required, VALUES[item["kind"]]))
    used = tuple(parameters)

    def request(rng: Random) -> Request:
        text = expand(rng.choice(entry["asks"]), rng, NUMBERED)
        values = [p.draw(rng) for p in used]
        present = [index for index in range(len(used)) if f"{{{index}}}" in text]
        for index in present:
            text = text.replace(f"{{{index}}}", values[index].text)
        return Request(text, {used[index].name: values[index].json for index in present})

    def result(rng: Random, arguments: dict[str, Any]) -> object:
        return _common_result(rng.choice(entry["results"]), rng, arguments)

    description = rng.choice(entry["descriptions"])
    definition = make_definition(name, description, used, rng)
    topics = frozenset(entry["names"]) | frozenset(entry["names"][0].split("_"))
    return Tool(name, description.rstrip(".").lower(), definition, used, request, result, topics)


def _common_result(pattern: object, rng: Random, arguments: dict[str, Any]) -> object:
    if isinstance(pattern, str):
        return expand(pattern.removeprefix("text:"), rng, _Drawn(rng))
    if isinstance(pattern, list):
        return [_common_result(pattern[0], rng, arguments) for _ in range(rng.randint(1, 3))]
    filled: dict[str, Any] = {}
    entries: dict[str, Any] = cast("dict[str, Any]", pattern)
    for key, source in entries.items():
        if isinstance(source, int):
            filled[key] = list(arguments.values())[source]
        else:
            filled[key] = (
                rng.choice(source) if isinstance(source, list) else VALUES[source](rng).json
            )
    return filled


class _Drawn(dict[str, str]):
    """Mapping that draws a value for every kind that is looked up."""

    def __init__(self, rng: Random) -> None:
        super().__init__(kinds="")  # not empty, so that it counts as true
        self._rng = rng

    def __contains__(self, key: object) -> bool:
        return key in VALUES

    def __getitem__(self, key: str) -> str:
        return str(VALUES[key](self._rng).json)


def draw_tools(rng: Random, count: int, lexicon: Lexicon = TRAINING) -> list[Tool]:
    """Return tools with different names. Some resemble each other, so that the choice takes care."""
    tools: dict[str, Tool] = {}
    while len(tools) < count:
        draw = rng.random()
        if lexicon is TRAINING and draw < 0.4:
            tool = make_common(rng.choice(COMMON), rng)
            if any(tool.topics & other.topics for other in tools.values()):
                continue
        elif tools and draw < 0.6:
            other = rng.choice(list(tools.values()))
            verb = other.action.split(" the ")[0]
            if rng.random() < 0.5:
                tool = generate_tool(rng, lexicon, noun=rng.choice(sorted(other.topics)))
            else:
                tool = generate_tool(rng, lexicon, verb=verb)
        else:
            tool = generate_tool(rng, lexicon)
        tools.setdefault(tool.name, tool)
    drawn = list(tools.values())
    rng.shuffle(drawn)
    return drawn
