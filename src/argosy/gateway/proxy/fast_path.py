"""Streams that need no decision are passed on by a native thread: see csrc/fast_path.cpp.

What a piece costs on the way through the interpreter and its event loop is several times what the kernel takes for it.
So once an answer flows, its two sockets are lent to a thread that copies regular pieces, and counts them; whatever is
not regular comes back here, where everything is decided. Without a compiler, or over TLS, all streams stay here.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from argosy.native import LOAD_FAILURE_REMEDY, NativeUnavailableError, build_library

SOURCE_FOLDER = Path(__file__).parent / "csrc"
COMPILER_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-pthread")
RETURN_BATCH_SIZE = 256
"""Streams that are taken back in one call."""

_StreamNumbers = ctypes.c_int64 * RETURN_BATCH_SIZE


class _NativeProgress(ctypes.Structure):
    _fields_ = (
        ("times", ctypes.c_void_p),
        ("pieces", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("ids_bytes", ctypes.c_int64),
        ("output", ctypes.c_int64),
        ("rest", ctypes.c_void_p),
        ("rest_bytes", ctypes.c_int64),
        ("unsent", ctypes.c_void_p),
        ("unsent_bytes", ctypes.c_int64),
    )


class FastPathLibrary:
    """The functions of csrc/fast_path.cpp. They run without the GIL, and trust their arguments."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        library = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int64

        def function(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            found = library[f"argosy_fast_path_{name}"]
            found.restype, found.argtypes = result, arguments
            return found

        self.open = function("open", pointer)
        self.close = function("close", None, pointer)
        self.returned_fd = function("left", number, pointer)
        sockets = number, number
        self.attach = function("take", pointer, pointer, number, *sockets, pointer, number, number)
        self.detach = function("stop", None, pointer, pointer, pointer)
        self.poll_progress = function("news", None, pointer, pointer)
        self.release = function("forget", None, pointer, pointer)
        self.take_returned = function("gave_back", number, pointer, pointer, number)


class SpliceProgress(NamedTuple):
    """What was passed on since the last news."""

    chunk_times: array[float]
    """When each piece was, on the monotonic clock."""
    token_ids: bytes
    """Of its tokens, comma-separated."""
    output_tokens: int
    """Tokens of the whole stream."""
    unread: bytes
    """What came from the replica and is still to be read, once the ride is over."""
    unsent: bytes
    """What is still to be sent to the client, in chunks as it is, once the ride is over."""


def _to_progress(told: _NativeProgress) -> SpliceProgress:
    times: array[float] = array("d")
    times.frombytes(_copy_bytes(told.times, told.pieces * times.itemsize))
    return SpliceProgress(
        times,
        _copy_bytes(told.ids, told.ids_bytes),
        told.output,
        _copy_bytes(told.rest, told.rest_bytes),
        _copy_bytes(told.unsent, told.unsent_bytes),
    )


def _copy_bytes(place: int, size: int) -> bytes:
    return ctypes.string_at(place, size) if size else b""


class SplicedStream:
    """One stream on the fast path."""

    def __init__(
        self, fast_path: FastPath, number: int, handle: int, on_returned: Callable[[], None]
    ) -> None:
        self.on_returned = on_returned
        self._fast_path = fast_path
        self._number = number
        self._handle = handle

    def poll_progress(self) -> SpliceProgress:
        """What has happened meanwhile."""
        told = _NativeProgress()
        self._fast_path.library.poll_progress(self._handle, ctypes.byref(told))
        return _to_progress(told)

    def detach(self) -> SpliceProgress:
        """Take the stream back, or what was given back. Call it once, and nothing after it."""
        told = _NativeProgress()
        self._fast_path.library.detach(self._fast_path.handle, self._handle, ctypes.byref(told))
        news = _to_progress(told)
        self._fast_path.release(self._number, self._handle)
        return news


class FastPath:
    """The thread. Belongs to one event loop."""

    def __init__(self, library: FastPathLibrary) -> None:
        """Start it. Raises NativeUnavailable when the process may have no more threads or files."""
        self.library = library
        self.handle: int = library.open()
        if not self.handle:
            message = (
                "no thread or descriptor is left for the fast path; raise the process's limits"
            )
            raise NativeUnavailableError(message)
        self._streams: dict[int, SplicedStream] = {}
        self._numbers = itertools.count(1)
        self._returned_fd: int = library.returned_fd(self.handle)
        asyncio.get_running_loop().add_reader(self._returned_fd, self._on_streams_returned)

    def __len__(self) -> int:
        return len(self._streams)

    def attach(
        self,
        replica_fd: int,
        client_fd: int,
        *,
        output_tokens: int,
        max_output_tokens: int,
        token_counter_address: int | None,
        on_returned: Callable[[], None],
    ) -> SplicedStream | None:
        """Pass on what comes from one socket to the other, both by their descriptors; None: it cannot.

        output, most: tokens that the stream has, and may have until it is given back.
        counter: address of the word that counts them.
        ended: called when the stream was given back; it has to stop its ride.
        """
        number = next(self._numbers)
        handle = self.library.attach(
            self.handle,
            number,
            replica_fd,
            client_fd,
            token_counter_address,
            output_tokens,
            max_output_tokens,
        )
        if not handle:
            return None
        ride = self._streams[number] = SplicedStream(self, number, handle, on_returned)
        return ride

    def release(self, number: int, handle: int) -> None:
        """A ride is over."""
        del self._streams[number]
        self.library.release(self.handle, handle)

    def close(self) -> None:
        """Give back all streams, and end the thread."""
        for ride in tuple(self._streams.values()):
            ride.on_returned()
        asyncio.get_running_loop().remove_reader(self._returned_fd)
        self.library.close(self.handle)

    def _on_streams_returned(self) -> None:
        numbers = _StreamNumbers()
        count = self.library.take_returned(self.handle, numbers, RETURN_BATCH_SIZE)
        for number in numbers[:count]:
            ride = self._streams.get(number)
            if ride is not None:
                asyncio.get_running_loop().call_soon(ride.on_returned)


def load_fast_path() -> FastPathLibrary:
    """The native code, built where no earlier process has. Raises NativeUnavailable."""
    path = build_library(SOURCE_FOLDER, COMPILER_FLAGS)
    try:
        return FastPathLibrary(path)
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(
            f"{path} does not load ({error}); {LOAD_FAILURE_REMEDY}"
        ) from error
