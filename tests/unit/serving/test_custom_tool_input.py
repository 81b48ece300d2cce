"""Custom tool input: the decoded text equals what a JSON parser reads, however the arguments are split."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.engine.serving.text.custom_tool_input import CustomInputDecoder


def decode(text: str, size: int) -> str:
    decoder = CustomInputDecoder()
    return "".join(decoder.feed(text[i : i + size]) for i in range(0, len(text), size))


@given(st.text(), st.booleans(), st.sampled_from([(", ", ": "), (",", ":")]), st.integers(1, 7))
def test_the_text_equals_the_json_string(
    text: str, ascii_only: bool, separators: tuple[str, str], size: int
) -> None:
    text = text.encode("utf-8", "replace").decode()
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only, separators=separators)
    assert decode(arguments, size) == text


@given(st.text(alphabet='{}":, \\ainputud8c0', max_size=40), st.integers(1, 5))
def test_the_text_does_not_depend_on_the_split(arguments: str, size: int) -> None:
    assert decode(arguments, size) == decode(arguments, len(arguments) or 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"other": 1}', '{"other": 1}'),
        ("plain", "plain"),
        ('{"input": "a\\ud83d\\ude00"}', "a😀"),
        ('{"input": "a\\ud83dx"}', "a\ufffdx"),
        ('{"input": "cut', "cut"),
        ("", ""),
    ],
)
def test_arguments_of_another_shape_are_kept(arguments: str, text: str) -> None:
    assert decode(arguments, 1) == text
