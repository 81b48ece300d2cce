"""Slots of the journal: what is counted in them is one request's, and so are its texts."""

from __future__ import annotations

import ctypes
from pathlib import Path
from unittest import mock

import pytest
from tests.unit.store.test_usage_log import NOW, RATES, fate, row

from argosy.policy import Rates
from argosy.store import UsageLog, UsageRecord


def test_a_slot_that_is_used_again_has_nothing_of_the_request_before(tmp_path: Path) -> None:
    first = UsageLog(tmp_path)
    slot = first.allocate_slot(row("before"), RATES)
    slot.set_counts(100, 40, 7)
    slot.finish("completed", "", NOW)
    first.drain(lambda _: None)
    first.allocate_slot(row("again"), RATES)
    first.close()
    second = UsageLog(tmp_path)
    assert [(one.request, fate(one)) for one in second.recover()] == [
        ("again", ("interrupted", (0, 0, 0)))
    ]
    second.close()


def test_native_code_counts_in_the_same_place_and_no_price_is_too_much(tmp_path: Path) -> None:
    spool = UsageLog(tmp_path)
    slot = spool.allocate_slot(row("r"), Rates(1 << 40, 1 << 40, 1 << 40))
    slot.set_counts(1 << 40, 0, 0)
    ctypes.c_int64.from_address(slot.output_counter_address).value += 9
    slot.finish("completed", "", NOW)
    rows: list[UsageRecord] = []
    spool.drain(rows.extend)
    spool.close()
    assert (rows[0].output_tokens, rows[0].nano_dollars) == (9, (1 << 63) - 1)


def test_what_the_store_does_not_take_is_brought_to_the_disk(tmp_path: Path) -> None:
    spool = UsageLog(tmp_path)
    spool.allocate_slot(row("r")).finish("completed", "", NOW)

    def fail(_: object) -> None:
        raise OSError("down")

    with mock.patch("os.fdatasync") as synced, pytest.raises(OSError, match="down"):
        spool.drain(fail)
    assert synced.called
    spool.drain(lambda _: None)
    spool.close()


def test_who_dies_at_once_was_last_seen_when_it_began(tmp_path: Path) -> None:
    first = UsageLog(tmp_path, clock=lambda: NOW)
    first.allocate_slot(row("a"))
    first.close()
    second = UsageLog(tmp_path, clock=lambda: NOW + 5000)
    assert [one.ended_at for one in second.recover()] == [NOW]
    second.close()


@pytest.mark.parametrize("letter", ["u", "\u00fc", "\0u"])
def test_texts_of_any_size_stay_in_their_row(tmp_path: Path, letter: str) -> None:
    """Around what there is room for, too."""
    spool = UsageLog(tmp_path)
    users = [letter * size + "." * odd for size in range(190, 520) for odd in (0, 1)]
    begun = [
        spool.allocate_slot(row(f"r{n}", user=user, key="k" * 300)) for n, user in enumerate(users)
    ]
    for slot in begun:
        slot.finish("completed", f"there {'r' * 200}", NOW)
    rows: list[UsageRecord] = []
    spool.drain(rows.extend)
    spool.close()
    assert [one.request for one in rows] == [f"r{n}" for n in range(len(users))]
    for user, one in zip(users, rows, strict=True):
        plain = user.replace("\0", "")
        whole = len(f"{one.request}{plain}{'k' * 300}m".encode()) + 7 <= 800
        assert one.user == (plain if whole else one.user[:90])
        assert plain.startswith(one.user.rstrip("\ufffd"))
        assert one.replica.startswith("there r")
        assert (one.model, one.asked, one.route) == ("m", "", "")
