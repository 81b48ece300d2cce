"""Inputs and pairs of requests to models that pool, and the errors for those that are malformed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from argosy.protocol import (
    MAX_INPUTS,
    ApiError,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    parse_request_body,
    rank_documents,
)


def parse_inputs(value: object) -> list[str | list[int]]:
    request, _ = parse_request_body(EmbeddingRequest, json.dumps({"input": value}).encode())
    return request.list_inputs()


def parse_pairs(request_type: type[ScoreRequest | RerankRequest], **body: object) -> Any:  # noqa: ANN401 - pairs
    request, _ = parse_request_body(request_type, json.dumps(body).encode())
    return request.build_pairs()


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [3], "b"], ["a", [3], "b"]),
    ],
)
def test_inputs_have_five_forms(value: object, inputs: object) -> None:
    assert parse_inputs(value) == inputs


@pytest.mark.parametrize(
    ("value", "param", "remedy"),
    [
        ("", "input", "send a text"),
        ([], "input", "at least one"),
        (["a", ""], "input[1]", "send a text"),
        ([[1], []], "input[1]", "send a text"),
        (["a", 1], "input[1]", "as a list"),
        ([1, "a"], "input", "one kind"),
        ([[1], [2, -1]], "input[1]", "Remove it"),
        (["a"] * (MAX_INPUTS + 1), "input", "at most 2048"),
        ({"text": "a"}, "input", "Invalid value for 'input'"),
    ],
)
def test_malformed_inputs_are_named(value: object, param: str, remedy: str) -> None:
    with pytest.raises(ApiError, match=remedy) as raised:
        parse_inputs(value)
    assert (raised.value.status, raised.value.param) == (400, param)


@pytest.mark.parametrize(
    ("names", "queries"),
    [(("text_1", "text_2"), "q"), (("queries", "documents"), ["q"]), (("queries", "items"), "q")],
)
def test_scores_pair_one_query_with_all_documents(
    names: tuple[str, str], queries: str | list[str]
) -> None:
    query, documents = names
    pairs = parse_pairs(ScoreRequest, **{query: queries, documents: ["a", {"text": "b"}]})
    assert pairs == [("q", "a"), ("q", "b")]


def test_scores_pair_equal_lists_by_position() -> None:
    pairs = parse_pairs(ScoreRequest, data_1=["p", "q"], data_2=["a", "b"])
    assert pairs == [("p", "a"), ("q", "b")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_2": "a"}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": "q", "queries": "q", "text_2": "a"}, "queries"),
        ({"text_1": ["p", "q"], "text_2": ["a", "b", "c"]}, "text_2"),
        ({"text_1": "q", "documents": ["a", {"text": ""}]}, "documents[1]"),
        ({"text_1": "q", "documents": [{"image": "a"}]}, "documents[0].text"),
    ],
)
def test_malformed_pairs_are_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_pairs(ScoreRequest, **body)
    assert (raised.value.status, raised.value.param) == (400, param)


def test_reranking_needs_a_query_and_documents() -> None:
    assert parse_pairs(RerankRequest, query="q", documents=["a"]) == [("q", "a")]
    for body in ({"query": "", "documents": ["a"]}, {"query": "q", "documents": []}):
        with pytest.raises(ApiError):
            parse_pairs(RerankRequest, **body)


def test_ranking_is_stable_and_limited() -> None:
    assert rank_documents([1.0, 3.0, 3.0, 2.0], 3) == [1, 2, 3]
    assert rank_documents([1.0, 3.0], 0) == rank_documents([1.0, 3.0], None) == [1, 0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"embed_dtype": "float16"}, "embed_dtype"),
        ({"endianness": "big", "encoding_format": "float"}, "endianness"),
    ],
)
def test_number_formats_need_base64(fields: dict[str, str], param: str) -> None:
    body = json.dumps({"input": "a", **fields}).encode()
    request, _ = parse_request_body(EmbeddingRequest, body)
    with pytest.raises(ApiError, match="Set it") as raised:
        request.check_encoding()
    assert raised.value.param == param
