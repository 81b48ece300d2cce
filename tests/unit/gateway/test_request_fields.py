"""Fields and token estimates that the gateway parses from a request before any tokenizer has counted it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.gateway.request_fields import (
    ESTIMATED_MEDIA_TOKENS,
    MAX_CHOICES,
    MAX_TOKEN_BYTES,
    RequestFields,
    parse_pooled_fields,
    parse_request_fields,
)
from argosy.protocol import ApiError


def make_chat(*parts: dict[str, object]) -> RequestFields:
    messages = [{"role": "user", "content": list(parts)}]
    return parse_request_fields(
        json.dumps({"model": "m", "messages": messages}).encode(), "messages"
    )


def make_image(content: bytes) -> dict[str, object]:
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(content).decode()},
    }


def make_audio(content: bytes) -> dict[str, object]:
    data = base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def make_text(content: str) -> dict[str, object]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize("make_media", [make_image, make_audio])
def test_encoded_media_is_not_estimated_as_text(
    make_media: Callable[[bytes], dict[str, object]],
) -> None:
    fields = make_chat(make_text("What is this?"), make_media(b"\xff\xfe\x3f" * 350_000))
    assert not fields.exceeds_token_limit(10)
    assert ESTIMATED_MEDIA_TOKENS < fields.estimated_prompt_tokens < ESTIMATED_MEDIA_TOKENS + 100
    assert len(fields.raw_prompt) > 1_000_000


def test_estimate_counts_each_image_and_text_between() -> None:
    words = "word " * 4000
    fields = make_chat(*[make_image(bytes(range(256)) * 40), make_text(words)] * 3)
    assert (
        3 * ESTIMATED_MEDIA_TOKENS + 15_000
        < fields.estimated_prompt_tokens
        < 3 * ESTIMATED_MEDIA_TOKENS + 15_300
    )
    limit = 3 * len(words) // MAX_TOKEN_BYTES
    assert (fields.exceeds_token_limit(limit - 1), fields.exceeds_token_limit(limit)) == (
        True,
        False,
    )


@given(st.text(max_size=3000))
def test_text_is_estimated_by_length(content: str) -> None:
    """Applies to text that looks like encoded media, too."""
    fields = make_chat(make_text(content))
    assert fields.estimated_prompt_tokens == max(1, len(fields.raw_prompt) // 4)


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_estimate_counts_tools_of_chats(name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "x" * 400}}]
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    plain = parse_request_fields(json.dumps(body).encode(), "messages")
    fields = parse_request_fields(json.dumps(body | {name: tools}).encode(), "messages")
    assert fields.estimated_tool_tokens == len(json.dumps(tools)) // 4
    added_tokens = fields.estimated_prompt_tokens - plain.estimated_prompt_tokens
    assert added_tokens == fields.estimated_tool_tokens


@given(st.lists(st.binary(max_size=4000), max_size=4))
def test_estimate_is_at_least_one_token(contents: list[bytes]) -> None:
    fields = make_chat(*map(make_image, contents))
    assert fields.estimated_prompt_tokens >= 1


LONG = "word " * 40_000


def make_completion(prompt: object, **options: object) -> RequestFields:
    return parse_request_fields(
        json.dumps({"model": "m", "prompt": prompt} | options).encode(), "prompt"
    )


@pytest.mark.parametrize("prompt", [LONG, [LONG], ["short", LONG], [7] * 1001, [[7], [7] * 1001]])
def test_prompt_over_token_limit_is_recognised(prompt: object) -> None:
    assert make_completion(prompt).exceeds_token_limit(1000)
    assert not make_completion(prompt).exceeds_token_limit(2000)


@pytest.mark.parametrize(
    "fields",
    [
        make_completion([LONG[:100_000]] * 9),
        make_completion([[7] * 600] * 9),
        make_completion(LONG, truncate_prompt_tokens=9),
        make_completion("\n" * 100_000),
        make_completion("\u4e2d" * 100_000),
        make_completion([[]]),
        make_completion({"a": LONG}),
        make_completion(["a", {"a": LONG}, None]),
        parse_request_fields(
            json.dumps(
                {"model": "m", "messages": [{"role": "user", "content": "a", "reasoning": LONG}]}
            ).encode(),
            "messages",
        ),
    ],
    ids=["texts", "ids", "cut", "lines", "wide", "none", "object", "mixed", "reasoning"],
)
def test_prompt_that_may_fit_is_not_rejected(fields: RequestFields) -> None:
    assert not fields.exceeds_token_limit(1000)


def test_body_with_many_extra_fields_is_rejected() -> None:
    """A dictionary of millions of fields took a gigabyte and blocked the event loop for seconds."""
    extra_fields = b"".join(b',"%x":1' % number for number in range(600_000))
    with pytest.raises(ApiError) as caught:
        parse_request_fields(b'{"model":"m","prompt":"x"' + extra_fields + b"}", "prompt")
    assert caught.value.status == 413
    assert (
        parse_request_fields(
            b'{"model":"m","prompt":"' + extra_fields.hex().encode() + b'"}', "prompt"
        ).choice_count
        == 1
    )


@pytest.mark.parametrize(
    ("prompt", "n", "param"),
    [
        ("a", MAX_CHOICES + 1, "n"),
        ("a", 10**30, "n"),
        (["a"] * 129, 128, "n"),
        (["a"] * (MAX_CHOICES + 1), None, "prompt"),
    ],
    ids=["choices", "absurdly-many", "choices-per-prompt", "prompts"],
)
def test_number_of_choices_is_bounded(prompt: object, n: int | None, param: str) -> None:
    """Ending 16 million choices took a minute of the event loop and all memory."""
    with pytest.raises(ApiError) as caught:
        make_completion(prompt, n=n)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert make_completion("a", n=MAX_CHOICES).choice_count == MAX_CHOICES


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        ("one, two", 1),
        ([], 1),
        ([1, 2, 3], 1),
        (["a, b", 'said "no" [twice]', "c\n"], 3),
        ([[1, 2], [3], [4]], 3),
        ([{"text": "a"}, {"text": "b"}], 2),
    ],
)
def test_inputs_that_run_beside_each_other_are_counted(inputs: object, count: int) -> None:
    body = json.dumps({"model": "m", "input": inputs}, indent=1).encode()
    assert parse_pooled_fields(body, ["input"]).sequence_count == count


@pytest.mark.parametrize(
    "field",
    [b'"stop":"\xff"', b'"cache_salt":"\xff"', b'"user":["\xff"]', b'"\xff":1'],
)
def test_body_must_be_utf8_in_any_field(field: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request_fields(b'{"model":"m","prompt":"x",' + field + b"}", "prompt")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_negative_max_tokens_is_no_limit() -> None:
    assert make_completion("a", max_tokens=-1).max_output_tokens is None
    assert make_completion("a", max_tokens=0).max_output_tokens == 0


@pytest.mark.parametrize(
    "item", ["[1]", "1", '"a"', "{}"], ids=["lists", "ids", "texts", "objects"]
)
def test_prompt_with_millions_of_values_is_rejected_before_parsing(item: str) -> None:
    """Parsing them blocked the event loop for ten seconds."""
    many = ",".join([item] * 3_000_000)
    for field in ("prompt", "messages"):
        with pytest.raises(ApiError) as caught:
            parse_request_fields(f'{{"model":"m","{field}":[{many}]}}'.encode(), field)
        assert (caught.value.status, caught.value.code) == (413, "request_too_large")


def test_long_text_prompt_is_accepted_whatever_it_contains() -> None:
    rows = [{"id": number, "tags": ["a", "b"]} for number in range(50_000)]
    assert make_completion(json.dumps(rows)).choice_count == 1


@given(st.integers(0, 200), st.sampled_from(" \t\r\n"))
def test_prompt_list_is_recognised_behind_white_space(count: int, white: str) -> None:
    def choices(prompt: str) -> int:
        return parse_request_fields(
            f'{{"model": "m", "prompt": {prompt}}}'.encode(), "prompt"
        ).choice_count

    space = white * count
    assert choices(f'[{space}"one", "two"]') == 2
    assert choices(f"[{space}[1, 2], [3]]") == 2
    assert choices(f"[{space}1, 2]") == 1
    assert choices(f"[{space}]") == 1


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"query": "q" * 78, "documents": ["d" * 38]}, 20 + 10),
        ({"query": "q" * 78, "documents": ["d" * 38] * 4}, 4 * 20 + 41),
        ({"text_1": ["q" * 76], "text_2": ["d" * 38] * 2}, 2 * 20 + 20),
        ({"text_1": ["q" * 37] * 2, "text_2": ["d" * 38] * 2}, 20 + 20),
    ],
)
def test_query_is_estimated_for_each_document(body: dict[str, object], tokens: int) -> None:
    fields = parse_pooled_fields(
        json.dumps(body).encode(), ("documents", "text_2"), ("query", "text_1")
    )
    assert abs(fields.estimated_prompt_tokens - tokens) <= 1
    assert (fields.max_output_tokens, fields.generates, fields.can_aggregate_stream) == (
        0,
        False,
        False,
    )
