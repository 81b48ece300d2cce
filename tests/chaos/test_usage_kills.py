"""A process that keeps usage is killed at any moment, or finds the disk full: no row is lost, none is there twice."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import msgspec

from argosy.policy import Rates
from argosy.store import UsageLog, UsageRecord

KILLS = 15
RATES = Rates(3, 1, 5)
Fate = tuple[str, int]
"""How a request ended, and its tokens."""


def child(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.support.usage_process", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def live_and_die(folder: Path, store: Path) -> dict[str, set[Fate | None]]:
    """One life: what may have become of each request that it began."""
    said: list[list[str]] = []
    lines = random.randrange(1, 3000)
    with child("count", folder, store) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.decode().split())
            if len(said) == lines:
                process.kill()
    fates: dict[str, set[Fate | None]] = {}
    for number, (what, name, *tokens) in enumerate(said):
        (before,) = fates.get(name, {None})
        counted = before[1] if before is not None else 0
        after: Fate = {
            "begin": ("interrupted", 0),
            "count": ("interrupted", int(tokens[0]) if tokens else 0),
            "end": ("completed", counted),
        }[what]
        maybe = number == len(said) - 1
        fates[name] = {before, after} if maybe else {after}
    return fates


def test_every_request_of_killed_processes_has_one_row_with_what_was_counted(
    tmp_path: Path,
) -> None:
    folder, store = tmp_path / "usage", tmp_path / "store"
    fates: dict[str, set[Fate | None]] = {}
    for _ in range(KILLS):
        fates |= live_and_die(folder, store)
    rows: list[UsageRecord] = []
    spool = UsageLog(folder)
    spool.recover()
    spool.drain(rows.extend)
    spool.close()
    torn = 0
    for line in filter(None, store.read_bytes().split(b"\n")):
        try:
            rows.append(msgspec.json.decode(line, type=UsageRecord))
        except msgspec.DecodeError:
            torn += 1
    assert torn <= KILLS
    kept: dict[str, UsageRecord] = {}
    for one in rows:
        assert kept.setdefault(one.request, one) == one
        assert one.nano_dollars == RATES.cost_nano_dollars(
            one.input_tokens, one.cached_tokens, one.output_tokens
        )
    assert set(kept) <= set(fates)
    for request, expected in fates.items():
        row = kept.get(request)
        assert (None if row is None else (row.status, row.output_tokens)) in expected
    assert not list(folder.glob("*.usage"))


def test_with_a_full_disk_requests_go_on_in_memory_up_to_a_bound(tmp_path: Path) -> None:
    with child("fill", tmp_path) as process:
        told = json.loads(process.communicate()[0])
    assert told["full"] == {"in_memory": 1, "files": 0, "refused": 1}
    assert told["room"]["files"] == 1
    assert told["room"]["left_in_memory"] == 0
    assert told["rows"] == 16 * 4095 + 2
