"""Error bodies: OpenAI's shape, and a type for every status."""

from __future__ import annotations

import json

import pytest

from argosy.protocol import ApiError, invalid_request


def test_body() -> None:
    told = json.loads(invalid_request("Too hot. Lower it.", "temperature").encode_body("req_1"))
    assert told == {
        "error": {
            "message": "Too hot. Lower it.",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        },
        "request_id": "req_1",
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "server_error"),
        (503, "overloaded_error"),
    ],
)
def test_types(status: int, kind: str) -> None:
    assert ApiError(status, "code", "message").type == kind
