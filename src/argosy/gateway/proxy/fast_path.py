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

from argosy.native import UNLOADABLE, NativeUnavailable, build

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-pthread")
AT_ONCE = 256
"""Streams that are taken back in one call."""

_Numbers = ctypes.c_int64 * AT_ONCE


class _News(ctypes.Structure):
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


class Library:
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
        self.left = function("left", number, pointer)
        sockets = number, number
        self.take = function("take", pointer, pointer, number, *sockets, pointer, number, number)
        self.stop = function("stop", None, pointer, pointer, pointer)
        self.news = function("news", None, pointer, pointer)
        self.forget = function("forget", None, pointer, pointer)
        self.gave_back = function("gave_back", number, pointer, pointer, number)


class News(NamedTuple):
    """What was passed on since the last news."""

    times: array[float]
    """When each piece was, on the monotonic clock."""
    ids: bytes
    """Of its tokens, comma-separated."""
    output: int
    """Tokens of the whole stream."""
    rest: bytes
    """What came from the replica and is still to be read, once the ride is over."""
    unsent: bytes
    """What is still to be sent to the client, in chunks as it is, once the ride is over."""


def _read(told: _News) -> News:
    times: array[float] = array("d")
    times.frombytes(_bytes(told.times, told.pieces * times.itemsize))
    return News(
        times,
        _bytes(told.ids, told.ids_bytes),
        told.output,
        _bytes(told.rest, told.rest_bytes),
        _bytes(told.unsent, told.unsent_bytes),
    )


def _bytes(place: int, size: int) -> bytes:
    return ctypes.string_at(place, size) if size else b""


class Ride:
    """One stream on the fast path."""

    def __init__(self, path: FastPath, number: int, handle: int, ended: Callable[[], None]) -> None:
        self.ended = ended
        self._path = path
        self._number = number
        self._handle = handle

    def news(self) -> News:
        """What has happened meanwhile."""
        told = _News()
        self._path.library.news(self._handle, ctypes.byref(told))
        return _read(told)

    def stop(self) -> News:
        """Take the stream back, or what was given back. Call it once, and nothing after it."""
        told = _News()
        self._path.library.stop(self._path.handle, self._handle, ctypes.byref(told))
        news = _read(told)
        self._path.forget(self._number, self._handle)
        return news


class FastPath:
    """The thread. Belongs to one event loop."""

    def __init__(self, library: Library) -> None:
        """Start it. Raises NativeUnavailable when the process may have no more threads or files."""
        self.library = library
        self.handle: int = library.open()
        if not self.handle:
            message = (
                "no thread or descriptor is left for the fast path; raise the process's limits"
            )
            raise NativeUnavailable(message)
        self._rides: dict[int, Ride] = {}
        self._numbers = itertools.count(1)
        self._left: int = library.left(self.handle)
        asyncio.get_running_loop().add_reader(self._left, self._take_back)

    def __len__(self) -> int:
        return len(self._rides)

    def take(
        self,
        replica: int,
        client: int,
        *,
        output: int,
        most: int,
        counter: int | None,
        ended: Callable[[], None],
    ) -> Ride | None:
        """Pass on what comes from one socket to the other, both by their descriptors; None: it cannot.

        output, most: tokens that the stream has, and may have until it is given back.
        counter: address of the word that counts them.
        ended: called when the stream was given back; it has to stop its ride.
        """
        number = next(self._numbers)
        handle = self.library.take(self.handle, number, replica, client, counter, output, most)
        if not handle:
            return None
        ride = self._rides[number] = Ride(self, number, handle, ended)
        return ride

    def forget(self, number: int, handle: int) -> None:
        """A ride is over."""
        del self._rides[number]
        self.library.forget(self.handle, handle)

    def close(self) -> None:
        """Give back all streams, and end the thread."""
        for ride in tuple(self._rides.values()):
            ride.ended()
        asyncio.get_running_loop().remove_reader(self._left)
        self.library.close(self.handle)

    def _take_back(self) -> None:
        numbers = _Numbers()
        count = self.library.gave_back(self.handle, numbers, AT_ONCE)
        for number in numbers[:count]:
            ride = self._rides.get(number)
            if ride is not None:
                asyncio.get_running_loop().call_soon(ride.ended)


def load_fast_path() -> Library:
    """The native code, built where no earlier process has. Raises NativeUnavailable."""
    path = build(SOURCES, FLAGS)
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} does not load ({error}); {UNLOADABLE}") from error
