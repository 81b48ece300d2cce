"""The file of one checkpoint's packed weights: written payload by payload, checked and mapped as a whole.

Payloads lie at multiples of `ALIGNMENT`, padded with zeros:

    header (magic, place and size of the index, CRC-32 of the index) | payloads | index

Only a crash of the machine could leave a known file half-written. The sums over the payloads tell: they are checked
before anything of the file is used, and cost less than waiting for the disk after writing would.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import msgspec
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

PACK_FILE_MAGIC = b"ArgoPak1"
HEADER = struct.Struct("<8sQQI")
PAYLOAD_ALIGNMENT_BYTES = max(4096, mmap.ALLOCATIONGRANULARITY)


class DamagedPackFileError(Exception):
    """A file that is not what was written."""


class PayloadSpan(NamedTuple):
    """Where a payload lies in the file, in bytes, and the sum of its 64-bit words."""

    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class PackFile:
    """A whole file, mapped and checked."""

    path: Path
    data: Tensor
    index: dict[str, PayloadSpan]

    def payload(self, key: str, nbytes: int) -> Tensor:
        """Raises RuntimeError, so that loading is tried anew without the file, when the size is another."""
        span = self.index[key]
        if span.nbytes != nbytes:
            self.path.unlink(missing_ok=True)
            raise RuntimeError(
                f"{self.path} has {span.nbytes} bytes of {key}, not {nbytes}; it was removed"
            )
        return self.data[span.offset : span.offset + nbytes]


def read_pack_file(path: Path) -> PackFile:
    """The file's contents, checked. Raises FileNotFoundError, or DamagedError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            magic, offset, length, crc = HEADER.unpack(file.read(HEADER.size))
            file.seek(offset)
            index = file.read(length)
            if magic != PACK_FILE_MAGIC or offset + length != size or zlib.crc32(index) != crc:
                raise DamagedPackFileError("its header and its index do not agree")
            spans = msgspec.msgpack.decode(index, type=dict[str, PayloadSpan])
            data = _map_file(file, size)
    except (ValueError, OverflowError, struct.error) as error:
        raise DamagedPackFileError(str(error)) from error
    for key, span in spans.items():
        if _checksum(data[span.offset : span.offset + _align_up(span.nbytes)]) != span.checksum:
            raise DamagedPackFileError(f"the sum of {key} is wrong")
    with contextlib.suppress(OSError):
        os.utime(path)  # used now: files give way in this order
    return PackFile(path, data, spans)


class PackWriter:
    """A file that payloads are added to. What was added is read through a mapping from then on."""

    def __init__(self, file: BinaryIO, required_bytes: int, max_bytes: int) -> None:
        """Begin `file` anew. Raises OSError when `need_bytes` do not fit into `room_bytes`."""
        self.index: dict[str, PayloadSpan] = {}
        self._file = file
        self._max_bytes = max_bytes
        self._end_offset = PAYLOAD_ALIGNMENT_BYTES
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._check_space(required_bytes)
        file.truncate(0)
        file.truncate(max_bytes)  # takes no space, and all of it can be mapped
        self._data = _map_file(file, max_bytes)

    def add_payload(self, key: str, nbytes: int, pack: Callable[[Tensor], None]) -> Tensor:
        """Pack into a buffer, write that, and give back the mapping of what was written.

        Writing to the mapping itself would save a copy, and a full disk would kill the process.
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
        """Make the file whole."""
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
    """The first `nbytes` of a file, shared with whoever maps it too."""
    mapped = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_WILLNEED)  # from disk in large pieces, not page by page
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to is the point
        return torch.frombuffer(mapped, dtype=torch.uint8)


def _align_up(nbytes: int) -> int:
    return -(-nbytes // PAYLOAD_ALIGNMENT_BYTES) * PAYLOAD_ALIGNMENT_BYTES


def _checksum(payload: Tensor) -> int:
    """Modulo 2**64; at the speed of memory, unlike a CRC."""
    return int(payload.view(torch.int64).sum())
