"""Argosy's native stream format. The segmentation of the stream changes neither the output nor the counts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.gateway.backends.native_stream_parser import MAX_HELD_BYTES, NativeStreamParser
from argosy.gateway.backends.stream_parser import DeliveredOutput

EVENT = b'data: {"choices": [{"index": %d, "delta": {"content": "word %d"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def make_stream(pieces: list[tuple[int, int, bool]]) -> tuple[bytes, bytes, list[list[bytes]]]:
    """Return a stream of (choice, number of ids, has comment) pieces, its events, and the ids of each choice."""
    stream, events = b": argosy prompt 7 3 AAAA\n\n", b""
    report = b': argosy report {"reasoning_tokens":2,"later":{}}\n\n'
    ids: list[list[bytes]] = [[], []]
    for number, (choice, count, commented) in enumerate(pieces):
        event = EVENT % (choice, number)
        token_ids = [b"%d" % (100 * number + i) for i in range(count)]
        ids[choice] += token_ids
        events += event
        stream += event + (b": keep-alive\n\n" if commented else b"")
        stream += report if number + 1 == len(pieces) else b""
        stream += b": argosy %d %s" % (choice, b",".join(token_ids))
        stream += b" length\n\n" if number + 2 >= len(pieces) else b"\n\n"
    return stream + DONE, events + DONE, ids


@given(
    pieces=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.booleans()), max_size=8),
    cuts=st.lists(st.integers(0, 2000)),
    whole_blocks=st.booleans(),
)
def test_segmentation_does_not_change_result(
    pieces: list[tuple[int, int, bool]], cuts: list[int], *, whole_blocks: bool
) -> None:
    stream, events, ids = make_stream(pieces)
    at = {0, len(stream), *(cut % len(stream) for cut in cuts)}
    if whole_blocks:  # as replicas write, one piece at a time
        at = {0, len(stream)} | {
            stream.find(b"\n\n", stream.find(b": argosy", cut)) + 2 for cut in at if cut
        }
    boundaries = sorted(at)
    delivered = DeliveredOutput()
    parser = NativeStreamParser(delivered)
    passed = b"".join(parser.feed(stream[begin:end]) for begin, end in pairwise(boundaries))
    assert parser.is_done
    assert passed + parser.flush() == events
    for choice in (0, 1):
        assert delivered.token_ids(choice) == [int(token_id) for token_id in ids[choice]]
    assert delivered.output_tokens == sum(map(len, ids))
    assert (delivered.prompt_tokens, delivered.cached_tokens) == (7, 3)
    assert delivered.prompt_blocks == b"AAAA"
    assert delivered.reasoning_tokens == (2 if pieces else None)


def test_choice_that_ended_without_token_is_not_repeated() -> None:
    delivered = DeliveredOutput()
    first = NativeStreamParser(delivered)
    assert first.feed(EVENT % (0, 0) + b": argosy 0  length\n\n" + EVENT % (1, 0))
    second = NativeStreamParser(delivered)  # no ids to resume from, so the stream starts again
    again = EVENT % (0, 0) + b": argosy 0  length\n\n" + EVENT % (1, 0) + b": argosy 1  length\n\n"
    assert second.feed(again) == EVENT % (1, 0)
    third = NativeStreamParser(delivered)
    chunks = again.partition(EVENT % (1, 0))
    assert (third.feed(chunks[0]), third.feed(chunks[1] + chunks[2] + DONE)) == (b"", b"")
    assert third.flush() == DONE


@pytest.mark.parametrize(
    "junk",
    [b"x", b"data: %b\n\n" % (b"x" * 1000)],
    ids=["event-never-ends", "metadata-never-arrives"],
)
def test_bytes_held_for_metadata_are_bounded(junk: bytes) -> None:
    parser, chunk = NativeStreamParser(DeliveredOutput()), junk * (MAX_HELD_BYTES // 2 // len(junk))
    parser.feed(chunk)
    parser.feed(chunk + junk * 9)
    assert "wait" in parser.failure


@pytest.mark.parametrize("ids", [b"x", b"1,x", b"-1", b"9" * 5000])
def test_invalid_token_ids_fail_immediately(ids: bytes) -> None:
    """Otherwise the failure would appear only when another replica resumes from these ids."""
    parser = NativeStreamParser(DeliveredOutput())
    assert not parser.feed(EVENT % (0, 0) + b": argosy 0 " + ids + b"\n\n")
    assert "ids" in parser.failure


@pytest.mark.parametrize("counts", [b"-5 0", b"5 -1", b"1_000 0", b"9" * 30 + b" 0", b"5", b""])
def test_invalid_prompt_counts_are_replica_failure(counts: bytes) -> None:
    parser = NativeStreamParser(DeliveredOutput())
    assert not parser.feed(b": argosy prompt %b\n\n" % counts)
    assert "counts" in parser.failure


@pytest.mark.parametrize(
    "unreadable", [b": argosy 0 x\n\n", b": argosy 0\n\n", b": argosy 0 6 \xff\n\n"]
)
@pytest.mark.parametrize("in_one_chunk", [True, False])
def test_output_before_unreadable_metadata_is_delivered_and_rest_is_not(
    unreadable: bytes, *, in_one_chunk: bool
) -> None:
    readable = [EVENT % (0, place) + b": argosy 0 %d\n\n" % place for place in range(3)]
    stream = [readable[0], readable[1] + EVENT % (0, 9) + unreadable, readable[2] + DONE]
    delivered = DeliveredOutput()
    parser = NativeStreamParser(delivered)
    passed = b"".join(map(parser.feed, [b"".join(stream)] if in_one_chunk else stream))
    assert passed == EVENT % (0, 0) + EVENT % (0, 1)
    assert (delivered.token_ids(0), delivered.output_tokens) == ([0, 1], 2)
    assert parser.failure
    assert not parser.is_done


def test_cached_tokens_never_exceed_prompt_tokens() -> None:
    delivered = DeliveredOutput()
    NativeStreamParser(delivered).feed(b": argosy prompt 2 3\n\n")
    assert (delivered.prompt_tokens, delivered.cached_tokens) == (2, 2)


@pytest.mark.parametrize("report", [b"{", b"[]", b'{"reasoning_tokens":-1}', b"\xff", b""])
def test_unreadable_report_changes_nothing(report: bytes) -> None:
    delivered = DeliveredOutput()
    parser = NativeStreamParser(delivered)
    event = EVENT % (0, 0)
    assert not parser.feed(event + b": argosy report " + report + b"\n\n")
    assert parser.feed(b": argosy 0 1 stop\n\n") == event
    assert not parser.failure
    assert (delivered.report, delivered.reasoning_tokens) == (None, None)
