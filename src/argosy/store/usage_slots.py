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
from argosy.store.records import Ending, UsageRow

ENDINGS: tuple[Ending, ...] = get_args(Ending)
"""The state of a slot that ended is `ENDED` plus the index here."""
FREE, RUNNING, ENDED = 0, 1, 2

MOST_NANO_DOLLARS = 2**63 - 1
"""What a database can hold; only a price that is a mistake leads there."""
LATEST = 253_402_300_800.0
"""The year 10000: later than any moment that a row may tell of, in seconds since the epoch."""
LARGEST = 2**40
"""No count of tokens is more, and no rate: the sums of what a failing disk leaves may be more than a database holds."""

SLOT_BYTES = 1024
SLOT_WORDS = SLOT_BYTES // 8

# The words of a slot. Behind them are texts: whose request it is and for what and, when it has ended, the replica.
STATE, INPUT, CACHED, OUTPUT = 0, 1, 2, 3
RATE_INPUT, RATE_CACHED, RATE_OUTPUT = 4, 5, 6
STARTED_AT, ENDED_AT = 7, 8
CHECK, TEXT_SIZE, REPLICA_SIZE = 9, 10, 11
TEXT, REPLICA = 96, 896
"""Where they are in the slot, in bytes."""
LONGEST_REQUEST, LONGEST_TEXT = 160, 90
"""Bytes that are kept of the request's id and of each other text, where all of them would not fit."""


def is_time(seconds: float) -> bool:
    """Whether it can be seconds since the epoch."""
    return 0 <= seconds < LATEST


class Slot:
    """The row of one request, from its beginning until the store has it."""

    __slots__ = ("_at", "_ended", "_words", "table")

    def __init__(self, table: Table, number: int, ended: deque[Slot]) -> None:
        self.table = table
        self._words = table.words
        self._at = number * SLOT_WORDS
        self._ended = ended

    def begin(self, row: UsageRow, rates: Rates) -> None:
        """The request that `row` describes begins; it is to pay these rates."""
        words, at = self._words, self._at
        text = _text(row)
        self._write(TEXT, text)
        words[at + TEXT_SIZE] = len(text)
        words[at + CHECK] = zlib.crc32(text)
        words[at + RATE_INPUT] = rates.input
        words[at + RATE_CACHED] = rates.cached_input
        words[at + RATE_OUTPUT] = rates.output
        self.table.times[at + STARTED_AT] = row.started_at
        self.count(0, 0, 0)
        words[at + STATE] = RUNNING

    def count(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """So much was delivered so far, in all."""
        words, at = self._words, self._at
        words[at + INPUT] = input_tokens
        words[at + CACHED] = cached_tokens
        words[at + OUTPUT] = output_tokens

    @property
    def counter(self) -> int:
        """Address of the word that counts output tokens."""
        return self.table.address + (self._at + OUTPUT) * 8

    def end(self, status: Ending, replica: str, ended_at: float) -> None:
        """The request is over, and the slot no longer its own: the row waits for the store."""
        words, at = self._words, self._at
        text = replica.encode("utf-8", "replace")[: SLOT_BYTES - REPLICA]
        self._write(REPLICA, text)
        words[at + REPLICA_SIZE] = len(text)
        self.table.times[at + ENDED_AT] = ended_at
        words[at + STATE] = ENDED + ENDINGS.index(status)
        self._ended.append(self)

    def free(self) -> None:
        """The store has the row."""
        self._words[self._at + STATE] = FREE

    @property
    def state(self) -> int:
        """`FREE`, `RUNNING`, or `ENDED` and how."""
        return self._words[self._at + STATE]

    @property
    def sound(self) -> bool:
        """Whether it can be read whose it is, how it ended, when, and what it counted.

        Only a failing disk, or power, leaves others.
        """
        words, at = self._words, self._at
        return (
            FREE <= words[at + STATE] < ENDED + len(ENDINGS)
            and all(is_time(self.table.times[at + word]) for word in (STARTED_AT, ENDED_AT))
            and all(0 <= words[at + word] <= LARGEST for word in range(INPUT, RATE_OUTPUT + 1))
            and words[at + TEXT_SIZE] > 0
            and zlib.crc32(self._read(TEXT, TEXT_SIZE)) == words[at + CHECK]
        )

    def row(self) -> UsageRow:
        """The row, of a request that has ended."""
        words, times, at = self._words, self.table.times, self._at
        texts = self._read(TEXT, TEXT_SIZE).decode("utf-8", "replace").split("\0")
        request, organisation, project, key, user, model, *way = texts
        asked, route = way or ("", "")  # the version before kept neither
        counts = words[at + INPUT], words[at + CACHED], words[at + OUTPUT]
        rates = Rates(words[at + RATE_INPUT], words[at + RATE_CACHED], words[at + RATE_OUTPUT])
        return UsageRow(
            request=request,
            organisation=organisation,
            project=project,
            key=key,
            user=user,
            model=model,
            asked=asked,
            route=route,
            replica=self._read(REPLICA, REPLICA_SIZE).decode("utf-8", "replace"),
            started_at=times[at + STARTED_AT],
            ended_at=times[at + ENDED_AT],
            status=ENDINGS[words[at + STATE] - ENDED],
            input_tokens=counts[0],
            cached_tokens=counts[1],
            output_tokens=counts[2],
            nano_dollars=min(rates.cost(*counts), MOST_NANO_DOLLARS),
        )

    def _write(self, place: int, text: bytes) -> None:
        start = self._at * 8 + place
        self.table.memory[start : start + len(text)] = text

    def _read(self, place: int, size: int) -> bytes:
        start = self._at * 8 + place
        return self.table.memory[start : start + self._words[self._at + size]]


class Table:
    """Slots in a row, the first of them the table's head. In a file that is locked, or in plain memory."""

    def __init__(self, memory: mmap.mmap, path: Path | None = None, file: int = -1) -> None:
        """Owns `memory` and the file that is mapped there: its path and its descriptor."""
        self.memory = memory
        self.path = path
        self._file = file
        self.words = memoryview(memory).cast("q")
        self.times = memoryview(memory).cast("d")
        """The same words, as floats."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.size = len(memory) // SLOT_BYTES - 1
        self.free: list[Slot] = []

    @property
    def idle(self) -> bool:
        """Whether none of its slots is in use."""
        return len(self.free) == self.size

    @property
    def alive_at(self) -> float:
        """When its owner was last known to live, in seconds since the epoch."""
        return self.times[1]

    @alive_at.setter
    def alive_at(self, now: float) -> None:
        self.times[1] = now

    def sync(self) -> None:
        """Wait until it is on the disk."""
        if self.path is not None:
            os.fdatasync(self._file)

    def close(self) -> None:
        """Let go of it. A file stays as it is, and is nobody's."""
        self.words.release()
        self.times.release()
        self.memory.close()
        if self.path is not None:
            os.close(self._file)

    def remove(self) -> None:
        """Let go of it, and of its file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.close()


def _text(row: UsageRow) -> bytes:
    """Whose request it is and for what, in as many bytes as a slot has for it."""
    whose = (row.request, row.organisation, row.project, row.key, row.user)
    texts = (*whose, row.model, row.asked, row.route)
    whole = "\0".join(texts)
    if whole.isascii() and len(whole) <= REPLICA - TEXT and whole.count("\0") == len(texts) - 1:
        return whole.encode()
    parts = [text.replace("\0", "").encode("utf-8", "replace") for text in texts]
    if sum(map(len, parts)) + len(parts) - 1 > REPLICA - TEXT:
        first, *others = parts
        parts = [first[:LONGEST_REQUEST], *(other[:LONGEST_TEXT] for other in others)]
    return b"\0".join(parts)
