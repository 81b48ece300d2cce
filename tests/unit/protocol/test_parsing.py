"""Request parsing: errors name the parameter, and any input gives a value or an `ApiError`."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    format_names,
    parse_body,
    parse_query,
    parse_request_body,
)

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
PROMPT = {"model": "m", "prompt": "x"}


def parse_error(body: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(ChatCompletionRequest, json.dumps(body).encode())
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (CHAT | {"guided_jso": {}}, "guided_jso", "unknown_parameter"),
        ({"model": "m"}, "messages", "missing_required_parameter"),
        (CHAT | {"temperature": "hot"}, "temperature", "invalid_type"),
        (CHAT | {"n": True}, "n", "invalid_type"),
        (CHAT | {"stop": [1]}, "stop[0]", "invalid_type"),
        (CHAT | {"stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        (CHAT | {"logit_bias": {"a": "x"}}, "logit_bias[...]", "invalid_type"),
        (CHAT | {"cache_salt": ""}, "cache_salt", "invalid_type"),
        (CHAT | {"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        (CHAT | {"messages": [{"role": "user", "x": 1}]}, "messages[0].x", "unknown_parameter"),
        ([], None, "invalid_type"),
    ],
)
def test_parse_error_names_parameter_and_code(body: object, param: str | None, code: str) -> None:
    error = parse_error(body)
    assert (error.param, error.code) == (param, code)
    assert param is None or param in error.message


def parse_chat(fields: object, *, refuse_unknown: bool = False) -> tuple[object, tuple[str, ...]]:
    body = json.dumps(fields).encode()
    return parse_request_body(ChatCompletionRequest, body, refuse_unknown=refuse_unknown)


PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("unknown", "known", "names"),
    [
        ({}, {}, ()),
        ({"future": {"a": 1}, "x y": None}, {}, ("future", "x y")),
        ({"stream_options": {"x": 1}}, {"stream_options": {}}, ("stream_options.x",)),
        (
            {"messages": [{"role": "user", "content": "x", "x": i, "y": 1} for i in range(2)]},
            {"messages": [{"role": "user", "content": "x"}] * 2},
            ("messages[].x", "messages[].y"),
        ),
        (
            {"messages": [{"role": "user", "content": [PART | {"x": 1}, PART]}]},
            {"messages": [{"role": "user", "content": [PART, PART]}]},
            ("messages[].content[].x",),
        ),
        ({"logit_bias": {"5": 1}, "x": 1}, {"logit_bias": {"5": 1}}, ("x",)),
        ({"guided_new": None}, {}, ("guided_new",)),
    ],
)
def test_unknown_fields_are_ignored_and_named(
    unknown: dict[str, object], known: dict[str, object], names: tuple[str, ...]
) -> None:
    assert parse_chat(CHAT | unknown) == (parse_chat(CHAT | known)[0], names)


@pytest.mark.parametrize("name", ["guided_new", "response_schema", "format"])
def test_unknown_field_that_constrains_output_is_refused(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(CHAT | {"x": 1, name: {"type": "object"}})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"x": 1, "n": "a"}, "n"), ({"x": 1, "messages": [{}]}, "messages[0].role")],
)
def test_error_beside_unknown_field_names_parameter(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(CHAT | fields)
    assert caught.value.param == param


def test_unknown_field_is_refused_on_request() -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(CHAT | {"x": 1}, refuse_unknown=True)
    assert (caught.value.param, caught.value.code) == ("x", "unknown_parameter")


@given(st.lists(st.text(st.characters(), max_size=200), max_size=50))
def test_header_with_ignored_fields_is_short_printable_ascii(names: list[str]) -> None:
    value = format_names(names)
    assert len(value) < 1100
    assert all(0x21 <= byte < 0x7F for byte in value)
    assert value.count(b",") < max(1, len(names))


def test_null_is_treated_as_absent() -> None:
    assert parse_body(ChatCompletionRequest, json.dumps(CHAT | {"n": None}).encode()).n is None


def test_integers_are_accepted_as_floats() -> None:
    body = json.dumps(CHAT | {"temperature": 1, "logit_bias": {"5": -100}}).encode()
    parsed = parse_body(ChatCompletionRequest, body)
    assert parsed.temperature == 1.0
    assert parsed.logit_bias == {"5": -100.0}


@pytest.mark.parametrize("refuse_unknown", [False, True])
def test_numbers_and_booleans_may_be_text(*, refuse_unknown: bool) -> None:
    texts = {"n": "2", "logprobs": "true", "temperature": "0.5", "stop": "1", "user": "null"}
    values = texts | {"n": 2, "logprobs": True, "temperature": 0.5}
    parsed = parse_chat(CHAT | texts, refuse_unknown=refuse_unknown)
    assert parsed == parse_chat(CHAT | values)
    with pytest.raises(ApiError) as caught:
        parse_chat(CHAT | {"n": "many"}, refuse_unknown=refuse_unknown)
    assert (caught.value.param, caught.value.code) == ("n", "invalid_type")


@pytest.mark.parametrize("prompt", ["a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_every_prompt_type_is_accepted(prompt: object) -> None:
    body = json.dumps(PROMPT | {"prompt": prompt}).encode()
    assert parse_body(CompletionRequest, body).prompt == prompt


def test_long_names_are_truncated_in_messages() -> None:
    assert len(parse_error(CHAT | {"x" * 100_000: 1}).message) < 300


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_an_api_error(body: bytes) -> None:
    for body_type in (ChatCompletionRequest, CompletionRequest):
        with pytest.raises(ApiError):
            parse_body(body_type, body)
        with pytest.raises(ApiError):
            parse_request_body(body_type, body)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(st.sampled_from(GenerationRequest.__struct_fields__), JSON)
def test_any_value_of_any_field_is_parsed_or_named_in_the_error(field: str, value: object) -> None:
    try:
        body = json.dumps(PROMPT | {field: value}).encode()
        parse_body(CompletionRequest, body)
    except ApiError as error:
        error_param = error.param
    else:
        error_param = field
    assert error_param is not None
    assert error_param.startswith(field)


@given(st.sampled_from(GenerationRequest.__struct_fields__), JSON)
def test_unknown_field_does_not_change_how_others_are_parsed(field: str, value: object) -> None:
    results: list[object] = []
    known: dict[str, object] = PROMPT | {field: value}
    for fields in (known, known | {"an unknown field": [{}]}):
        body = json.dumps(fields).encode()
        try:
            results.append(parse_request_body(CompletionRequest, body)[0])
        except ApiError as error:
            results.append((error.param, error.code))
    assert results[0] == results[1]


class Query(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1)] = 10
    since: float | None = None


def test_query_parameters_are_parsed_from_text() -> None:
    parsed = parse_query(Query, {"limit": "5", "since": "1.5", "name": "7"})
    assert (parsed.name, parsed.limit, parsed.since) == ("7", 5, 1.5)
    assert parse_query(Query, {}) == Query()


@pytest.mark.parametrize("query", [{"limit": "0"}, {"limit": "x"}, {"since": ""}, {"page": "1"}])
def test_invalid_query_parameter_is_named(query: dict[str, str]) -> None:
    with pytest.raises(ApiError) as caught:
        parse_query(Query, query)
    assert (caught.value.status, caught.value.param) == (400, next(iter(query)))


def test_threads_may_decode_a_type_for_the_first_time_at_once() -> None:
    """In a process of its own, because msgspec reads a type that is half built beyond its end."""
    script = """
import threading
from typing import Any
import msgspec
from argosy.protocol import parse_body

first_has_begun, second_has_ended = threading.Event(), threading.Event()

def slow_annotation():
    first_has_begun.set()
    second_has_ended.wait(0.2)  # times out if the second waits for the first
    return int

Part = msgspec.defstruct("Part", [("c", "slow_annotation()")], module=__name__)
Body = msgspec.defstruct("Body", [("a", Part), ("b", int)], module=__name__)
results = []
first = threading.Thread(target=lambda: results.append(parse_body(Body, b'{"a": {"c": 1}, "b": 2}')))
first.start()
first_has_begun.wait()
results.append(parse_body(Body, b'{"a": {"c": 1}, "b": 2}'))
second_has_ended.set()
first.join()
assert results == [Body(Part(1), 2)] * 2
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert process.returncode == 0, process.stderr.decode()
