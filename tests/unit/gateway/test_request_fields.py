"""What the gateway takes a request for before anybody has counted its tokens."""

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
    parse_request_fields,
)
from argosy.protocol import ApiError


def chat(*parts: dict[str, object]) -> RequestFields:
    messages = [{"role": "user", "content": list(parts)}]
    return parse_request_fields(
        json.dumps({"model": "m", "messages": messages}).encode(), "messages"
    )


def picture(content: bytes) -> dict[str, object]:
    return {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64," + base64.b64encode(content).decode()},
    }


def sound(content: bytes) -> dict[str, object]:
    data = base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def text(content: str) -> dict[str, object]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize("medium", [picture, sound])
def test_a_megabyte_of_picture_or_sound_is_not_taken_for_text(
    medium: Callable[[bytes], dict[str, object]],
) -> None:
    asked = chat(text("What is this?"), medium(b"\xff\xfe\x3f" * 350_000))
    assert not asked.exceeds_token_limit(10)
    assert ESTIMATED_MEDIA_TOKENS < asked.estimated_prompt_tokens < ESTIMATED_MEDIA_TOKENS + 100
    assert len(asked.raw_prompt) > 1_000_000


def test_each_picture_counts_and_so_does_the_text_between() -> None:
    words = "word " * 4000
    asked = chat(*[picture(bytes(range(256)) * 40), text(words)] * 3)
    assert (
        3 * ESTIMATED_MEDIA_TOKENS + 15_000
        < asked.estimated_prompt_tokens
        < 3 * ESTIMATED_MEDIA_TOKENS + 15_300
    )
    most = 3 * len(words) // MAX_TOKEN_BYTES
    assert (asked.exceeds_token_limit(most - 1), asked.exceeds_token_limit(most)) == (True, False)


@given(st.text(max_size=3000))
def test_text_is_counted_as_text(content: str) -> None:
    """Whatever it says of itself."""
    asked = chat(text(content))
    assert asked.estimated_prompt_tokens == max(1, len(asked.raw_prompt) // 4)


@given(st.lists(st.binary(max_size=4000), max_size=4))
def test_an_estimate_is_never_less_than_one(contents: list[bytes]) -> None:
    asked = chat(*map(picture, contents))
    assert asked.estimated_prompt_tokens >= 1


LONG = "word " * 40_000


def completion(prompt: object, **more: object) -> RequestFields:
    return parse_request_fields(
        json.dumps({"model": "m", "prompt": prompt} | more).encode(), "prompt"
    )


@pytest.mark.parametrize("prompt", [LONG, [LONG], ["short", LONG], [7] * 1001, [[7], [7] * 1001]])
def test_a_prompt_that_fits_nowhere_is_known(prompt: object) -> None:
    assert completion(prompt).exceeds_token_limit(1000)
    assert not completion(prompt).exceeds_token_limit(2000)


@pytest.mark.parametrize(
    "asked",
    [
        completion([LONG[:100_000]] * 9),
        completion([[7] * 600] * 9),
        completion(LONG, truncate_prompt_tokens=9),
        completion("\n" * 100_000),
        completion("\u4e2d" * 100_000),
        completion([[]]),
        completion({"a": LONG}),
        completion(["a", {"a": LONG}, None]),
        parse_request_fields(
            json.dumps(
                {"model": "m", "messages": [{"role": "user", "content": "a", "reasoning": LONG}]}
            ).encode(),
            "messages",
        ),
    ],
    ids=["texts", "ids", "cut", "lines", "wide", "none", "object", "mixed", "reasoning"],
)
def test_a_prompt_that_may_fit_is_for_a_replica_to_judge(asked: RequestFields) -> None:
    assert not asked.exceeds_token_limit(1000)


def test_a_body_is_its_prompt_and_not_much_beside() -> None:
    """A dictionary of millions of fields took a gigabyte, and the event loop for seconds."""
    many = b"".join(b',"%x":1' % number for number in range(600_000))
    with pytest.raises(ApiError) as caught:
        parse_request_fields(b'{"model":"m","prompt":"x"' + many + b"}", "prompt")
    assert caught.value.status == 413
    assert (
        parse_request_fields(
            b'{"model":"m","prompt":"' + many.hex().encode() + b'"}', "prompt"
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
    ids=["choices", "absurdly many", "of each prompt", "prompts"],
)
def test_nobody_asks_for_millions_of_answers_at_once(
    prompt: object, n: int | None, param: str
) -> None:
    """To end 16 million, where a server took the request, took a minute of the event loop and the memory."""
    with pytest.raises(ApiError) as caught:
        completion(prompt, n=n)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert completion("a", n=MAX_CHOICES).choice_count == MAX_CHOICES


@pytest.mark.parametrize(
    "field",
    [b'"stop":"\xff"', b'"cache_salt":"\xff"', b'"user":["\xff"]', b'"\xff":1'],
)
def test_a_body_is_utf_8_wherever_it_is_read_first(field: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request_fields(b'{"model":"m","prompt":"x",' + field + b"}", "prompt")
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_limit_below_zero_is_none() -> None:
    assert completion("a", max_tokens=-1).max_output_tokens is None
    assert completion("a", max_tokens=0).max_output_tokens == 0


@pytest.mark.parametrize(
    "item", ["[1]", "1", '"a"', "{}"], ids=["lists", "ids", "texts", "objects"]
)
def test_a_prompt_of_millions_of_values_is_refused_before_they_are_made(item: str) -> None:
    """They took the event loop for ten seconds."""
    many = ",".join([item] * 3_000_000)
    for field in ("prompt", "messages"):
        with pytest.raises(ApiError) as caught:
            parse_request_fields(f'{{"model":"m","{field}":[{many}]}}'.encode(), field)
        assert (caught.value.status, caught.value.code) == (413, "request_too_large")


def test_a_text_may_be_as_long_as_any_context_whatever_it_is_of() -> None:
    rows = [{"id": number, "tags": ["a", "b"]} for number in range(50_000)]
    assert completion(json.dumps(rows)).choice_count == 1


@given(st.integers(0, 200), st.sampled_from(" \t\r\n"))
def test_what_a_list_holds_is_seen_behind_any_white_space(count: int, white: str) -> None:
    def choices(prompt: str) -> int:
        return parse_request_fields(
            f'{{"model": "m", "prompt": {prompt}}}'.encode(), "prompt"
        ).choice_count

    space = white * count
    assert choices(f'[{space}"one", "two"]') == 2
    assert choices(f"[{space}[1, 2], [3]]") == 2
    assert choices(f"[{space}1, 2]") == 1
    assert choices(f"[{space}]") == 1
