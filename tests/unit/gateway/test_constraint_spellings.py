"""Constraints of the output in every backend's own spelling, or refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from argosy.deployment import BackendKind
from argosy.gateway.backends import CHAT_PATH, COMPLETION_PATH, get_adapter, translate_constraint
from argosy.gateway.backends.constraint_fields import CONSTRAINT_FIELDS
from argosy.protocol import ApiError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI_SCHEMA = {"name": "thing", "schema": SCHEMA, "strict": True}
FORMAT = {"type": "json_schema", "json_schema": OPENAI_SCHEMA}
RESPONSE_SCHEMA = {"name": "response", "schema": SCHEMA, "strict": True}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": RESPONSE_SCHEMA}
CHOICES = ["a.b", 'say "c"']
CHOICE_REGEX = r'(a\.b)|(say "c")'
GBNF = r'root ::= "a.b" | "say \"c\""'
TAG = {"type": "structural_tag", "format": {"type": "json_schema"}}
JSON_OBJECT = {"response_format": {"type": "json_object"}}


def translate(
    kind: BackendKind, path: bytes, fields: dict[str, Any]
) -> dict[str, Any] | tuple[str | None, str]:
    """Return the translated fields, or the parameter and the code of the error."""
    raw = {name: Raw(json.dumps(value).encode()) for name, value in fields.items()}
    try:
        translated = translate_constraint(raw, path, get_adapter(kind))
    except ApiError as error:
        return error.param, error.code
    return {name: json.loads(bytes(value)) for name, value in translated.items()}


def structured(**constraint: object) -> dict[str, Any]:
    return {"structured_outputs": constraint}


SPELLINGS: dict[str, list[dict[str, Any]]] = {
    "json_object": [JSON_OBJECT, structured(json_object=True)],
    "json_schema": [
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": json.dumps(SCHEMA)},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        structured(json=SCHEMA),
    ],
    "regex": [{"guided_regex": "a+"}, {"regex": "a+"}, structured(regex="a+")],
    "choice": [{"guided_choice": CHOICES}, structured(choice=CHOICES)],
    "grammar": [{"guided_grammar": "g"}, {"ebnf": "g"}, {"grammar": "g"}, structured(grammar="g")],
    "structural_tag": [
        {"response_format": TAG},
        {"structural_tag": json.dumps(TAG)},
        structured(structural_tag=json.dumps(TAG)),
    ],
}
"""Spellings of the clients by the kind of the constraint."""

EXPECTED: dict[BackendKind, dict[str, dict[str, Any]]] = {
    "sglang": {
        "json_object": JSON_OBJECT,
        "json_schema": {"response_format": RESPONSE_FORMAT},
        "regex": {"regex": "a+"},
        "choice": {"regex": CHOICE_REGEX},
        "grammar": {"ebnf": "g"},
        "structural_tag": {"response_format": TAG},
    },
    "tensorrt-llm": {
        "json_object": JSON_OBJECT,
        "json_schema": {"response_format": {"type": "json", "schema": SCHEMA}},
        "regex": {"response_format": {"type": "regex", "regex": "a+"}},
        "choice": {"response_format": {"type": "regex", "regex": CHOICE_REGEX}},
        "grammar": {"response_format": {"type": "ebnf", "ebnf": "g"}},
        "structural_tag": {"response_format": TAG},
    },
    "tgi": {
        "json_object": {"response_format": {"type": "json", "value": {"type": "object"}}},
        "json_schema": {"response_format": {"type": "json", "value": SCHEMA}},
        "regex": {"response_format": {"type": "regex", "value": "a+"}},
        "choice": {"response_format": {"type": "regex", "value": CHOICE_REGEX}},
    },
    "lmdeploy": {
        "json_object": JSON_OBJECT,
        "json_schema": {"response_format": RESPONSE_FORMAT},
        "regex": {"response_format": {"type": "regex_schema", "regex_schema": "a+"}},
        "choice": {"response_format": {"type": "regex_schema", "regex_schema": CHOICE_REGEX}},
    },
    "llama.cpp": {
        "json_object": {"json_schema": {"type": "object"}},
        "choice": {"grammar": GBNF},
        "grammar": {"grammar": "g"},
    },
}
"""Fields that a chat carries at each backend. A kind that is missing is refused."""


@pytest.mark.parametrize("backend", EXPECTED)
@pytest.mark.parametrize("kind", SPELLINGS)
def test_every_spelling_becomes_the_backends_own(backend: BackendKind, kind: str) -> None:
    if (backend, kind) == ("llama.cpp", "json_schema"):
        return  # its own field passes unchanged, see below
    expected = EXPECTED[backend].get(kind)
    for fields in SPELLINGS[kind]:
        translated = translate(backend, CHAT_PATH, fields | {"temperature": 0})
        if expected is None:
            assert translated[1] == "unsupported_parameter"  # type: ignore[index]
        else:
            assert translated == expected | {"temperature": 0}


UNCHANGED: list[tuple[BackendKind, dict[str, Any]]] = [
    *((kind, own) for kind, spellings in EXPECTED.items() for own in spellings.values()),
    *((kind, {"response_format": FORMAT}) for kind in ("vllm", "sglang", "lmdeploy", "openai")),
    ("llama.cpp", {"json_schema": SCHEMA}),
    ("openai", {"response_format": {"type": "grammar", "grammar": "g"}}),
]


@pytest.mark.parametrize(("backend", "fields"), UNCHANGED)
def test_backends_own_spelling_stays(backend: BackendKind, fields: dict[str, Any]) -> None:
    assert translate(backend, CHAT_PATH, fields) == fields


@pytest.mark.parametrize(
    ("backend", "path", "fields", "expected"),
    [
        ("vllm", CHAT_PATH, {"guided_json": SCHEMA}, structured(json=SCHEMA)),
        ("vllm", COMPLETION_PATH, {"regex": "a"}, structured(regex="a")),
        ("vllm", CHAT_PATH, {"ebnf": "g"}, structured(grammar="g")),
        (
            "vllm",
            CHAT_PATH,
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            structured(json=SCHEMA),
        ),
        (
            "vllm",
            CHAT_PATH,
            {"guided_regex": "a", "guided_whitespace_pattern": " ?"},
            structured(regex="a", whitespace_pattern=" ?"),
        ),
        ("vllm", CHAT_PATH, structured(json=SCHEMA, x=1), structured(json=SCHEMA, x=1)),
        (
            "vllm",
            CHAT_PATH,
            {"guided_json": SCHEMA, "guided_decoding_backend": "x"},
            structured(json=SCHEMA),
        ),
        (
            "sglang",
            COMPLETION_PATH,
            {"guided_json": SCHEMA},
            {"json_schema": json.dumps(SCHEMA, separators=(",", ":"))},
        ),
        (
            "tensorrt-llm",
            CHAT_PATH,
            {"response_format": FORMAT},
            {"response_format": {"type": "json", "schema": SCHEMA}},
        ),
        (
            "tgi",
            CHAT_PATH,
            {"response_format": FORMAT},
            {"response_format": {"type": "json", "value": SCHEMA}},
        ),
        ("tgi", COMPLETION_PATH, {"guided_regex": "a"}, ("guided_regex", "unsupported_parameter")),
        (
            "tgi",
            COMPLETION_PATH,
            {"response_format": {"type": "regex"}},
            ("response_format", "unsupported_parameter"),
        ),
        (
            "lmdeploy",
            COMPLETION_PATH,
            {"response_format": FORMAT},
            ("response_format", "unsupported_parameter"),
        ),
        ("llama.cpp", CHAT_PATH, {"response_format": FORMAT}, {"json_schema": SCHEMA}),
        ("llama.cpp", COMPLETION_PATH, structured(json=SCHEMA), {"json_schema": SCHEMA}),
        ("openai", CHAT_PATH, {"guided_json": SCHEMA}, {"response_format": RESPONSE_FORMAT}),
        ("openai", CHAT_PATH, {"guided_regex": "a"}, ("guided_regex", "unsupported_parameter")),
        (
            "sglang",
            CHAT_PATH,
            structured(regex="a", whitespace_pattern=" "),
            ("structured_outputs.regex", "unsupported_parameter"),
        ),
        ("argosy", CHAT_PATH, {"guided_regex": "a"}, {"guided_regex": "a"}),
        ("auto", CHAT_PATH, {"guided_regex": "a"}, {"guided_regex": "a"}),
        (
            "vllm",
            CHAT_PATH,
            {"response_format": {"type": "text"}, "grammar": "", "regex": None},
            {"response_format": {"type": "text"}, "grammar": "", "regex": None},
        ),
    ],
)
def test_constraint_is_translated_or_refused(
    backend: BackendKind, path: bytes, fields: dict[str, Any], expected: object
) -> None:
    assert translate(backend, path, fields) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": FORMAT, "guided_regex": "a"}, "guided_regex"),
        (structured(regex="a", choice=["b"]), "structured_outputs.choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": []}, "response_format"),
        ({"structured_outputs": "x"}, "structured_outputs"),
    ],
)
def test_malformed_or_second_constraint_is_refused(fields: dict[str, Any], param: str) -> None:
    refused, _ = translate("tensorrt-llm", CHAT_PATH, fields)
    assert refused == param


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4))
def test_choices_as_regular_expression_match_exactly_the_choices(choices: list[str]) -> None:
    fields = translate("lmdeploy", CHAT_PATH, {"guided_choice": choices})
    assert isinstance(fields, dict)
    pattern = re.compile(fields["response_format"]["regex_schema"])
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert not pattern.fullmatch("".join(choices) + "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["", "json", "a", "text"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "json", "schema", "json_schema", "regex", "choice", "x"]),
            inner,
        )
    ),
    max_leaves=8,
)


@given(
    st.sampled_from(["vllm", "sglang", "tensorrt-llm", "tgi", "lmdeploy", "llama.cpp", "openai"]),
    st.sampled_from([CHAT_PATH, COMPLETION_PATH]),
    st.dictionaries(st.sampled_from(sorted(CONSTRAINT_FIELDS)), JSON, max_size=3),
)
def test_any_json_is_translated_or_refused(
    backend: BackendKind, path: bytes, fields: dict[str, Any]
) -> None:
    translate(backend, path, fields)
