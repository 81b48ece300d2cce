"""Rewrites grammars, regular expressions and choices of requests to grammars of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from argosy.constraints.grammar_check import (
    find_first_mask_error,
    find_grammar_error,
    shorten_error,
)
from argosy.constraints.limits import MAX_GRAMMAR_BYTES, MAX_RULES
from argosy.constraints.output_constraint import OutputConstraint, encode_grammar
from argosy.constraints.pattern_translator import PatternError, translate_pattern
from argosy.constraints.quoted_grammar import quote_grammar
from argosy.constraints.schema_compiler import schema_grammar
from argosy.constraints.schema_errors import invalid_grammar
from argosy.protocol import ApiError

LITERAL = re.compile(
    r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*|(?P<json>%json\b\s*)|(?P<colon>:)|(?P<name>@[\w-]+)'
)
"""Literals and comments of Lark's syntax, and what is looked for outside of them."""
UNKNOWN_TOKEN_MESSAGE = "unknown special token"  # noqa: S105 - no secret


class _Insertion(NamedTuple):
    """JSON schema within a grammar."""

    start: int
    end: int
    schema: Any


def choice_grammar(choices: Any, param: str, name: str = "answer") -> OutputConstraint:  # noqa: ANN401 - JSON value
    """Compile a list of texts, one of which is the answer.

    Raises:
        ApiError: 400.
    """
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise invalid_grammar("Send a list with at least one text.", param)
    if any(not isinstance(choice, str) for choice in choices):
        raise invalid_grammar("Every choice must be a string.", param)
    _check_size("".join(choices), param)
    alternatives = dict.fromkeys(_quote(choice) for choice in choices)
    lark = f"start: CHOICE\nCHOICE: {' | '.join(alternatives)}"
    return compile_grammars("choice", ({"name": name, "lark_grammar": lark},), param)


def regex_grammar(pattern: Any, param: str, name: str = "answer") -> OutputConstraint:  # noqa: ANN401 - JSON value
    """Compile a regular expression that matches the whole answer.

    Raises:
        ApiError: 400.
    """
    lark = f"start: {regex_terminal(pattern, param)}"
    return compile_grammars("regex", ({"name": name, "lark_grammar": lark},), param)


def regex_terminal(pattern: Any, param: str) -> str:  # noqa: ANN401 - JSON value
    """Return a regular expression of a request in Lark's syntax.

    Raises:
        ApiError: 400.
    """
    if not isinstance(pattern, str):
        raise invalid_grammar("The regular expression must be a string.", param)
    _check_size(pattern, param)
    try:
        translation = translate_pattern(pattern, "python")
    except PatternError as error:
        raise invalid_grammar(f"In the regular expression, {error}.", param) from None
    escaped = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], translation)
    return f"/{escaped}/" if escaped else '""'


def user_grammar(text: Any, param: str, name: str = "answer") -> OutputConstraint:  # noqa: ANN401 - JSON value
    """Compile a grammar in Lark's syntax or in GBNF, the EBNF of llama.cpp and xgrammar.

    Raises:
        ApiError: 400.
    """
    return compile_grammars("grammar", rewrite_user_grammar(text, param, name), param)


@lru_cache(maxsize=64)
def input_grammars(
    definition: str, param: str, name: str, *, is_quoted: bool
) -> tuple[dict[str, Any], ...]:
    """Return the Lark grammar of a custom tool's input as sub-grammars, empty if it cannot be quoted.

    Args:
        definition: Grammar of a request.
        param: Its field.
        name: Name of the first sub-grammar.
        is_quoted: Whether the input is written within a JSON string.

    Raises:
        ApiError: 400 if the grammar is invalid.
    """
    grammars = user_grammar(definition, param, name).grammars
    if not is_quoted:
        return grammars
    if len(grammars) > 1:
        return ()
    try:
        quoted = {"name": name, "lark_grammar": quote_grammar(grammars[0]["lark_grammar"])}
        return compile_grammars("grammar", (quoted,), param).grammars
    except (PatternError, ApiError):
        return ()


def rewrite_user_grammar(text: Any, param: str, name: str) -> tuple[dict[str, Any], ...]:  # noqa: ANN401 - JSON value
    """Return a grammar of a request as sub-grammars. Schemas within it become sub-grammars of their own.

    Raises:
        ApiError: 400.
    """
    if not isinstance(text, str) or not text.strip():
        raise invalid_grammar("The grammar must be a text with at least one rule.", param)
    _check_size(text, param)
    if text.count("::=") > MAX_RULES:  # before the conversion, whose time grows with their square
        raise invalid_grammar(f"The grammar has more than {MAX_RULES} rules.", param)
    try:
        lark = any_to_lark(text)
    except (GbnfToLarkError, ValueError, LookupError, RecursionError, AssertionError) as error:
        raise invalid_grammar(
            "The grammar is neither Lark with a rule 'start' nor GBNF with a rule 'root'."
            f" {shorten_error(str(error))}",
            param,
        ) from None
    grammars: list[dict[str, Any]] = []
    parts: list[str] = []
    position = 0
    for insertion in _find_schemas(lark, param):
        constraint = schema_grammar(
            insertion.schema, strict=True, param=param, name=f"{name}_json{len(grammars)}"
        )
        parts += [lark[position : insertion.start], f"@{constraint.grammars[0]['name']} "]
        grammars.extend(constraint.grammars)
        position = insertion.end
    parts.append(lark[position:])
    return ({"name": name, "lark_grammar": "".join(parts)}, *grammars)


def _find_schemas(lark: str, param: str) -> Iterator[_Insertion]:
    """Yield the schemas of `%json` in order. Checks the number of rules."""
    rules = position = 0
    decoder = json.JSONDecoder()
    while match := LITERAL.search(lark, position):
        position = match.end()
        rules += match["colon"] is not None
        if rules > MAX_RULES:
            raise invalid_grammar(f"The grammar has more than {MAX_RULES} rules.", param)
        if match["name"]:
            raise invalid_grammar(
                f"The grammar refers to {match['name'][:80]}, but a request has only one grammar.",
                param,
            )
        if match["json"]:
            try:
                schema, position = decoder.raw_decode(lark, position)
            except (ValueError, RecursionError) as error:
                raise invalid_grammar(
                    f"A JSON schema after %json is invalid: {error}.", param
                ) from None
            yield _Insertion(match.start(), position, schema)


def compile_grammars(
    kind: str, grammars: tuple[dict[str, Any], ...], param: str
) -> OutputConstraint:
    """Check that sub-grammars compile and allow a first byte.

    Raises:
        ApiError: 400.
    """
    text = encode_grammar(grammars)
    error = find_first_mask_error(text)
    if UNKNOWN_TOKEN_MESSAGE in error:  # the model's tokenizer decides whether the token exists
        error = find_grammar_error(text)
    if error:
        raise invalid_grammar(f"It does not compile. {error}", param)
    return OutputConstraint(kind=kind, param=param, grammars=grammars)


def _check_size(text: str, param: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise invalid_grammar(
            "The text has half of a surrogate pair. Send whole characters.", param
        ) from None
    if size > MAX_GRAMMAR_BYTES:
        raise invalid_grammar(
            f"The text has {size} bytes. At most {MAX_GRAMMAR_BYTES} are supported.", param
        )


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
