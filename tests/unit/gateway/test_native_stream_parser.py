"""A journaled stream read in any pieces: what is passed on is what counts, whatever way it was cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.gateway.backends.delivered_output import DeliveredOutput
from argosy.gateway.backends.native_stream_parser import MAX_HELD_BYTES, NativeStreamParser

EVENT = b'data: {"choices": [{"index": %d, "delta": {"content": "word %d"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def written(pieces: list[tuple[int, int, bool]]) -> tuple[bytes, bytes, list[list[bytes]]]:
    """A stream of pieces (choice, ids, with a comment between), the events in it, and the ids of the choices."""
    stream, events = b": argosy prompt 7 3 AAAA\n\n", b""
    ids: list[list[bytes]] = [[], []]
    for number, (choice, count, commented) in enumerate(pieces):
        event = EVENT % (choice, number)
        told = [b"%d" % (100 * number + i) for i in range(count)]
        ids[choice] += told
        events += event
        stream += event + (b": keep-alive\n\n" if commented else b"")
        stream += b": argosy %d %s" % (choice, b",".join(told))
        stream += b" length\n\n" if number + 2 >= len(pieces) else b"\n\n"
    return stream + DONE, events + DONE, ids


@given(
    pieces=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.booleans()), max_size=8),
    cuts=st.lists(st.integers(0, 2000)),
    whole_blocks=st.booleans(),
)
def test_any_pieces_give_the_same(
    pieces: list[tuple[int, int, bool]], cuts: list[int], *, whole_blocks: bool
) -> None:
    stream, events, ids = written(pieces)
    at = {0, len(stream), *(cut % len(stream) for cut in cuts)}
    if whole_blocks:  # as replicas write: one piece after another
        at = {0, len(stream)} | {
            stream.find(b"\n\n", stream.find(b": argosy", cut)) + 2 for cut in at if cut
        }
    borders = sorted(at)
    delivered = DeliveredOutput()
    reader = NativeStreamParser(delivered)
    passed = b"".join(reader.feed(stream[begin:end]) for begin, end in pairwise(borders))
    assert reader.is_done
    assert passed + reader.flush() == events
    for choice in (0, 1):
        assert delivered.token_ids(choice) == [int(one) for one in ids[choice]]
    assert delivered.output_tokens == sum(map(len, ids))
    assert (delivered.prompt_tokens, delivered.cached_tokens) == (7, 3)
    assert delivered.prompt_blocks == b"AAAA"


def test_a_choice_that_has_ended_without_a_token_is_not_told_again() -> None:
    delivered = DeliveredOutput()
    first = NativeStreamParser(delivered)
    assert first.feed(EVENT % (0, 0) + b": argosy 0  length\n\n" + EVENT % (1, 0))
    second = NativeStreamParser(delivered)  # it begins anew: no ids can be named to go on from
    again = EVENT % (0, 0) + b": argosy 0  length\n\n" + EVENT % (1, 0) + b": argosy 1  length\n\n"
    assert second.feed(again) == EVENT % (1, 0)
    third = NativeStreamParser(delivered)
    pieces = again.partition(EVENT % (1, 0))
    assert (third.feed(pieces[0]), third.feed(pieces[1] + pieces[2] + DONE)) == (b"", b"")
    assert third.flush() == DONE


@pytest.mark.parametrize(
    "junk",
    [b"x", b"data: %b\n\n" % (b"x" * 1000)],
    ids=["no event ends", "no block comes"],
)
def test_what_waits_for_its_block_is_bounded(junk: bytes) -> None:
    reader, piece = NativeStreamParser(DeliveredOutput()), junk * (MAX_HELD_BYTES // 2 // len(junk))
    reader.feed(piece)
    reader.feed(piece + junk * 9)
    assert "wait" in reader.failure


@pytest.mark.parametrize("ids", [b"x", b"1,x", b"-1", b"9" * 5000])
def test_token_ids_that_are_none_are_found_at_once(ids: bytes) -> None:
    """Not when the answer is to be carried on elsewhere from them."""
    reader = NativeStreamParser(DeliveredOutput())
    assert not reader.feed(EVENT % (0, 0) + b": argosy 0 " + ids + b"\n\n")
    assert "ids" in reader.failure


@pytest.mark.parametrize("counts", [b"-5 0", b"5 -1", b"1_000 0", b"9" * 30 + b" 0", b"5", b""])
def test_counts_of_the_prompt_that_are_none_are_the_replicas_failure(counts: bytes) -> None:
    reader = NativeStreamParser(DeliveredOutput())
    assert not reader.feed(b": argosy prompt %b\n\n" % counts)
    assert "counts" in reader.failure


@pytest.mark.parametrize("bad", [b": argosy 0 x\n\n", b": argosy 0\n\n", b": argosy 0 6 \xff\n\n"])
@pytest.mark.parametrize("at_once", [True, False])
def test_what_counts_before_something_unreadable_is_told_and_nothing_after_it(
    bad: bytes, *, at_once: bool
) -> None:
    good = [EVENT % (0, place) + b": argosy 0 %d\n\n" % place for place in range(3)]
    stream = [good[0], good[1] + EVENT % (0, 9) + bad, good[2] + DONE]
    delivered = DeliveredOutput()
    reader = NativeStreamParser(delivered)
    passed = b"".join(map(reader.feed, [b"".join(stream)] if at_once else stream))
    assert passed == EVENT % (0, 0) + EVENT % (0, 1)
    assert (delivered.token_ids(0), delivered.output_tokens) == ([0, 1], 2)
    assert reader.failure
    assert not reader.is_done


def test_no_more_of_a_prompt_was_cached_than_there_is() -> None:
    delivered = DeliveredOutput()
    NativeStreamParser(delivered).feed(b": argosy prompt 2 3\n\n")
    assert (delivered.prompt_tokens, delivered.cached_tokens) == (2, 2)
