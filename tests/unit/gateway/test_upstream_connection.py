"""Connection to a replica: any bytes of a response end an attempt in a defined state."""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.byte_server import ResponseRecorder

from argosy.gateway.upstream.connection import UpstreamConnection


@given(
    response=st.binary(max_size=300)
    | st.lists(
        st.sampled_from(
            [
                b"HTTP/1.1 200 OK\r\n",
                b"HTTP/1.1 100 \r\n\r\n",
                b"content-length: 3\r\n",
                b"transfer-encoding: chunked\r\n",
                b"connection: close\r\n",
                b"\r\n",
                b"3\r\nabc\r\n",
                b"0\r\n\r\n",
                b"abc",
                b"\x00",
            ]
        ),
        max_size=12,
    ).map(b"".join),
    cuts=st.lists(st.integers(0, 300), max_size=5),
)
@example(
    response=b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 3\r\n\r\nabcabc", cuts=[]
)
def test_any_bytes_end_attempt_cleanly(response: bytes, cuts: list[int]) -> None:
    recorder, reusable = ResponseRecorder(), list[UpstreamConnection]()
    connection = UpstreamConnection(reusable.append)
    connection.connection_made(FakeTransport())
    connection.send_request(b"", recorder)
    borders = [0, *sorted(min(cut, len(response)) for cut in cuts), len(response)]
    for start, end in itertools.pairwise(borders):
        if not connection.closed:
            connection.data_received(response[start:end])
    connection.connection_lost(None)
    assert recorder.ended.is_set()
    assert (recorder.error is None) == (recorder.status >= 200 and bool(reusable))


class FakeTransport(asyncio.Transport):
    """A transport that discards everything."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        pass

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default
