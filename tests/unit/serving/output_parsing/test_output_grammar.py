"""Grammars of calls: what the families' fixtures hold is accepted, and what would not parse is masked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any

import pytest
from canitoolcall.fixtures import Fixture
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.call_renderer import render_calls, split_markers
from tests.support.grammar_matcher import GrammarMatcher
from tests.support.tool_call_fixtures import (
    FIXTURES,
    format_of,
    pieces_of,
    prompt_of,
    to_result,
    tools_of,
)

from argosy import constraints
from argosy.constraints import OutputConstraint, Tool, ToolChoice, ToolChoiceMode, ToolRequest
from argosy.engine.serving.output_parsing import (
    FORMATS,
    OutputFormat,
    OutputParser,
    Piece,
    build_output_grammar,
    prompt_opens_reasoning,
)
from argosy.protocol import ApiError

REFUSED = (
    # A special token within an argument. Arguments hold text only.
    *("deepseek/*marker*", "gemma4/*marker*", "glm/*marker*", "kimi/k26-marker*", "llama/*marker*"),
    *("qwen3-hermes/*marker*", "qwen3-xml/coder-marker*", "qwen3-xml/*-token-in-arguments"),
    # The escape of a control character, which llguidance writes differently.
    "gpt-oss/harmony-string-escapes",
    # A call on the analysis channel, or to a built-in tool.
    *("gpt-oss/llamacpp-builtin*", "gpt-oss/*-analysis*", "gpt-oss/llamacpp-recipient-in-role*"),
    # Output behind `<|call|>`, which ends a turn.
    *("gpt-oss/vllm-*-end-terminated", "gpt-oss/vllm-call-then-final", "gpt-oss/vllm-sequential*"),
    # A section without a well-formed call, text that belongs to no call, or an unknown id.
    *("kimi/*-after-tool-section", "kimi/*-empty-tool-section", "kimi/*-noise-between-markers"),
    "kimi/*-without-functions-prefix",
    # `arguments` as the key, which Llama writes as `parameters`, or keys in another order than in training.
    *("llama/l3-bug-whole-call*", "llama/l3-sglang-*", "llama/*-arguments-key"),
    *("llama/*-type-function", "mistral/vllm-v3-*arguments*"),
    # A tag is not closed, not opened or written without its line breaks.
    *(
        "*-missing-*",
        "deepseek/sglang-v4-self-closing-invoke",
        "qwen3-xml/bug-coder-text-after-call",
    ),
    "qwen3-xml/llamacpp-coder-bare-function*",
    # A Python literal where the schema demands JSON.
    "qwen3-xml/*-python-literals",
)
"""Patterns of the outputs that a grammar does not accept."""
COMPLETE = [
    fixture_id
    for fixture_id, fixture in FIXTURES.items()
    if fixture.expected is not None and not fixture.truncated
]
CALL_FORMATS = [name for name, output_format in FORMATS.items() if output_format.has_calls]
WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["c", "f"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
SEARCH = Tool(
    name="search",
    parameters={
        "type": "object",
        "properties": {"query": {"type": "string"}, "exact": {"type": "boolean"}},
        "required": ["query", "exact"],
        "additionalProperties": False,
    },
)
TOOLS = [WEATHER, SEARCH]
CALL = ("search", {"query": "cats", "exact": True})
WEATHER_CALL = ("get_weather", {"city": "Bern"})


def special(name: str) -> OutputFormat:
    """Return a format whose markers are special tokens."""
    return FORMATS[name].with_vocabulary(frozenset(FORMATS[name].tokens).__contains__)


def grammar_of(
    matcher: GrammarMatcher,
    output_format: OutputFormat,
    tools: list[Tool] = TOOLS,
    *,
    mode: ToolChoiceMode = "auto",
    allowed: list[str] | None = None,
    parallel: bool = True,
    answer: OutputConstraint | None = None,
) -> str:
    """Return the grammar of an output."""
    names = None if allowed is None else tuple(allowed)
    request = ToolRequest(
        tools=tuple(tools), choice=ToolChoice(mode=mode, allowed=names), parallel=parallel
    )
    return build_output_grammar(output_format, request, answer, matcher.marker_id).text


def behind_reasoning(fixture: Fixture) -> list[Piece]:
    """Return the pieces of a fixture behind its reasoning block, where the grammar begins."""
    output_format, pieces = format_of(fixture), pieces_of(fixture)
    if output_format.name == "gpt-oss":
        return pieces
    is_open = prompt_opens_reasoning(output_format, prompt_of(fixture))
    for block in output_format.thinking:
        has_opener = any(_text(piece) == block.open for piece in pieces)
        if not (is_open or has_opener or fixture.raw_output.startswith(block.open)):
            continue
        text = ""
        for index, piece in enumerate(pieces):
            text += _text(piece)
            _, closer, rest = text.partition(block.close)
            if closer:
                return [*filter(None, [rest]), *pieces[index + 1 :]]
    return pieces


def _text(piece: Piece) -> str:
    return piece if isinstance(piece, str) else piece.text


@pytest.mark.parametrize("fixture_id", COMPLETE)
def test_accepts_every_complete_fixture_that_it_should(fixture_id: str) -> None:
    fixture = FIXTURES[fixture_id]
    output_format = format_of(fixture)
    matcher = GrammarMatcher(output_format)
    grammar = grammar_of(matcher, output_format, tools=tools_of(fixture))
    rest = matcher.match(grammar, behind_reasoning(fixture))
    assert bool(rest) == any(fnmatch(fixture_id, pattern) for pattern in REFUSED), rest


@pytest.mark.parametrize(
    ("vocabulary", "mode"),
    [
        ("tokens", "auto"),
        ("text", "auto"),
        ("tokens", "required"),
        pytest.param("text", "required", marks=pytest.mark.exhaustive),
        pytest.param("tokens", "named", marks=pytest.mark.exhaustive),
        ("text", "named"),
    ],
)
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_accepts_a_call_as_the_family_writes_it_and_masks_what_is_wrong(
    name: str, vocabulary: str, mode: ToolChoiceMode
) -> None:
    tokens = FORMATS[name].tokens if vocabulary == "tokens" else ()
    output_format = FORMATS[name].with_vocabulary(frozenset(tokens).__contains__)
    matcher = GrammarMatcher(output_format)
    allowed = ["search"] if mode == "named" else None
    grammar = grammar_of(matcher, output_format, mode=mode, allowed=allowed)

    def rest(*calls: tuple[str, dict[str, Any]]) -> str:
        return matcher.match(grammar, render_calls(output_format, list(calls)))

    assert rest(CALL) == ""
    looks_like_answer = mode == "auto" and output_format.has_bare_calls
    assert bool(rest(("searches", {"query": "cats", "exact": True}))) != looks_like_answer
    assert rest(("search", {"query": "cats"}))
    assert rest(("search", {"query": "cats", "exact": True, "more": 1}))
    assert rest(("search", {"query": "cats", "exact": "maybe"}))
    assert bool(rest(WEATHER_CALL)) == (mode == "named")
    assert bool(rest(CALL, CALL)) == (mode == "named" or name == "gpt-oss")


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_demands_a_call_only_in_the_modes_that_do(name: str) -> None:
    output_format = special(name)
    matcher = GrammarMatcher(output_format)
    text = split_markers(
        output_format, "<|channel|>final<|message|>Hello!" if name == "gpt-oss" else "Hello!"
    )
    modes: tuple[ToolChoiceMode, ...] = ("auto", "required", "named")
    for mode in modes:
        grammar = grammar_of(matcher, output_format, mode=mode)
        constraints.check_grammar(grammar, "tools")  # as the gateway does
        assert matcher.accepts(grammar, text) == (mode == "auto")
    assert grammar_of(matcher, output_format, mode="none") == ""


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_allows_one_call_and_the_end_if_calls_are_not_parallel(
    name: str, mode: ToolChoiceMode
) -> None:
    output_format = special(name)
    matcher = GrammarMatcher(output_format)
    grammar = grammar_of(matcher, output_format, mode=mode, parallel=False)
    assert matcher.accepts(grammar, render_calls(output_format, [CALL]))
    assert not matcher.accepts(grammar, render_calls(output_format, [CALL, CALL]))
    assert not matcher.accepts(
        grammar, [*render_calls(output_format, [CALL]), "\n", *render_calls(output_format, [CALL])]
    )


@pytest.mark.parametrize("mode", ["auto", "none"])
@pytest.mark.parametrize("name", CALL_FORMATS)
def test_an_answer_with_a_schema_is_an_alternative_to_calls(
    name: str, mode: ToolChoiceMode
) -> None:
    output_format = special(name)
    matcher = GrammarMatcher(output_format)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    answer = constraints.schema_grammar(schema, strict=True, param="response_format")
    grammar = grammar_of(matcher, output_format, mode=mode, answer=answer)

    def framed(text: str) -> list[Piece]:
        if output_format.name == "gpt-oss":
            return split_markers(output_format, "<|channel|>final<|message|>" + text)
        if output_format.frame is not None:
            return split_markers(
                output_format, output_format.frame.open + text + output_format.frame.close
            )
        return [text]

    assert matcher.accepts(grammar, framed('{"name": "cats"}'))
    assert not matcher.accepts(grammar, framed('{"names": "cats"}'))
    assert not matcher.accepts(grammar, framed("Hello"))
    assert matcher.accepts(grammar, render_calls(output_format, [CALL])) == (mode == "auto")


@pytest.mark.parametrize("name", ["hermes", "pythonic", "qwen3-xml", "gemma4", "gpt-oss"])
def test_a_strict_tool_that_cannot_be_enforced_is_refused(name: str) -> None:
    output_format = special(name)
    matcher = GrammarMatcher(output_format)
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    parameters = {"type": "object", "properties": {"tags": tags}}
    loose = Tool(name="tag", parameters=parameters)
    assert grammar_of(matcher, output_format, tools=[loose])
    with pytest.raises(ApiError, match="uniqueItems") as raised:
        grammar_of(
            matcher, output_format, tools=[Tool(name="tag", parameters=parameters, strict=True)]
        )
    assert raised.value.status == 400


def by_reference(schema: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a reference to a schema, which stands beside it until it is a definition of the tool."""
    return {"$ref": f"#/$defs/d{number}", "description": "A unit.", "target": schema}


WRAPPERS: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "reference": by_reference,
    "allOf": lambda schema, _: {"allOf": [schema], "default": "a"},
    "optional": lambda schema, _: {"anyOf": [schema, {"type": "null"}]},
    "or a number": lambda schema, _: {"anyOf": [{"type": "integer"}, schema]},
}
CHOICES: list[dict[str, Any]] = [
    {"type": "string", "enum": ["a", "b c"]},
    {"enum": ["a", "b c"]},
    {"anyOf": [{"const": "a"}, {"const": "b c", "type": "string"}]},
]


@pytest.mark.parametrize("name", ["qwen3-xml", "glm45", "deepseek-v32", "kimi-k3", "gemma4"])
@settings(max_examples=8)
@given(
    schema=st.sampled_from(CHOICES),
    wrappers=st.lists(st.sampled_from(list(WRAPPERS)), unique=True),
    strict=st.booleans(),
)
def test_choice_holds_however_its_schema_is_written(
    name: str, schema: dict[str, Any], wrappers: list[str], *, strict: bool
) -> None:
    """Where arguments are plain text, references and unions hold as in JSON, with `strict` and without."""
    definitions: dict[str, Any] = {}
    for number, wrapper in enumerate(wrappers):
        schema = WRAPPERS[wrapper](schema, number)
        if "target" in schema:
            definitions[f"d{number}"] = schema.pop("target")
    parameters = {
        "type": "object",
        "properties": {"unit": schema},
        "required": ["unit"],
        "additionalProperties": False,
        "$defs": definitions,
    }
    tool = Tool(name="weather", parameters=parameters, strict=strict)
    output_format = special(name)
    matcher = GrammarMatcher(output_format)
    request = ToolRequest(tools=(tool,), choice=ToolChoice(mode="required"))
    grammar = build_output_grammar(output_format, request, None, matcher.marker_id)
    assert not grammar.relaxations
    extra = {"optional": None, "or a number": 7}
    allowed = ["a", "b c", *(extra[wrapper] for wrapper in wrappers if wrapper in extra)]
    for value in [*extra.values(), "a", "b c", "c", "ab"]:
        pieces = render_calls(output_format, [("weather", {"unit": value})])
        assert matcher.accepts(grammar.text, pieces) == (value in allowed), value
        if value in allowed:
            parser = OutputParser(output_format, [tool], in_reasoning=False)
            events = [*parser.feed(pieces), *parser.finish()]
            arguments = to_result(events).tool_calls[0].arguments_raw or ""
            assert json.loads(arguments) == {"unit": value}


PATCH = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: "*** Delete File: " filename LF | "*** Add File: " filename LF (add_line -> line)+
filename: /[^\s"]+/
add_line: "+" /(.*)/ LF
// The end.
%import common.LF
"""
HUNKS = [
    "*** Delete File: a",
    '*** Add File: b\n+"x"\t\\ é\n+',
    "*** Add File: c",
    "*** Delete File: a b",
]


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_input_of_a_custom_tool_follows_its_grammar_or_that_is_named(name: str) -> None:
    custom = {"name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}}
    (tool,) = constraints.read_tools({"tools": [{"type": "custom", "custom": custom}]}).tools
    output_format = special(name)
    matcher = GrammarMatcher(output_format)
    request = ToolRequest(tools=(tool,), choice=ToolChoice(mode="required"))
    grammar = build_output_grammar(output_format, request, None, matcher.marker_id)
    accepted = []
    for hunk in HUNKS:
        text = f"*** Begin Patch\n{hunk}\n*** End Patch"
        call = json.dumps(text, ensure_ascii=False)
        pieces = render_calls(output_format, [("patch", {"input": text})])
        pieces = [
            piece.replace(json.dumps(text), call) if isinstance(piece, str) else piece
            for piece in pieces
        ]
        accepted.append(matcher.accepts(grammar.text, pieces))
    if grammar.relaxations:
        ((param, relaxation),) = grammar.relaxations
        assert (param, relaxation.keyword) == ("tools[0].custom.format", "grammar")
        assert type(output_format.syntax).__name__ in {"PythonSyntax", "MappingSyntax"}
    else:
        assert accepted == [True, True, False, False]


@pytest.mark.parametrize("name", ["qwen3-xml", "pythonic"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "^a$"}, "pattern"),
        ({"anyOf": [{"type": "string", "pattern": "^a$"}, {"type": "null"}]}, "pattern"),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 2}]}, "minimum"),
        ({"$ref": "#/$defs/loop"}, "$ref"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, "oneOf"),
        ({"allOf": [{"type": "string"}, {"enum": ["a"]}]}, "allOf"),
        ({"type": "string", "anyOf": [{"type": "integer"}]}, "anyOf"),
    ],
)
def test_what_does_not_hold_in_plain_text_is_named_or_refused(
    name: str, schema: dict[str, Any], keyword: str
) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}
    parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"loop": loop}}
    output_format = special(name)
    matcher = GrammarMatcher(output_format)

    def relaxed(*, strict: bool) -> set[str]:
        tool = Tool(name="f", parameters=parameters, strict=strict)
        request = ToolRequest(tools=(tool,), choice=ToolChoice(mode="required"))
        grammar = build_output_grammar(output_format, request, None, matcher.marker_id)
        constraints.check_grammar(grammar.text, "tools")
        return {item.keyword for _, item in grammar.relaxations}

    assert relaxed(strict=False) == {keyword}
    with pytest.raises(ApiError, match=re.escape(f"'{keyword}'")):
        relaxed(strict=True)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_reasoning_that_begins_with_ordinary_text_is_part_of_the_grammar(name: str) -> None:
    output_format = FORMATS[name].with_vocabulary(frozenset[str]().__contains__)
    if not output_format.thinking:
        return
    matcher = GrammarMatcher(output_format)
    grammar = grammar_of(matcher, output_format, mode="required")
    block = output_format.thinking[0]
    reasoning: list[Piece] = [f"{block.open}{block.label}\nA trigger.{block.close}"]
    if name == "gpt-oss":
        reasoning.append("<|start|>assistant")
    assert matcher.accepts(grammar, [*reasoning, *render_calls(output_format, [CALL])])


@pytest.mark.parametrize(
    ("value", "is_accepted"),
    [
        ("a <parameter=days> b", True),
        ("a </parameter> b", True),
        ("a\n<parameter=days>\nb", False),
        ("a\n</function>\nb", False),
        ("a</parameter>\n<parameter=days>\nb", False),
    ],
)
def test_a_value_holds_no_tag_at_which_the_parser_would_end_it(
    value: str, is_accepted: bool
) -> None:
    output_format = special("qwen3-xml")
    matcher = GrammarMatcher(output_format)
    grammar = grammar_of(matcher, output_format, mode="required")
    pieces = render_calls(output_format, [("get_weather", {"city": value})])
    assert matcher.accepts(grammar, pieces) == is_accepted
    if is_accepted:
        parser = OutputParser(output_format, TOOLS, in_reasoning=False)
        events = [*parser.feed(pieces), *parser.finish()]
        assert json.loads(to_result(events).tool_calls[0].arguments_raw or "") == {"city": value}
