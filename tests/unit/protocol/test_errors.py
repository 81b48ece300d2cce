"""Errors: bodies in the shape of OpenAI, and a table of codes that agrees with the source."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from argosy.protocol import ERROR_CODES, ApiError, invalid_request

SOURCE = "".join(path.read_text() for path in (Path(__file__).parents[3] / "src").rglob("*.py"))
DOCUMENTED = {(error.status, error.code) for error in ERROR_CODES}
RAISED = {
    (int(status), code)
    for status, code in re.findall(r'ApiError\(\s*(\d{3}),\s*"([a-z_]+)"', SOURCE)
} | {
    (400, code)
    for code in re.findall(r'invalid_request\([^()]*(?:\([^()]*\)[^()]*)*,\s*"([a-z_]+)"\)', SOURCE)
    if code.startswith(("invalid", "unknown", "missing", "context", "unsupported"))
}


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


def test_every_raised_code_is_documented() -> None:
    assert set() == RAISED - DOCUMENTED


def test_every_documented_code_occurs_in_the_source() -> None:
    table = (Path(__file__).parents[3] / "src/argosy/protocol/errors.py").read_text()
    rest = SOURCE.replace(table, "")
    assert [code for _, code in DOCUMENTED if f'"{code}"' not in rest] == []


def test_rows_are_unique_and_sorted_by_status() -> None:
    statuses = [error.status for error in ERROR_CODES]
    assert statuses == sorted(statuses)
    assert len(DOCUMENTED) == len(ERROR_CODES)
