"""Tables of test cases in JSON lines, each with its `table`, its `name` and its columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def read_cases(path: Path, table: str) -> list[ParameterSet]:
    """Return the cases of a table for `pytest.mark.parametrize`, with their columns in the order of the file."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    cases = [row for row in rows if row.pop("table") == table]
    return [pytest.param(*list(row.values())[1:], id=row["name"]) for row in cases]
