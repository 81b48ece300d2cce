"""Usage log of killed processes: each request has exactly one record with its last counts."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.support.usage_log_harness import RATES, drain

from argosy.protocol import TokenUsage
from argosy.store import UsageLog, UsageRecord

Outcome = tuple[str, int]
"""Status of a request and its number of tokens."""


def run_until_killed(folder: Path, store: Path) -> dict[str, set[Outcome | None]]:
    """Kill a process after a random number of operations. Returns the possible outcomes of its requests."""
    announced: list[list[str]] = []
    operations = random.randrange(1, 3000)
    command = [sys.executable, "-m", "tests.support.usage_process", str(folder), str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            announced.append(line.decode().split())
            if len(announced) == operations:
                process.kill()
    outcomes: dict[str, set[Outcome | None]] = {}
    for number, (operation, name, *tokens) in enumerate(announced):
        (before,) = outcomes.get(name, {None})
        counted = before[1] if before is not None else 0
        after: Outcome = {
            "begin": ("interrupted", 0),
            "count": ("interrupted", int(tokens[0]) if tokens else 0),
            "finish": ("completed", counted),
        }[operation]
        is_last = number == len(announced) - 1
        outcomes[name] = {before, after} if is_last else {after}
    return outcomes


@pytest.mark.parametrize("kills", [5, pytest.param(30, marks=pytest.mark.exhaustive)])
def test_killed_processes_leave_one_record_for_each_request(tmp_path: Path, kills: int) -> None:
    folder, store = tmp_path / "usage", tmp_path / "store"
    outcomes: dict[str, set[Outcome | None]] = {}
    for _ in range(kills):
        outcomes |= run_until_killed(folder, store)
    log = UsageLog(folder)
    log.recover()
    records = drain(log)
    log.close()
    torn_lines = 0
    for line in filter(None, store.read_bytes().split(b"\n")):
        try:
            records.append(msgspec.json.decode(line, type=UsageRecord))
        except msgspec.DecodeError:
            torn_lines += 1
    assert torn_lines <= kills
    records_by_request: dict[str, UsageRecord] = {}
    for record in records:
        assert records_by_request.setdefault(record.request, record) == record
        assert record.nano_dollars == RATES.cost_nano_dollars(
            TokenUsage(record.input_tokens, record.cached_tokens, record.output_tokens)
        )
    assert set(records_by_request) <= set(outcomes)
    for request, expected in outcomes.items():
        found = records_by_request.get(request)
        assert (None if found is None else (found.status, found.output_tokens)) in expected
    assert not list(folder.glob("*.usage"))
