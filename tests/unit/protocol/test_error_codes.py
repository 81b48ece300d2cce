"""The table of error codes, from which docs/reference/errors.md is generated, agrees with the source."""

from __future__ import annotations

import re
from pathlib import Path

from argosy.protocol import ERROR_CODES

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
