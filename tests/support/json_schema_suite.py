"""Outcome of each group of the JSON-Schema-Test-Suite, as text lines.

Write the table again after a change that is meant:

    python -m tests.support.json_schema_suite > tests/unit/constraints/json_schema_suite_table.txt
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from argosy.constraints import schema_grammar
from argosy.protocol import ApiError
from tests.support.grammar_matcher import accepts

DATA = Path(__file__).parents[1] / "unit/constraints/json_schema_suite.jsonl"
META_SCHEMAS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}


def read_suite() -> list[dict[str, Any]]:
    """Return the groups. Each schema names its draft."""
    groups = [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]
    for group in groups:
        if isinstance(group["schema"], dict):
            group["schema"] = {"$schema": META_SCHEMAS[group["draft"]], **group["schema"]}
    return groups


def write_document(document: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a document of the suite as an answer would write it."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def describe_outcomes() -> Iterator[str]:
    """Yield a line for each group: outcome, counts of documents, and the group."""
    for group in read_suite():
        name = f"{group['draft']} {group['file']}: {group['group']}"
        try:
            constraint = schema_grammar(group["schema"], strict=True, param="schema")
        except ApiError as error:
            yield f"refused ({error.code}) {name}"
            continue
        accepted = {True: 0, False: 0}
        total = {True: 0, False: 0}
        for document, is_valid in group["tests"]:
            total[is_valid] += 1
            accepted[is_valid] += accepts(constraint.grammar_text, write_document(document))
        outcome = "too wide" if accepted[False] else "exact"
        if accepted[True] < total[True]:
            outcome = "too wide" if accepted[False] else "narrow"
        yield (
            f"{outcome} ({accepted[True]} of {total[True]} valid documents accepted,"
            f" {accepted[False]} of {total[False]} invalid ones) {name}"
        )


if __name__ == "__main__":
    print("\n".join(describe_outcomes()))  # noqa: T201 - command
