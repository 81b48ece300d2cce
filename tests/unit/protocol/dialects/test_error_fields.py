"""Errors of the chat that runs for a request name the fields of the request."""

from __future__ import annotations

import json

import pytest

from argosy.protocol import ApiError
from argosy.protocol.dialects import (
    ErrorEncoder,
    encode_anthropic_error,
    encode_ollama_error,
    encode_responses_error,
)

APIS: dict[str, ErrorEncoder] = {
    "responses": encode_responses_error,
    "messages": encode_anthropic_error,
    "ollama": encode_ollama_error,
}
TOO_LONG = "The request needs 9 tokens (6 in 'messages', 3 to generate). Lower max_tokens."
SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("api", "message", "renamed"),
    [
        (
            "responses",
            TOO_LONG,
            "The request needs 9 tokens (6 in 'input', 3 to generate). Lower max_output_tokens.",
        ),
        ("responses", "'messages[0].content[1]' is no text.", "'input' is no text."),
        ("responses", f"'{SCHEMA}' at '#/a' is bad.", "'text.format.schema' at '#/a' is bad."),
        ("responses", "'tools[1].function.name' is bad.", "'tools[1].name' is bad."),
        ("responses", "'input[0].role' is bad.", "'input[0].role' is bad."),
        ("messages", TOO_LONG, TOO_LONG),
        ("messages", "'stop[1]' is bad. Do not stop.", "'stop_sequences[1]' is bad. Do not stop."),
        ("messages", "'tools[1].function.parameters' is bad.", "'tools[1].input_schema' is bad."),
        ("messages", f"'{SCHEMA}' is bad.", "'output_config.format.schema' is bad."),
        ("ollama", "'max_tokens' is 0.", "'options.num_predict' is 0."),
        ("ollama", "'top_p' is 2.", "'options.top_p' is 2."),
        ("ollama", f"'{SCHEMA}' is bad.", "'format' is bad."),
    ],
)
def test_message_has_the_names_of_the_request(api: str, message: str, renamed: str) -> None:
    body = json.loads(APIS[api](ApiError(400, "", message), "req_1"))
    error = body["error"]
    assert (error if isinstance(error, str) else error["message"]) == renamed


@pytest.mark.parametrize(
    ("param", "renamed"),
    [
        ("messages[0].content", "input"),
        ("max_tokens", "max_output_tokens"),
        ("a", "a"),
        (None, None),
    ],
)
def test_param_has_the_name_of_the_request(param: str | None, renamed: str | None) -> None:
    error = ApiError(400, "x", "No.", param=param, details={"kept": 1})
    assert json.loads(encode_responses_error(error, "req_1")) == {
        "error": {
            "message": "No.",
            "type": "invalid_request_error",
            "param": renamed,
            "code": "x",
            "kept": 1,
        },
        "request_id": "req_1",
    }
