"""Native index of a text of tokens, which finds what followed earlier occurrences of its last tokens."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from argosy.native import (
    LOAD_FAILURE_REMEDY,
    NativeUnavailableError,
    build_library,
    prebuild_library,
)

SOURCE_FOLDER = Path(__file__).parent / "csrc"
COMPILER_FLAGS = ("-std=c++17", "-O2", "-fPIC")
MIN_MATCH = 3
"""Minimum number of tokens in common. With fewer, most continuations are noise."""
MAX_MATCH = 32
"""Number of last tokens that are compared."""
MAX_CANDIDATES = 16
"""Number of earlier positions that a search compares, latest first."""
MAX_CONTINUATION = 64
"""Maximum number of tokens of a continuation."""
SEPARATOR = -1
"""Token between two texts of one index. No match and no continuation contains it."""


class Continuation(NamedTuple):
    """Tokens that followed an earlier occurrence of a text's last tokens."""

    tokens: list[int]
    match_size: int
    """Number of tokens in common, from `MIN_MATCH` to `MAX_MATCH`."""
    age: int
    """Number of tokens of the index after the occurrence."""


class _Library:
    """Functions of csrc/token_index.cpp. They run without the GIL and do not check their arguments."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int64

        def declare(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            entry_point = library[f"argosy_token_index_{name}"]
            entry_point.restype, entry_point.argtypes = result, arguments
            return entry_point

        self.open = declare("open", pointer, number)
        self.close = declare("close", None, pointer)
        self.append = declare("append", number, pointer, pointer, number)
        self.find = declare("find", number, pointer, pointer, number, number, *(pointer,) * 3)


class TokenIndex:
    """Index of a text of tokens. Work and memory are bounded: about 10 bytes a token, and 16 candidates a search.

    Not thread-safe.
    """

    def __init__(self, max_tokens: int = 1 << 31) -> None:
        """Create an empty index of the last `max_tokens` tokens, which are rounded up to a power of two.

        Raises:
            NativeUnavailableError: The native code cannot be built or loaded.
            MemoryError: There is no memory for it.
        """
        self._library = library = load_token_index()
        capacity = 1 << max(3, (max_tokens - 1).bit_length())
        self._handle = handle = library.open(min(capacity, 1 << 31))
        if not handle:
            raise MemoryError
        weakref.finalize(self, library.close, handle)
        self.length = 0
        """Number of tokens that were appended."""
        self._output = array("i", bytes(4 * MAX_CONTINUATION))
        self._result = array("q", (0, 0))
        self._output_address = self._output.buffer_info()[0]
        self._result_address = self._result.buffer_info()[0]

    def append(self, tokens: Iterable[int]) -> None:
        """Append tokens, which must fit into 31 bits, or be `SEPARATOR`.

        Raises:
            MemoryError: There is no memory for them. The index must not be used any more.
        """
        ids = array("i", tokens)
        if self._library.append(self._handle, ids.buffer_info()[0], len(ids)):
            raise MemoryError
        self.length += len(ids)

    def find(self, limit: int, tail: list[int] | None = None) -> Continuation | None:
        """Find the longest match of the last tokens, and of equal ones the latest. Returns None without a match.

        Args:
            limit: Maximum number of tokens, up to `MAX_CONTINUATION`.
            tail: Last tokens of another text. None continues the index's own text, in which a match that overlaps the
                end is repeated up to the limit.
        """
        if tail is None:
            address, size = None, 0
        elif len(tail) < MIN_MATCH:
            return None
        else:
            ids = array("i", tail[-MAX_MATCH:])
            address, size = ids.buffer_info()
        result = self._result_address
        count = self._library.find(
            self._handle, address, size, limit, self._output_address, result, result + 8
        )
        return Continuation(self._output[:count].tolist(), *self._result) if count else None


@cache
def load_token_index() -> _Library:
    """Load the native library, and build it if no earlier process has.

    Raises:
        NativeUnavailableError: The library cannot be built or loaded.
    """
    path = build_library(SOURCE_FOLDER, COMPILER_FLAGS)
    try:
        return _Library(path)
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(
            f"{path} does not load ({error}); {LOAD_FAILURE_REMEDY}"
        ) from error


def prebuild_token_index(folder: Path) -> Path:
    """Build the native library for machines without a compiler.

    Raises:
        NativeUnavailableError: There is no compiler, or the folder cannot be written.
    """
    return prebuild_library(SOURCE_FOLDER, COMPILER_FLAGS, folder)
