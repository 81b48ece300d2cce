"""Slots of the usage log: counts and texts belong to one request and never overflow into another."""

from __future__ import annotations

import ctypes
from pathlib import Path
from unittest import mock

import pytest
from tests.support.usage_log_harness import NOW, RATES, drain, new_record, outcome

from argosy.policy import Rates
from argosy.protocol import TokenUsage
from argosy.store import UsageLog


def test_reused_slot_has_no_data_of_the_previous_request(tmp_path: Path) -> None:
    first = UsageLog(tmp_path)
    slot = first.allocate_slot(new_record("before"), RATES)
    slot.set_counts(TokenUsage(100, 40, 7))
    slot.finish("completed", "", NOW)
    first.drain(lambda _: None)
    first.allocate_slot(new_record("again"), RATES)
    first.close()
    second = UsageLog(tmp_path)
    (recovered,) = second.recover()
    assert (recovered.request, outcome(recovered)) == ("again", ("interrupted", (0, 0, 0)))
    second.close()


@pytest.mark.parametrize("replica", ["chat-1-0", "r" * 300, "http://[::1]:8001"])
@pytest.mark.parametrize("digest", ["", "sha256:" + "a" * 64])
def test_replica_and_digest_share_their_space(tmp_path: Path, replica: str, digest: str) -> None:
    log = UsageLog(tmp_path)
    log.allocate_slot(new_record("r"), RATES).finish("completed", replica, NOW, digest)
    (record,) = drain(log)
    log.close()
    assert record.digest == digest
    assert len(record.replica) >= min(len(replica), 56)
    assert replica.startswith(record.replica)


def test_native_counter_is_included_and_the_price_is_capped(tmp_path: Path) -> None:
    log = UsageLog(tmp_path)
    slot = log.allocate_slot(new_record("r"), Rates(1 << 40, 1 << 40, 1 << 40))
    slot.set_counts(TokenUsage(1 << 40))
    ctypes.c_int64.from_address(slot.output_counter_address).value += 9
    slot.finish("completed", "", NOW)
    (record,) = drain(log)
    log.close()
    assert (record.output_tokens, record.nano_dollars) == (9, (1 << 63) - 1)


def test_records_that_the_store_rejects_are_synced_to_disk(tmp_path: Path) -> None:
    log = UsageLog(tmp_path)
    log.allocate_slot(new_record("r")).finish("completed", "", NOW)

    def fail(_: object) -> None:
        raise OSError("down")

    with mock.patch("os.fdatasync") as fdatasync, pytest.raises(OSError, match="down"):
        log.drain(fail)
    assert fdatasync.called
    log.drain(lambda _: None)
    log.close()


@pytest.mark.parametrize("letter", ["u", "\u00fc", "\0u"])
def test_texts_around_the_maximum_size_are_complete_or_cut(tmp_path: Path, letter: str) -> None:
    log = UsageLog(tmp_path)
    users = [letter * size + "." * odd for size in range(190, 520) for odd in (0, 1)]
    slots = [
        log.allocate_slot(new_record(f"r{number}", user=user, key="k" * 300))
        for number, user in enumerate(users)
    ]
    for slot in slots:
        slot.finish("completed", f"there {'r' * 200}", NOW)
    records = drain(log)
    log.close()
    assert [record.request for record in records] == [f"r{number}" for number in range(len(users))]
    for user, record in zip(users, records, strict=True):
        plain = user.replace("\0", "")
        fits = len(f"{record.request}{plain}{'k' * 300}m".encode()) + 7 <= 800
        assert record.user == (plain if fits else record.user[:90])
        assert plain.startswith(record.user.rstrip("\ufffd"))
        assert record.replica.startswith("there r")
        assert (record.model, record.asked, record.route) == ("m", "", "")
