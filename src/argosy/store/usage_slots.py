"""Rows of usage as they lie in memory that the kernel keeps: tables of slots, each one request's.

A slot is 128 words. The first says whether it is free, running or how it ended, and is written last, so whoever
finds the table of a process that was killed at any instant reads whole rows. Counts are words too, each
written at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import zlib
from collections import deque
from pathlib import Path
from typing import get_args

from argosy.policy import Rates
from argosy.store.records import UsageRecord, UsageStatus

USAGE_STATUSES: tuple[UsageStatus, ...] = get_args(UsageStatus)
"""The state of a slot that ended is `ENDED` plus the index here."""
FREE, RUNNING, ENDED = 0, 1, 2

MAX_NANO_DOLLARS = 2**63 - 1
"""What a database can hold; only a price that is a mistake leads there."""
MAX_TIME_S = 253_402_300_800.0
"""The year 10000: later than any moment that a row may tell of, in seconds since the epoch."""
MAX_COUNT = 2**40
"""No count of tokens is more, and no rate: the sums of what a failing disk leaves may be more than a database holds."""

SLOT_BYTES = 1024
SLOT_WORDS = SLOT_BYTES // 8

# The words of a slot. Behind them are texts: whose request it is and for what and, when it has ended, the replica.
STATE_WORD, INPUT_WORD, CACHED_WORD, OUTPUT_WORD = 0, 1, 2, 3
INPUT_RATE_WORD, CACHED_RATE_WORD, OUTPUT_RATE_WORD = 4, 5, 6
STARTED_AT_WORD, ENDED_AT_WORD = 7, 8
CHECKSUM_WORD, TEXT_SIZE_WORD, REPLICA_SIZE_WORD = 9, 10, 11
TEXT_OFFSET, REPLICA_OFFSET = 96, 896
"""Where they are in the slot, in bytes."""
MAX_REQUEST_ID_BYTES, MAX_TEXT_BYTES = 160, 90
"""Bytes that are kept of the request's id and of each other text, where all of them would not fit."""


def is_valid_time(seconds: float) -> bool:
    """Whether it can be seconds since the epoch."""
    return 0 <= seconds < MAX_TIME_S


class UsageSlot:
    """The row of one request, from its beginning until the store has it."""

    __slots__ = ("_ended_slots", "_first_word", "_words", "table")

    def __init__(self, table: UsageSlotTable, number: int, ended_slots: deque[UsageSlot]) -> None:
        self.table = table
        self._words = table.words
        self._first_word = number * SLOT_WORDS
        self._ended_slots = ended_slots

    def begin(self, record: UsageRecord, rates: Rates) -> None:
        """The request that `row` describes begins; it is to pay these rates."""
        words, at = self._words, self._first_word
        text = _encode_texts(record)
        self._write_text(TEXT_OFFSET, text)
        words[at + TEXT_SIZE_WORD] = len(text)
        words[at + CHECKSUM_WORD] = zlib.crc32(text)
        words[at + INPUT_RATE_WORD] = rates.input
        words[at + CACHED_RATE_WORD] = rates.cached_input
        words[at + OUTPUT_RATE_WORD] = rates.output
        self.table.times[at + STARTED_AT_WORD] = record.started_at
        self.set_counts(0, 0, 0)
        words[at + STATE_WORD] = RUNNING

    def set_counts(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """So much was delivered so far, in all."""
        words, at = self._words, self._first_word
        words[at + INPUT_WORD] = input_tokens
        words[at + CACHED_WORD] = cached_tokens
        words[at + OUTPUT_WORD] = output_tokens

    @property
    def output_counter_address(self) -> int:
        """Address of the word that counts output tokens."""
        return self.table.address + (self._first_word + OUTPUT_WORD) * 8

    def finish(self, status: UsageStatus, replica: str, ended_at: float) -> None:
        """The request is over, and the slot no longer its own: the row waits for the store."""
        words, at = self._words, self._first_word
        text = replica.encode("utf-8", "replace")[: SLOT_BYTES - REPLICA_OFFSET]
        self._write_text(REPLICA_OFFSET, text)
        words[at + REPLICA_SIZE_WORD] = len(text)
        self.table.times[at + ENDED_AT_WORD] = ended_at
        words[at + STATE_WORD] = ENDED + USAGE_STATUSES.index(status)
        self._ended_slots.append(self)

    def release(self) -> None:
        """The store has the row."""
        self._words[self._first_word + STATE_WORD] = FREE

    @property
    def state(self) -> int:
        """`FREE`, `RUNNING`, or `ENDED` and how."""
        return self._words[self._first_word + STATE_WORD]

    @property
    def is_intact(self) -> bool:
        """Whether it can be read whose it is, how it ended, when, and what it counted.

        Only a failing disk, or power, leaves others.
        """
        words, at = self._words, self._first_word
        return (
            FREE <= words[at + STATE_WORD] < ENDED + len(USAGE_STATUSES)
            and all(
                is_valid_time(self.table.times[at + word])
                for word in (STARTED_AT_WORD, ENDED_AT_WORD)
            )
            and all(
                0 <= words[at + word] <= MAX_COUNT
                for word in range(INPUT_WORD, OUTPUT_RATE_WORD + 1)
            )
            and words[at + TEXT_SIZE_WORD] > 0
            and zlib.crc32(self._read_text(TEXT_OFFSET, TEXT_SIZE_WORD))
            == words[at + CHECKSUM_WORD]
        )

    def read_record(self) -> UsageRecord:
        """The row, of a request that has ended."""
        words, times, at = self._words, self.table.times, self._first_word
        texts = self._read_text(TEXT_OFFSET, TEXT_SIZE_WORD).decode("utf-8", "replace").split("\0")
        request, organisation, project, key, user, model, *way = texts
        asked, route = way or ("", "")  # the version before kept neither
        counts = words[at + INPUT_WORD], words[at + CACHED_WORD], words[at + OUTPUT_WORD]
        rates = Rates(
            words[at + INPUT_RATE_WORD], words[at + CACHED_RATE_WORD], words[at + OUTPUT_RATE_WORD]
        )
        return UsageRecord(
            request=request,
            organisation=organisation,
            project=project,
            key=key,
            user=user,
            model=model,
            asked=asked,
            route=route,
            replica=self._read_text(REPLICA_OFFSET, REPLICA_SIZE_WORD).decode("utf-8", "replace"),
            started_at=times[at + STARTED_AT_WORD],
            ended_at=times[at + ENDED_AT_WORD],
            status=USAGE_STATUSES[words[at + STATE_WORD] - ENDED],
            input_tokens=counts[0],
            cached_tokens=counts[1],
            output_tokens=counts[2],
            nano_dollars=min(rates.cost_nano_dollars(*counts), MAX_NANO_DOLLARS),
        )

    def _write_text(self, offset: int, text: bytes) -> None:
        start = self._first_word * 8 + offset
        self.table.memory[start : start + len(text)] = text

    def _read_text(self, offset: int, size_word: int) -> bytes:
        start = self._first_word * 8 + offset
        return self.table.memory[start : start + self._words[self._first_word + size_word]]


class UsageSlotTable:
    """Slots in a row, the first of them the table's head. In a file that is locked, or in plain memory."""

    def __init__(self, memory: mmap.mmap, path: Path | None = None, descriptor: int = -1) -> None:
        """Owns `memory` and the file that is mapped there: its path and its descriptor."""
        self.memory = memory
        self.path = path
        self._descriptor = descriptor
        self.words = memoryview(memory).cast("q")
        self.times = memoryview(memory).cast("d")
        """The same words, as floats."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.slot_count = len(memory) // SLOT_BYTES - 1
        self.free_slots: list[UsageSlot] = []

    @property
    def is_idle(self) -> bool:
        """Whether none of its slots is in use."""
        return len(self.free_slots) == self.slot_count

    @property
    def owner_alive_at(self) -> float:
        """When its owner was last known to live, in seconds since the epoch."""
        return self.times[1]

    @owner_alive_at.setter
    def owner_alive_at(self, now: float) -> None:
        self.times[1] = now

    def sync(self) -> None:
        """Wait until it is on the disk."""
        if self.path is not None:
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Let go of it. A file stays as it is, and is nobody's."""
        self.words.release()
        self.times.release()
        self.memory.close()
        if self.path is not None:
            os.close(self._descriptor)

    def remove(self) -> None:
        """Let go of it, and of its file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.close()


def _encode_texts(row: UsageRecord) -> bytes:
    """Whose request it is and for what, in as many bytes as a slot has for it."""
    whose = (row.request, row.organisation, row.project, row.key, row.user)
    texts = (*whose, row.model, row.asked, row.route)
    whole = "\0".join(texts)
    if (
        whole.isascii()
        and len(whole) <= REPLICA_OFFSET - TEXT_OFFSET
        and whole.count("\0") == len(texts) - 1
    ):
        return whole.encode()
    parts = [text.replace("\0", "").encode("utf-8", "replace") for text in texts]
    if sum(map(len, parts)) + len(parts) - 1 > REPLICA_OFFSET - TEXT_OFFSET:
        first, *others = parts
        parts = [first[:MAX_REQUEST_ID_BYTES], *(other[:MAX_TEXT_BYTES] for other in others)]
    return b"\0".join(parts)
