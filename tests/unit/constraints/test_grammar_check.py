"""Grammar texts as engines get them."""

from __future__ import annotations

import json

import pytest

from argosy.constraints import check_grammar
from argosy.protocol import ApiError


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"name": "g", "lark_grammar": text}]})


@pytest.mark.parametrize(
    "text",
    [
        _lark('start: "a"'),
        _lark("start: <[151657]> /[a-z]+/ <[151658]>"),
        _lark("start: <tool_call> /[a-z]+/"),
        json.dumps(
            {
                "grammars": [
                    {"name": "g", "lark_grammar": 'start: "x" @g_1'},
                    {"name": "g_1", "json_schema": {"type": "object"}},
                ]
            }
        ),
    ],
)
def test_valid_grammar(text: str) -> None:
    check_grammar(text, "tools")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "EOF"),
        ('{"grammars": []}', "empty"),
        (_lark("start: other"), "other"),
        (_lark("start: @other"), "other"),
        (_lark("start: " + "(" * 5_000), "nested"),
        (" " * (5 * 2**20), "bytes"),
    ],
)
def test_invalid_grammar(text: str, message: str) -> None:
    with pytest.raises(ApiError) as error:
        check_grammar(text, "tools")
    assert (error.value.status, error.value.code, error.value.param) == (
        400,
        "invalid_grammar",
        "tools",
    )
    assert message in error.value.message
    assert "\n" not in error.value.message
