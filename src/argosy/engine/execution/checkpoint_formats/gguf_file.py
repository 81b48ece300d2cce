"""Reader of the structure of GGUF files: metadata and the place of each tensor. Needs no torch.

The `gguf` package reads a vocabulary of 150,000 tokens in seconds and trusts the lengths in a file, so this is our own
reader. Every length is checked against the size of the file before it is used.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argosy.model_store import check_no_pointers, gguf_part_names

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME_BYTES = 65535
MAX_NESTED_ARRAYS = 4
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBER_TYPES = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}


@dataclass(frozen=True, slots=True)
class GgufType:
    """Type of a tensor's elements, in blocks along the last dimension."""

    name: str
    block_size: int
    """Elements of a block."""
    block_bytes: int


GGUF_TYPES = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    20: GgufType("IQ4_NL", 32, 18),
    30: GgufType("BF16", 1, 2),
    39: GgufType("MXFP4", 32, 17),
}
"""Types that Argosy reads, by their number in files."""
_OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Place of a tensor in its file."""

    name: str
    shape: tuple[int, ...]
    """Shape with the contiguous dimension last, as in torch."""
    type: GgufType
    file: Path
    offset: int
    nbytes: int

    def read_bytes(self) -> NDArray[np.uint8]:
        """Map the tensor's bytes from the file."""
        return np.memmap(self.file, np.uint8, "r", self.offset, (self.nbytes,))


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a model in one GGUF file, or in several parts."""

    path: Path
    metadata: dict[str, object]
    """Values by key. Arrays of numbers are NumPy arrays, and arrays of strings are lists of bytes."""
    tensors: dict[str, GgufTensor]


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file with the name or the first bytes of a GGUF file."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of a model, of which `path` is the only or any part.

    Raises:
        ValueError: A part is missing, or is a pointer of Git LFS.
    """
    parts = [path.with_name(name) for name in gguf_part_names(path.name)]
    missing = [part.name for part in parts if part != path and not part.is_file()]
    if missing:
        raise ValueError(
            f"{path.parent} lacks {missing[0]}, a part of {path.name}; fetch all {len(parts)} parts"
        )
    check_no_pointers(part for part in parts if part.is_file())
    return parts


def read_gguf(path: Path) -> GgufFile:
    """Read the structure of a GGUF file and of its other parts.

    Raises:
        ValueError: A file is damaged or of another version, or a tensor has an unsupported type.
    """
    first, *others = [_read_part(part) for part in gguf_parts(path)]
    for other in others:
        first.tensors.update(other.tensors)
    return first


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        if isinstance(error, _GgufError):
            raise
        raise _GgufError(path, str(error)) from error


class _GgufError(ValueError):
    def __init__(self, path: Path, problem: str, remedy: str = "") -> None:
        super().__init__(
            f"cannot read {path}: {problem}; {remedy or 'the file is damaged, fetch it again'}"
        )


class _Parser:
    """Parser of one file, which checks every length against the bytes that are left."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._position = 0

    def parse(self) -> GgufFile:
        if self._take(len(MAGIC)) != MAGIC:
            raise _GgufError(self._path, "it does not start with GGUF", "give a GGUF file")
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            raise _GgufError(
                self._path,
                f"it has version {version}",
                "convert the model with a current llama.cpp on a little-endian machine",
            )
        num_tensors, num_values = self._unpack("<QQ")
        self._check_count(num_tensors, 24, "tensors")
        self._check_count(num_values, 13, "metadata values")
        metadata: dict[str, object] = {}
        for _ in range(num_values):
            key = self._string().decode()
            (kind,) = self._unpack("<I")
            metadata[key] = self._value(kind, key)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise _GgufError(self._path, f"general.alignment is {alignment}")
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, tensor_type, offset in entries:
            if name in tensors:
                raise _GgufError(self._path, f"it has two tensors {name}")
            tensors[name] = self._place(name, shape, tensor_type, start + offset)
        return GgufFile(self._path, metadata, tensors)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string(MAX_NAME_BYTES).decode()
        (num_dimensions,) = self._unpack("<I")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise _GgufError(self._path, f"{name} has {num_dimensions} dimensions")
        shape = self._unpack(f"<{num_dimensions}Q")
        kind, offset = self._unpack("<IQ")
        return name, shape[::-1], kind, offset

    def _place(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        tensor_type = GGUF_TYPES.get(kind)
        if tensor_type is None:
            supported = ", ".join(each.name for each in GGUF_TYPES.values())
            raise _GgufError(
                self._path,
                f"{name} is stored as {_OTHER_TYPES.get(kind, f'type {kind}')}",
                f"use a file in {supported}, such as Q4_K_M or Q8_0",
            )
        elements = 1
        for size in shape:
            elements *= size
        if elements == 0 or shape[-1] % tensor_type.block_size:
            raise _GgufError(
                self._path,
                f"{name} has shape {list(shape)}, which does not fit {tensor_type.name}",
            )
        nbytes = elements // tensor_type.block_size * tensor_type.block_bytes
        if offset + nbytes > len(self._data):
            raise _GgufError(
                self._path,
                f"{name} ends at byte {offset + nbytes:,} of {len(self._data):,}",
                "the download is incomplete, fetch it again",
            )
        return GgufTensor(name, shape, tensor_type, self._path, offset, nbytes)

    def _value(self, kind: int, key: str, depth: int = 0) -> object:
        if kind == _STRING:
            return self._string().decode("utf-8", "replace")
        if kind == _ARRAY:
            return self._array(key, depth)
        if kind not in _NUMBER_TYPES:
            raise _GgufError(self._path, f"{key} has the unknown type {kind}")
        dtype = np.dtype(_NUMBER_TYPES[kind])
        value = np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()
        return bool(value) if kind == _BOOL else value

    def _array(self, key: str, depth: int) -> object:
        kind, count = self._unpack("<IQ")
        if kind == _STRING:
            self._check_count(count, 8, key)
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            self._check_count(count, 12, key)
            if depth >= MAX_NESTED_ARRAYS:
                raise _GgufError(self._path, f"{key} has too many nested arrays")
            return [self._array(key, depth + 1) for _ in range(count)]
        if kind not in _NUMBER_TYPES:
            raise _GgufError(self._path, f"{key} has elements of the unknown type {kind}")
        dtype = np.dtype(_NUMBER_TYPES[kind])
        self._check_count(count, dtype.itemsize, key)
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _string(self, max_bytes: int | None = None) -> bytes:
        (length,) = self._unpack("<Q")
        if max_bytes is not None and length > max_bytes:
            raise _GgufError(self._path, f"a name has {length} bytes")
        return self._take(length)

    def _unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _take(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise _GgufError(
                self._path,
                f"it ends after {len(self._data):,} bytes, within its header",
                "the download is incomplete, fetch it again",
            )
        data = self._data[self._position : end]
        self._position = end
        return data

    def _check_count(self, count: int, min_bytes: int, what: str) -> None:
        if count * min_bytes > len(self._data) - self._position:
            raise _GgufError(self._path, f"it cannot hold {count:,} elements of {what}")
