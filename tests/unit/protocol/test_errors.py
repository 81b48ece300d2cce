"""Error bodies: the shape of OpenAI, and an error type for every status."""

from __future__ import annotations

import json

import pytest

from argosy.protocol import ApiError, invalid_request


def test_error_body_has_the_shape_of_openai() -> None:
    body = json.loads(invalid_request("Too hot. Lower it.", "temperature").encode_body("req_1"))
    assert body == {
        "error": {
            "message": "Too hot. Lower it.",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        },
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("status", "error_type"),
    [
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "overloaded_error"),
    ],
)
def test_error_type_follows_the_status(status: int, error_type: str) -> None:
    assert ApiError(status, "code", "message").type == error_type
