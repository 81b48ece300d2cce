"""What the gateway takes a request for before anybody has counted its tokens."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.gateway.ask import LONGEST_TOKEN_BYTES, MEDIA_TOKENS, Ask, read


def chat(*parts: dict[str, object]) -> Ask:
    messages = [{"role": "user", "content": list(parts)}]
    return read(json.dumps({"model": "m", "messages": messages}).encode(), "messages")


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
    assert asked.least_tokens < 10
    assert MEDIA_TOKENS < asked.prompt_tokens < MEDIA_TOKENS + 100
    assert len(asked.prompt) > 1_000_000


def test_each_picture_counts_and_so_does_the_text_between() -> None:
    words = "word " * 4000
    asked = chat(*[picture(bytes(range(256)) * 40), text(words)] * 3)
    assert 3 * MEDIA_TOKENS + 15_000 < asked.prompt_tokens < 3 * MEDIA_TOKENS + 15_300
    assert asked.least_tokens >= 3 * len(words) // LONGEST_TOKEN_BYTES


@given(st.text(max_size=3000))
def test_text_is_counted_as_text(content: str) -> None:
    """Whatever it says of itself."""
    asked = chat(text(content))
    assert asked.prompt_tokens == max(1, len(asked.prompt) // 4)


@given(st.lists(st.binary(max_size=4000), max_size=4))
def test_an_estimate_is_never_less_than_one(contents: list[bytes]) -> None:
    asked = chat(*map(picture, contents))
    assert asked.prompt_tokens >= 1
    assert asked.least_tokens >= 0
