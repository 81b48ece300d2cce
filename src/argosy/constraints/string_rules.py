"""Rules for keywords about strings: `pattern` and `format`.

Each regular expression of a format matches only valid texts, but not all of them. There are no leap seconds, no quoted
mailboxes and no IP literals in URIs, years have four digits, and fields are bounded. A generator needs one way to write
a value, not every way.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from argosy.constraints.grammar_check import shorten_error
from argosy.constraints.limits import PARSER_LIMITS
from argosy.constraints.pattern_translator import PatternError, translate_pattern
from argosy.constraints.schema_errors import quote
from argosy.constraints.schema_normalizer import SchemaNode

_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = (
    "(?:[1-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)"  # from 1000 on
)
_DATE = f"(?:[1-9][0-9]{{3}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"

_NUMBER = "[0-9]{1,6}"
_DURATION_TIME = (
    f"T(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"
)
_DURATION_DATE = (
    f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
)

_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20}){0,2}"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_MAIL_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = rf"{_MAIL_ATOM}(?:\.{_MAIL_ATOM}){{0,2}}@{_HOSTNAME}"

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_URI_CHARACTER = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_NO_COLON = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_PATH = f"(?:/{_URI_CHARACTER}*)*"
_TAIL = rf"(?:\?(?:{_URI_CHARACTER}|[/?])*)?(?:#(?:{_URI_CHARACTER}|[/?])*)?"
_AUTHORITY = rf"//{_HOSTNAME}(?::[0-9]{{1,4}})?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]{{0,15}}:(?:{_AUTHORITY}{_PATH}|{_URI_CHARACTER}+{_PATH}){_TAIL}"
_RELATIVE = f"(?:{_AUTHORITY}{_PATH}|/(?:{_URI_CHARACTER}+{_PATH})?|{_NO_COLON}+{_PATH})?{_TAIL}"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_VARIABLES = r"[+#./;?&]?[A-Za-z_][A-Za-z0-9_]{0,30}\*?(?:,[A-Za-z_][A-Za-z0-9_]{0,30}\*?)*"
LENGTHS = ("minLength", "maxLength")


def _shortened_ipv6(leading: int) -> str:
    """Return the addresses with `leading` groups before the double colon."""
    left = f"(?:{_GROUP}:){{{leading - 1}}}{_GROUP}" if leading else ""
    right = f"(?:{_GROUP}(?::{_GROUP}){{0,{5 - leading}}})?" if leading < 6 else ""
    return f"{left}::{right}"


_IPV6 = "|".join([f"(?:{_GROUP}:){{7}}{_GROUP}", *(_shortened_ipv6(count) for count in range(7))])


_BODIES = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_NUMBER}W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOSTNAME,
    "idn-hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"{_URI}|{_RELATIVE}",
    "iri-reference": f"{_URI}|{_RELATIVE}",
    "uri-template": rf"(?:[A-Za-z0-9._~!$&()*+,;=:@/?#-]|\{{{_VARIABLES}\}})*",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})",
}

FORMAT_PATTERNS = {name: f"^(?:{body})$" for name, body in _BODIES.items()}
"""Regular expression (ECMA-262) for each format that is enforced."""


def normalize_pattern(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Translate a regular expression into the library's syntax."""
    node.require_text(keyword, value)
    if value:
        try:
            add_pattern(node, translate_schema_pattern(value), keyword)
        except PatternError as error:
            node.relax(keyword, f"in the regular expression, {error}")


def normalize_format(node: SchemaNode, keyword: str, value: Any) -> None:  # noqa: ANN401 - JSON value
    """Replace a format by its regular expression."""
    node.require_text(keyword, value)
    pattern = FORMAT_PATTERNS.get(value)
    if pattern is None:
        node.relax(keyword, f"the format {quote(value)} is not one of {', '.join(FORMAT_PATTERNS)}")
    else:
        add_pattern(node, translate_schema_pattern(pattern), keyword)


def add_pattern(node: SchemaNode, pattern: str, keyword: str) -> None:
    """Add a translated expression to the conditions of a node."""
    node.normalizer.count_pattern(pattern, node.pointer(keyword))
    node.add("pattern", pattern)


def finish_string(node: SchemaNode) -> None:
    """Relax the length of a string if the library cannot decide whether any text has it and matches the patterns."""
    bounds = {name: node.output[name] for name in LENGTHS if name in node.output}
    if "pattern" not in node.output or not bounds:
        return
    patterns = [part for part in node.conjuncts if "pattern" in part]
    schema = {"type": "string", "pattern": node.output["pattern"], **bounds, "allOf": patterns}
    error = compile_string_schema(json.dumps(schema))
    if error.startswith("Unable to determine"):
        for name in bounds:
            node.relax(name, "it cannot be combined with the regular expression")
            del node.output[name]


@lru_cache(maxsize=2048)
def translate_schema_pattern(pattern: str) -> str:
    """Translate a regular expression of a schema, and compile it.

    Raises:
        PatternError: It is invalid, matches no text or is not supported.
    """
    translation = translate_pattern(pattern)
    error = compile_string_schema(json.dumps({"type": "string", "pattern": translation}))
    if error.startswith("Regex is empty"):
        raise PatternError("no text matches")
    if error:
        raise PatternError(error.rstrip("."))
    return translation


def compile_string_schema(schema: str) -> str:
    """Return the library's error for the schema of a string, or an empty text."""
    grammar = f'{{"grammars":[{{"json_schema":{schema}}}]}}'
    error = LLMatcher.validate_grammar(grammar, None, limits=PARSER_LIMITS)
    return shorten_error(error.removeprefix("Unsatisfiable schema: ")) if error else ""
