"""Slots of the usage log: usage records in kernel-owned memory, in tables with one slot for each request.

A slot has 128 words. The first word holds the state (free, running, or ended with a status) and is written last, so a
reader of a killed process's table finds complete records. Counts are words too, each written in one store.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import zlib
from collections import deque
from operator import attrgetter
from pathlib import Path
from typing import get_args

from argosy.policy import Rates
from argosy.protocol import TokenUsage
from argosy.store.records import UsageRecord, UsageStatus

USAGE_STATUSES: tuple[UsageStatus, ...] = get_args(UsageStatus)
"""Statuses in the order of their encoding. The state of an ended slot is `ENDED` plus the index."""
FREE, RUNNING, ENDED = 0, 1, 2

MAX_NANO_DOLLARS = 2**63 - 1
"""Maximum integer of a database column. Only a wrong price leads to a larger cost."""
MAX_TIME_S = 253_402_300_800.0
"""Start of the year 10000 in seconds since the epoch, an upper bound of valid times."""
MAX_COUNT = 2**40
"""Maximum of a valid token count or rate. Larger values come from disk errors and could overflow database sums."""

SLOT_BYTES = 1024
SLOT_WORDS = SLOT_BYTES // 8

# Word offsets in a slot. Texts follow the words: ids and names of the request and, after its end, the
# replica and the digest of its model.
STATE_WORD, INPUT_WORD, CACHED_WORD, OUTPUT_WORD = 0, 1, 2, 3
INPUT_RATE_WORD, CACHED_RATE_WORD, OUTPUT_RATE_WORD = 4, 5, 6
STARTED_AT_WORD, ENDED_AT_WORD = 7, 8
CHECKSUM_WORD, TEXT_SIZE_WORD, REPLICA_SIZE_WORD = 9, 10, 11
_BEGUN_WORDS = struct.Struct("=3q3q2d2q")
"""Words of a slot whose request begins, from `INPUT_WORD` to `TEXT_SIZE_WORD`. Readers ignore them until it runs."""
TEXT_OFFSET, REPLICA_OFFSET = 96, 896
"""Byte offsets of the texts in the slot."""
_CAPPED = b"\0capped"
"""Follows the digest of a record whose usage was capped."""
_FINDINGS, _END = b"\1", b"\0"
"""Stand before and after the findings of an ended request, which follow its texts as far as there is room."""
_TEXT_FIELDS = ("request", "organisation", "project", "key", "user", "model", "asked", "route")
"""Ids and names of a record in the order of the slot."""
_texts_of = attrgetter(*_TEXT_FIELDS)
MAX_REQUEST_ID_BYTES, MAX_TEXT_BYTES = 160, 90
"""Bytes kept of the request id and of each other text if the texts together do not fit."""


def is_valid_time(seconds: float) -> bool:
    """Return whether the value is a plausible time in seconds since the epoch."""
    return 0 <= seconds < MAX_TIME_S


class UsageSlot:
    """Storage of one request's usage record from its start until the store has it."""

    __slots__ = ("_ended_slots", "_first_word", "_words", "table")

    def __init__(self, table: UsageSlotTable, number: int, ended_slots: deque[UsageSlot]) -> None:
        self.table = table
        self._words = table.words
        self._first_word = number * SLOT_WORDS
        self._ended_slots = ended_slots

    def begin(self, record: UsageRecord, rates: Rates) -> None:
        """Write the descriptive fields of `record` and the rates, and mark the slot running."""
        words, base = self._words, self._first_word
        text = _encode_texts(record)
        self._write_text(TEXT_OFFSET, (text + _END)[: REPLICA_OFFSET - TEXT_OFFSET])
        _BEGUN_WORDS.pack_into(
            self.table.memory,
            (base + INPUT_WORD) * 8,
            *(0, 0, 0),
            *(rates.input, rates.cached_input, rates.output),
            *(record.started_at, 0.0),
            *(zlib.crc32(text), len(text)),
        )
        words[base + STATE_WORD] = RUNNING

    def set_counts(self, usage: TokenUsage) -> None:
        """Set the delivered tokens so far."""
        words, base = self._words, self._first_word
        words[base + INPUT_WORD] = usage.prompt_tokens
        words[base + CACHED_WORD] = usage.cached_tokens
        words[base + OUTPUT_WORD] = usage.output_tokens

    @property
    def output_counter_address(self) -> int:
        """Memory address of the word that counts output tokens, for native code."""
        return self.table.address + (self._first_word + OUTPUT_WORD) * 8

    def finish(
        self,
        status: UsageStatus,
        replica: str,
        ended_at: float,
        digest: str = "",
        *,
        is_capped: bool = False,
        findings: str = "",
    ) -> None:
        """Mark the request ended and queue the record for the store. The request must not use the slot afterwards."""
        words, base = self._words, self._first_word
        text = replica.encode("utf-8", "replace")
        if digest or is_capped:
            suffix = b"\0" + digest.encode("ascii", "replace") + (_CAPPED if is_capped else b"")
            text = text[: SLOT_BYTES - REPLICA_OFFSET - len(suffix)] + suffix
        text = text[: SLOT_BYTES - REPLICA_OFFSET]
        self._write_text(REPLICA_OFFSET, text)
        words[base + REPLICA_SIZE_WORD] = len(text)
        offset = TEXT_OFFSET + words[base + TEXT_SIZE_WORD]
        if findings and (room := REPLICA_OFFSET - offset - len(_FINDINGS + _END)) > 0:
            found = findings.encode("utf-8", "replace")
            if len(found) > room:
                found = found[:room].rpartition(b"; ")[0]
            self._write_text(offset, _FINDINGS + found + _END)
        self.table.times[base + ENDED_AT_WORD] = ended_at
        words[base + STATE_WORD] = ENDED + USAGE_STATUSES.index(status)
        self._ended_slots.append(self)

    def release(self) -> None:
        """Free the slot after the store has the record."""
        self._words[self._first_word + STATE_WORD] = FREE

    @property
    def state(self) -> int:
        """`FREE`, `RUNNING`, or `ENDED` plus the index of the status."""
        return self._words[self._first_word + STATE_WORD]

    @property
    def is_intact(self) -> bool:
        """Whether the state, times, counts and texts are plausible and the checksum of the texts matches.

        Only a failing disk or a power failure damages slots.
        """
        words, base = self._words, self._first_word
        return (
            FREE <= words[base + STATE_WORD] < ENDED + len(USAGE_STATUSES)
            and all(
                map(is_valid_time, self.table.times[base + STARTED_AT_WORD : base + CHECKSUM_WORD])
            )
            and all(
                0 <= count <= MAX_COUNT
                for count in words[base + INPUT_WORD : base + STARTED_AT_WORD]
            )
            and words[base + TEXT_SIZE_WORD] > 0
            and zlib.crc32(self._read_text(TEXT_OFFSET, TEXT_SIZE_WORD))
            == words[base + CHECKSUM_WORD]
        )

    def read_record(self) -> UsageRecord:
        """Decode the record of an ended request."""
        words, times, base = self._words, self.table.times, self._first_word
        texts = self._read_text(TEXT_OFFSET, TEXT_SIZE_WORD).decode("utf-8", "replace").split("\0")
        start = base * 8 + TEXT_OFFSET + words[base + TEXT_SIZE_WORD]
        found, _, _ = self.table.memory[start : base * 8 + REPLICA_OFFSET].partition(_END)
        findings = found[1:].decode("utf-8", "replace") if found.startswith(_FINDINGS) else ""
        ending = self._read_text(REPLICA_OFFSET, REPLICA_SIZE_WORD).decode("utf-8", "replace")
        replica, _, suffix = ending.partition("\0")
        digest, is_capped, _ = suffix.partition(_CAPPED.decode())
        usage = TokenUsage(
            words[base + INPUT_WORD], words[base + CACHED_WORD], words[base + OUTPUT_WORD]
        )
        rates = Rates(
            words[base + INPUT_RATE_WORD],
            words[base + CACHED_RATE_WORD],
            words[base + OUTPUT_RATE_WORD],
        )
        return UsageRecord(
            **dict(zip(_TEXT_FIELDS, texts, strict=True)),
            replica=replica,
            started_at=times[base + STARTED_AT_WORD],
            ended_at=times[base + ENDED_AT_WORD],
            status=USAGE_STATUSES[words[base + STATE_WORD] - ENDED],
            input_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            nano_dollars=min(rates.cost_nano_dollars(usage), MAX_NANO_DOLLARS),
            digest=digest,
            is_capped=bool(is_capped),
            findings=findings,
        )

    def _write_text(self, offset: int, text: bytes) -> None:
        start = self._first_word * 8 + offset
        self.table.memory[start : start + len(text)] = text

    def _read_text(self, offset: int, size_word: int) -> bytes:
        start = self._first_word * 8 + offset
        return self.table.memory[start : start + self._words[self._first_word + size_word]]


class UsageSlotTable:
    """Array of slots, the first of which is the header. Stored in a locked file or in anonymous memory."""

    def __init__(self, memory: mmap.mmap, path: Path | None = None, descriptor: int = -1) -> None:
        """Take ownership of `memory` and of the mapped file's path and descriptor."""
        self.memory = memory
        self.path = path
        self._descriptor = descriptor
        self.words = memoryview(memory).cast("q")
        self.times = memoryview(memory).cast("d")
        """The same words as floats."""
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.slot_count = len(memory) // SLOT_BYTES - 1
        self.free_slots: list[UsageSlot] = []

    @property
    def is_idle(self) -> bool:
        """Whether no slot is in use."""
        return len(self.free_slots) == self.slot_count

    @property
    def owner_alive_at(self) -> float:
        """Time of the owner's last heartbeat, in seconds since the epoch."""
        return self.times[1]

    @owner_alive_at.setter
    def owner_alive_at(self, now: float) -> None:
        self.times[1] = now

    def sync(self) -> None:
        """Flush the file to disk."""
        if self.path is not None:
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Release the memory and unlock the file, which stays on disk."""
        self.words.release()
        self.times.release()
        self.memory.close()
        if self.path is not None:
            os.close(self._descriptor)

    def remove(self) -> None:
        """Release the memory and delete the file."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.close()


def _encode_texts(record: UsageRecord) -> bytes:
    """Encode ids and names of the request, shortened to the space in a slot."""
    texts = _texts_of(record)
    joined = "\0".join(texts)
    if (
        joined.isascii()
        and len(joined) <= REPLICA_OFFSET - TEXT_OFFSET
        and joined.count("\0") == len(texts) - 1
    ):
        return joined.encode()
    parts = [text.replace("\0", "").encode("utf-8", "replace") for text in texts]
    if sum(map(len, parts)) + len(parts) - 1 > REPLICA_OFFSET - TEXT_OFFSET:
        first, *others = parts
        parts = [first[:MAX_REQUEST_ID_BYTES], *(other[:MAX_TEXT_BYTES] for other in others)]
    return b"\0".join(parts)
