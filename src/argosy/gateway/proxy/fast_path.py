"""Fast path: a native thread that forwards streams between their sockets (see csrc/fast_path.cpp).

Forwarding a chunk through the interpreter and its event loop costs several times what the kernel needs for it. Once a
response flows, the sockets of replica and client are therefore lent to a native thread. The thread copies regular
chunks and counts their tokens. A stream with anything else is returned to the event loop, where all decisions are made.
Without a C++ compiler, or over TLS, all streams stay on the event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from argosy.native import (
    LOAD_FAILURE_REMEDY,
    NativeUnavailableError,
    build_library,
    prebuild_library,
)

SOURCE_FOLDER = Path(__file__).parent / "csrc"
COMPILER_FLAGS = ("-std=c++17", "-O2", "-fPIC", "-pthread")
RETURN_BATCH_SIZE = 256
"""Maximum number of returned streams per call."""

_StreamNumbers = ctypes.c_int64 * RETURN_BATCH_SIZE


class _NativeProgress(ctypes.Structure):
    """Struct `Progress` of csrc/fast_path.cpp."""

    _fields_ = (
        ("chunk_times", ctypes.c_void_p),
        ("chunk_count", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("token_ids_bytes", ctypes.c_int64),
        ("output_tokens", ctypes.c_int64),
        ("unread", ctypes.c_void_p),
        ("unread_bytes", ctypes.c_int64),
        ("unsent", ctypes.c_void_p),
        ("unsent_bytes", ctypes.c_int64),
    )


class FastPathLibrary:
    """Functions of csrc/fast_path.cpp.

    They run without the GIL and do not check their arguments.
    """

    def __init__(self, path: Path) -> None:
        """Load the library.

        Raises:
            OSError: The library cannot be loaded.
            AttributeError: A function is missing.
        """
        library = ctypes.CDLL(str(path))
        pointer, number = ctypes.c_void_p, ctypes.c_int64

        def declare(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
            entry_point = library[f"argosy_fast_path_{name}"]
            entry_point.restype, entry_point.argtypes = result, arguments
            return entry_point

        self.open = declare("open", pointer)
        self.close = declare("close", None, pointer)
        self.returned_fd = declare("returned_fd", number, pointer)
        sockets = number, number
        self.attach = declare("attach", pointer, pointer, number, *sockets, pointer, number, number)
        self.detach = declare("detach", None, pointer, pointer, pointer)
        self.poll_progress = declare("poll_progress", None, pointer, pointer)
        self.release = declare("release", None, pointer, pointer)
        self.take_returned = declare("take_returned", number, pointer, pointer, number)


class SpliceProgress(NamedTuple):
    """Progress of a stream on the fast path since the last report."""

    chunk_times: array[float]
    """Monotonic time of each forwarded chunk."""
    token_ids: bytes
    """Token ids of the forwarded chunks, comma-separated."""
    output_tokens: int
    """Output tokens of the whole stream."""
    unread: bytes
    """Bytes from the replica that are still to be parsed. Empty until the stream is detached."""
    unsent: bytes
    """HTTP chunks that are still to be sent to the client. Empty until the stream is detached."""


def _to_progress(native: _NativeProgress) -> SpliceProgress:
    chunk_times: array[float] = array("d")
    chunk_times.frombytes(
        _copy_bytes(native.chunk_times, native.chunk_count * chunk_times.itemsize)
    )
    return SpliceProgress(
        chunk_times,
        _copy_bytes(native.token_ids, native.token_ids_bytes),
        native.output_tokens,
        _copy_bytes(native.unread, native.unread_bytes),
        _copy_bytes(native.unsent, native.unsent_bytes),
    )


def _copy_bytes(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size) if size else b""


class FastPath:
    """The native thread and its streams. Not thread-safe: use it from one event loop."""

    def __init__(self, library: FastPathLibrary) -> None:
        """Start the thread.

        Raises:
            NativeUnavailableError: The process has reached its limit of threads or descriptors.
        """
        self.library = library
        self.handle: int = library.open()
        if not self.handle:
            message = "the fast path needs a thread and descriptors; raise the process's limits"
            raise NativeUnavailableError(message)
        self._streams: dict[int, Callable[[], object]] = {}
        """Callbacks of the attached streams by number, called when the thread has returned one."""
        self._numbers = itertools.count(1)
        self._returned_fd: int = library.returned_fd(self.handle)
        asyncio.get_running_loop().add_reader(self._returned_fd, self._on_streams_returned)

    def __len__(self) -> int:
        return len(self._streams)

    def attach(
        self,
        on_returned: Callable[[], object],
        replica_fd: int,
        client_fd: int,
        output_tokens: int,
        max_output_tokens: int,
        token_counter_address: int | None,
    ) -> tuple[int, int]:
        """Attach a stream, whose chunks are forwarded from the replica's socket to the client's.

        The descriptors of both sockets are duplicated. The stream is returned when it reaches `max_output_tokens` or a
        chunk is not regular. Then `on_returned` is called, which has to call `detach`.

        Args:
            on_returned: Called once.
            replica_fd: The replica's socket.
            client_fd: The client's socket.
            output_tokens: Tokens so far.
            max_output_tokens: Token limit.
            token_counter_address: 64-bit counter that each chunk updates; None for none.

        Returns:
            Number and native handle of the stream. The handle is 0 if no descriptor is available.
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
        if handle:
            self._streams[number] = on_returned
        return number, handle or 0

    def poll_progress(self, handle: int) -> SpliceProgress:
        """Return the progress of a stream since the last call."""
        native = _NativeProgress()
        self.library.poll_progress(handle, ctypes.byref(native))
        return _to_progress(native)

    def detach(self, number: int, handle: int) -> SpliceProgress:
        """Take a stream back, or release a returned one."""
        native = _NativeProgress()
        self.library.detach(self.handle, handle, ctypes.byref(native))
        progress = _to_progress(native)
        del self._streams[number]
        self.library.release(self.handle, handle)
        return progress

    def close(self) -> None:
        """Return all streams and stop the thread."""
        for on_returned in tuple(self._streams.values()):
            on_returned()
        asyncio.get_running_loop().remove_reader(self._returned_fd)
        self.library.close(self.handle)

    def _on_streams_returned(self) -> None:
        numbers = _StreamNumbers()
        count = self.library.take_returned(self.handle, numbers, RETURN_BATCH_SIZE)
        for number in numbers[:count]:
            on_returned = self._streams.get(number)
            if on_returned is not None:
                asyncio.get_running_loop().call_soon(on_returned)


def load_fast_path() -> FastPathLibrary:
    """Load the native library, and build it if no earlier process has.

    Raises:
        NativeUnavailableError: The library cannot be built or loaded.
    """
    path = build_library(SOURCE_FOLDER, COMPILER_FLAGS)
    try:
        return FastPathLibrary(path)
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(
            f"{path} does not load ({error}); {LOAD_FAILURE_REMEDY}"
        ) from error


def prebuild_fast_path(folder: Path) -> Path:
    """Build the native library for machines without a compiler.

    Raises:
        NativeUnavailableError: There is no compiler, or the folder cannot be written.
    """
    return prebuild_library(SOURCE_FOLDER, COMPILER_FLAGS, folder)
