"""File format of one checkpoint's packed weights, written payload by payload and mapped as a whole.

Payloads start at multiples of `PAYLOAD_ALIGNMENT_BYTES` and are padded with zeros:

    header (magic, offset and size of the index, CRC-32 of the index) | payloads | index

Only a crash of the machine can leave a complete-looking file with missing data. Checksums of the payloads detect this
when the file is opened. They cost less time than flushing the file to the disk after writing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import torch
from torch import Tensor

PACK_FILE_MAGIC = b"ArgoPak1"
HEADER = struct.Struct("<8sQQI")
PAYLOAD_ALIGNMENT_BYTES = max(4096, mmap.ALLOCATIONGRANULARITY)


class DamagedPackFileError(Exception):
    """Content of a pack file differs from what was written."""


class PayloadSpan(NamedTuple):
    """Position of a payload in the file, in bytes, and the sum of its 64-bit words."""

    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class PackFile:
    """Complete pack file, mapped and verified."""

    path: Path
    data: Tensor
    index: dict[str, PayloadSpan]

    def payload(self, key: str, nbytes: int) -> Tensor:
        """Return a payload.

        Raises:
            RuntimeError: The payload has another size than `nbytes`. The file is removed, so that a retry packs anew.
        """
        span = self.index[key]
        if span.nbytes != nbytes:
            self.path.unlink(missing_ok=True)
            raise RuntimeError(
                f"{self.path} has {span.nbytes} bytes of {key}, not {nbytes}; it was removed, load the model again"
            )
        return self.data[span.offset : span.offset + nbytes]


def read_pack_file(path: Path) -> PackFile:
    """Map a pack file and verify its checksums.

    Raises:
        FileNotFoundError: The file does not exist.
        DamagedPackFileError: The header, the index or a checksum is wrong.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            magic, offset, length, crc = HEADER.unpack(file.read(HEADER.size))
            file.seek(offset)
            index = file.read(length)
            if magic != PACK_FILE_MAGIC or offset + length != size or zlib.crc32(index) != crc:
                raise DamagedPackFileError("the header and the index do not match")
            spans = msgspec.msgpack.decode(index, type=dict[str, PayloadSpan])
            data = _map_file(file, size)
    except (ValueError, OverflowError, struct.error) as error:
        raise DamagedPackFileError(str(error)) from error
    for key, span in spans.items():
        if _checksum(data[span.offset : span.offset + _align_up(span.nbytes)]) != span.checksum:
            raise DamagedPackFileError(f"the checksum of {key} is wrong")
    with contextlib.suppress(OSError):
        os.utime(path)  # modification time orders the eviction
    return PackFile(path, data, spans)


class PackWriter:
    """Writer of a pack file, which returns each added payload as a mapping of the file."""

    def __init__(self, file: BinaryIO, required_bytes: int, max_bytes: int) -> None:
        """Truncate `file` and start writing.

        Raises:
            OSError: `required_bytes` exceed `max_bytes`.
        """
        self.index: dict[str, PayloadSpan] = {}
        self._file = file
        self._max_bytes = max_bytes
        self._end_offset = PAYLOAD_ALIGNMENT_BYTES
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._check_space(required_bytes)
        file.truncate(0)
        file.truncate(max_bytes)  # sparse, so that all of it can be mapped
        self._data = _map_file(file, max_bytes)

    def add_payload(self, key: str, nbytes: int, pack: Callable[[Tensor], None]) -> Tensor:
        """Pack into a buffer, write the buffer, and return the mapping of the written bytes.

        Packing directly into the mapping would save a copy, but a full disk would then kill the process.
        """
        padded, offset = _align_up(nbytes), self._end_offset
        self._check_space(offset + padded)
        if len(self._scratch) < padded:
            self._scratch = torch.empty(padded, dtype=torch.uint8)
        buffer = self._scratch[:padded]
        pack(buffer[:nbytes])
        buffer[nbytes:] = 0
        self._write(buffer.numpy().data, offset)
        self._end_offset = offset + padded
        self.index[key] = PayloadSpan(offset, nbytes, _checksum(buffer))
        return self._data[offset : offset + nbytes]

    def finish(self) -> None:
        """Write the index and the header, and truncate the file to its final size."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        index = msgspec.msgpack.encode(self.index)
        self._write(memoryview(index), self._end_offset)
        header = HEADER.pack(PACK_FILE_MAGIC, self._end_offset, len(index), zlib.crc32(index))
        self._write(memoryview(header), 0)
        self._file.truncate(self._end_offset + len(index))

    def _check_space(self, nbytes: int) -> None:
        if nbytes > self._max_bytes:
            raise OSError(
                f"packed weights of {nbytes:,} bytes do not fit into {self._max_bytes:,}"
                " (the limit, or half of the free disk)"
            )

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written


def _map_file(file: BinaryIO, nbytes: int) -> Tensor:
    """Map the first `nbytes` of a file, sharing the memory with other processes that map it."""
    mapped = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_WILLNEED)  # reads from disk in large pieces instead of single pages
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the tensor is read-only
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _align_up(nbytes: int) -> int:
    return -(-nbytes // PAYLOAD_ALIGNMENT_BYTES) * PAYLOAD_ALIGNMENT_BYTES


def _checksum(payload: Tensor) -> int:
    """Return the sum of the 64-bit words modulo 2**64, which is faster than a CRC."""
    return int(payload.view(torch.int64).sum())
