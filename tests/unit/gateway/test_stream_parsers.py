"""Parsers of streams: what counts as content and as tokens, what errors stand for, and the cost of long events."""

from __future__ import annotations

import json
import statistics
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from argosy.deployment import BackendKind
from argosy.gateway.backends import (
    CHAT_PATH,
    FirstContentDetector,
    StreamContinuation,
    UpstreamTarget,
    get_adapter,
)
from argosy.gateway.backends.emitted_choice import StopStringFilter
from argosy.gateway.backends.native_stream_parser import MAX_HELD_BYTES, NativeStreamParser
from argosy.gateway.backends.stream_parser import DeliveredOutput, StreamParser
from argosy.gateway.proxy.upstream_call import (
    MAX_JSON_CONTAINERS,
    UpstreamRefusedError,
    check_buffered_response,
)
from argosy.gateway.request_fields import MAX_CHOICES, parse_request_fields
from argosy.gateway.upstream import UpstreamError
from argosy.policy import AttemptOutcome, classify_status
from argosy.protocol import EventParser

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
EVENTS_WITHOUT_CONTENT = b"".join(
    (
        b": keep-alive\n\n",
        b"event: ping\n\n",
        b"data:\r\n\r\n",
        b'data: {"choices": [], "prompt_filter_results": []}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n',
        b'data: {"choices": [{"index": 0, "delta": {"content": null}, "finish_reason": null}]}\n\n',
        b'data: {"choices": [{"index": 0, "text": ""}]}\n\n',
    )
)
EVENTS_WITH_CONTENT = [
    b'{"choices": [{"index": 0, "delta": {"content": "a"}}]}',
    b'{"choices": [{"index": 0, "delta": {"reasoning_content": "a"}}]}',
    b'{"choices": [{"index": 0, "delta": {"role": "assistant", "tool_calls": [{}]}}]}',
    b'{"choices": [{"index": 0, "text": " "}]}',
    b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}',
    b'{"error": {"message": "no"}}',
    b'{"choices": 7}',
    b'{"choices": [{"index": 0, "delta": {"content": "\xff"}}]}',
    b"[DONE]",
]
SIZE = 1024
"""Size of the pieces of a long event."""


def make_continuation(delivered: DeliveredOutput) -> StreamContinuation:
    fields = parse_request_fields(json.dumps(BODY).encode(), "messages")
    return StreamContinuation(fields, CHAT_PATH, delivered)


def make_parser(delivered: DeliveredOutput, kind: BackendKind = "openai") -> StreamParser:
    """Return the parser for the stream of a server, by default one whose streams cannot be resumed."""
    target = UpstreamTarget(get_adapter(kind), "m")
    plan = make_continuation(delivered).plan_upstream(target)
    assert plan is not None
    return plan.parser


def format_chunk(**values: object) -> bytes:
    return (
        b"data: " + msgspec.json.encode({"id": "x", "created": 1, "model": "m"} | values) + b"\n\n"
    )


def test_error_is_failure_if_other_fields_are_null() -> None:
    parser = make_parser(DeliveredOutput())
    assert not parser.feed(format_chunk(error={"message": "no room"}, choices=None, object=None))
    assert "no room" in parser.failure


def test_usage_is_counted_if_other_fields_are_null() -> None:
    delivered = DeliveredOutput()
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    assert not make_parser(delivered).feed(format_chunk(choices=None, object=None, usage=usage))
    assert (delivered.prompt_tokens, delivered.output_tokens) == (7, 3)


@pytest.mark.parametrize(
    ("details", "reasoning_tokens"),
    [
        ({"reasoning_tokens": 2}, 2),
        ({"reasoning_tokens": 2**40}, None),
        ({"reasoning_tokens": -1}, None),
        ({"reasoning_tokens": "2"}, None),
        ({}, None),
        ("many", None),
        (None, None),
    ],
)
def test_unreadable_details_of_usage_do_not_hide_it(
    details: object, reasoning_tokens: int | None
) -> None:
    delivered = DeliveredOutput()
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "completion_tokens_details": details}
    make_parser(delivered).feed(format_chunk(choices=[], usage=usage))
    assert (delivered.output_tokens, delivered.reasoning_tokens) == (3, reasoning_tokens)


@pytest.mark.parametrize(
    "delta",
    [
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]},
        {"function_call": {"arguments": "a"}},
        {"reasoning_details": [{"type": "reasoning.text", "text": "a"}], "reasoning": "a"},
        {"audio": {"data": "AAAA"}},
    ],
    ids=lambda delta: next(iter(delta)),
)
def test_delta_with_any_content_counts_as_token(delta: dict[str, object]) -> None:
    delivered = DeliveredOutput()
    chunk = format_chunk(choices=[{"index": 0, "delta": delta, "finish_reason": None}])
    assert make_parser(delivered).feed(chunk) == chunk
    assert delivered.output_tokens == 1


CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "g"]), st.dictionaries(st.sampled_from("ab"), st.integers())),
    min_size=1,
    max_size=3,
)


@given(
    CALLS,
    st.sampled_from(["right", "none", "null", "from 5", "all 0"]),
    st.sampled_from(["once", "repeated", "invented", "none"]),
    *([st.booleans()] * 3),
)
def test_calls_of_any_server_reach_clients_in_one_shape(
    calls: list[tuple[str, dict[str, int]]],
    index: str,
    call_id: str,
    repeats_name: bool,
    is_whole: bool,
    is_stopped: bool,
) -> None:
    """Deltas may lack what another server sends, as long as it is clear to which call they belong."""
    shows_call = index in {"right", "from 5"} or call_id == "repeated"
    assume(shows_call or (not repeats_name and (index != "all 0" or call_id != "none")) or is_whole)
    assume(not (is_whole and index == "all 0" and call_id == "none"))
    assume(call_id != "invented" or not repeats_name or is_whole)
    deltas = []
    for number, (name, arguments) in enumerate(calls):
        text = json.dumps(arguments)
        pieces: list[Any] = [arguments] if is_whole else [text[:1], text[1:]]
        for part, piece in enumerate(pieces):
            function = {"arguments": piece} | ({"name": name} if not part or repeats_name else {})
            delta: dict[str, Any] = {"function": function}
            if index != "none":
                known = {"right": number, "null": None, "from 5": number + 5, "all 0": 0}
                delta["index"] = known[index]
            if call_id == "invented" or (call_id != "none" and (not part or call_id == "repeated")):
                delta["id"] = f"t{number}" + f".{part}" * (call_id == "invented")
            deltas.append(delta)
    reason = "stop" if is_stopped else "tool_calls"
    delivered = DeliveredOutput()
    parser, events = make_parser(delivered), EventParser()
    sent = b""
    for delta in deltas:
        sent += parser.feed(format_chunk(choices=[{"index": 0, "delta": {"tool_calls": [delta]}}]))
    sent += parser.feed(format_chunk(choices=[{"index": 0, "delta": {}, "finish_reason": reason}]))
    choices = [json.loads(data)["choices"][0] for data in events.feed(sent)]
    assert choices[-1]["finish_reason"] == delivered.finish_reasons[0] == "tool_calls"
    received: dict[int, dict[str, str]] = {}
    for choice in choices[:-1]:
        (delta,) = choice["delta"]["tool_calls"]
        call = received.setdefault(delta["index"], {"id": "", "type": "", "name": ""})
        for name in ("id", "type"):  # as clients add them up
            call[name] += delta.get(name) or ""
        call["name"] += delta["function"].get("name", "")
        call["arguments"] = call.get("arguments", "") + delta["function"]["arguments"]
    assert list(received) == list(range(len(calls)))
    assert [(c["name"], json.loads(c["arguments"])) for c in received.values()] == calls
    assert {call["type"] for call in received.values()} == {"function"}
    ids = [call["id"] for call in received.values()]
    assert len(set(ids)) == len(calls)
    assert call_id == "none" or [each[:2] for each in ids] == [f"t{n}" for n in range(len(calls))]


def test_whole_response_with_calls_ends_for_them() -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in "fg"]
    choice = {"message": {"tool_calls": calls}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}}).encode()
    response = check_buffered_response(200, body, b"", get_adapter("openai"), has_started=False)
    (received,) = json.loads(response.body)["choices"]
    assert response.parsed.choices is not None
    assert {received["finish_reason"], response.parsed.choices[0].finish_reason} == {"tool_calls"}
    functions = [call["function"] for call in received["message"]["tool_calls"]]
    assert functions == [{"name": name, "arguments": '{"a":1}'} for name in "fg"]
    assert len({call["id"] for call in received["message"]["tool_calls"]}) == 2


def test_chunk_with_invalid_utf8_sets_no_response_identity() -> None:
    """The chunk is still forwarded, because the client may understand it."""
    continuation = make_continuation(DeliveredOutput())
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter("openai"), "m"))
    assert plan is not None
    chunk = format_chunk(id="?", choices=[{"index": 0, "delta": {"content": "a"}}])
    plan.parser.feed(chunk.replace(b"?", b"\xff"))
    assert continuation.response_identity is None


@pytest.mark.parametrize("event", EVENTS_WITH_CONTENT)
@given(cuts=st.sets(st.integers(1, len(EVENTS_WITHOUT_CONTENT))))
def test_only_content_starts_response(event: bytes, cuts: set[int]) -> None:
    detector = FirstContentDetector()
    borders = [0, *sorted(cuts), len(EVENTS_WITHOUT_CONTENT)]
    assert not any(
        detector.feed(EVENTS_WITHOUT_CONTENT[start:end]) for start, end in pairwise(borders)
    )
    assert not detector.feed(b"data: ")
    assert not detector.feed(event)
    assert detector.feed(b"\n\n")


class CountedStopStrings(tuple[str, ...]):
    """Stop strings that count how often all of them are iterated."""

    __slots__ = ()
    scan_count = 0

    def __iter__(self) -> Iterator[str]:
        type(self).scan_count += 1
        return super().__iter__()


def test_long_stop_string_list_is_not_scanned_for_each_token() -> None:
    """A request may have hundreds of thousands of stop strings."""
    stop_filter = StopStringFilter(CountedStopStrings(["one", "three"]))
    passed = "".join(stop_filter.feed(text) for text in ["zero", " on", "e", " two"])
    assert passed + stop_filter.finish("", None) == "zero one two"
    assert CountedStopStrings.scan_count <= 1


@pytest.mark.parametrize(
    "make_feed",
    [
        lambda: make_parser(DeliveredOutput(), "vllm").feed,
        lambda: make_parser(DeliveredOutput()).feed,
        lambda: NativeStreamParser(DeliveredOutput()).feed,
        lambda: EventParser().feed,
    ],
    ids=["resumable", "passthrough", "native", "events"],
)
def test_parser_does_not_scan_received_bytes_again(
    make_feed: Callable[[], Callable[[bytes], Any]],
) -> None:
    delta = {"content": "x" * 1000 * SIZE}
    event = {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    stream = b"data: " + json.dumps(event).encode() + b"\n\n: argosy 0 5\n\n"
    *chunks, last_chunk = [stream[start : start + SIZE] for start in range(0, len(stream), SIZE)]
    feed, allocated = make_feed(), list[int]()
    tracemalloc.start()
    try:
        for chunk in chunks:
            tracemalloc.reset_peak()
            used_before, _ = tracemalloc.get_traced_memory()
            assert not feed(chunk)
            allocated.append(tracemalloc.get_traced_memory()[1] - used_before)
    finally:
        tracemalloc.stop()
    assert statistics.median(allocated) < SIZE
    assert feed(last_chunk)


EVENT = b'data: {"choices": [{"index": %d, "delta": {"content": "word %d"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def make_stream(pieces: list[tuple[int, int, bool]]) -> tuple[bytes, bytes, list[list[bytes]]]:
    """Return a stream of (choice, number of ids, has comment) pieces, its events, and the ids of each choice."""
    stream, events = b": argosy prompt 7 3 AAAA\n\n", b""
    report = b': argosy report {"reasoning_tokens":2,"prediction":[3,1],"later":{}}\n\n'
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
    assert delivered.prediction == ((3, 1) if pieces else None)


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


TEXT = b'{"id": "x", "choices": [{"index": 0, "text": "something", "finish_reason": "stop"}]}'
MANY_OBJECTS = b'{"error": [%b{}]}' % (b"{}," * MAX_JSON_CONTAINERS)


def error(message: str, code: object = None) -> bytes:
    return json.dumps({"error": {"message": message, "code": code}}).encode()


@pytest.mark.parametrize(
    ("status", "body", "kind", "expected"),
    [
        (301, b"", "openai", 301),
        (307, b"moved", "openai", 307),
        (204, b"", "openai", 204),
        (202, b'{"id": "queued"}', "openai", 202),
        (402, error("No credits", 402), "openai", 402),
        # The fleet chose the name of the model, and not the client.
        (403, error("No access", "model_not_found"), "openai", 502),
        (404, error("No access", "model_not_found"), "openai", 502),
        (404, b'{"object": "error", "message": "The model `a` does not exist."}', "vllm", 502),
        (404, error("model 'a' not found, try pulling it first"), "openai", 502),
        # If these counted against the replica, one client could take it away from all others.
        (403, error("model-a requires moderation: your input was flagged"), "openai", 403),
        (404, error("This is a chat model and not supported here."), "openai", 404),
        (404, error("No endpoints found that support image input"), "openai", 404),
        (200, error("the prompt is too long", 400), "openai", 400),
        (200, error("the provider returned an error", 502), "openai", None),
        # llama.cpp sends status 500 for invalid requests too.
        (500, error("Failed to parse messages: Missing 'role' in message: {}"), "llama.cpp", 400),
        (500, error("image input is not supported - hint: provide the mmproj"), "llama.cpp", 400),
        (500, error("\n---\nWhile executing CallExpression\nJinja Exception"), "llama.cpp", 400),
        (500, error("Failed to parse messages"), "openai", 500),
        (500, error("not now"), "llama.cpp", 500),
        (200, b"", "openai", 502),
        (200, b"upstream connect error", "openai", 502),
        (200, b" <html></html>", "openai", 502),
        (200, TEXT[:-9], "openai", 502),
        (200, b"\x1f\x8b\x08{}", "openai", 502),
        # Reading megabytes of empty objects would block the gateway for all clients.
        (200, b'{"choices": [%b{}]}' % (b"{}," * MAX_CHOICES), "openai", None),
        (200, MANY_OBJECTS, "openai", 502),
        (404, MANY_OBJECTS, "openai", 502),
        (200, TEXT.replace(b"stop", b"abort"), "openai", None),
        (200, b"\n" * 500 + TEXT + b"\r\n", "openai", 200),
        (200, b"\xef\xbb\xbf" + TEXT, "openai", 200),
        (200, b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "openai", 200),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_whole_response_stands_for_a_status(
    status: int, body: bytes, kind: BackendKind, expected: int | None
) -> None:
    """None stands for a response that its replica ended early. Only rejections of the request pass to the client."""
    adapter = get_adapter(kind)
    if expected is None:
        with pytest.raises(UpstreamError):
            check_buffered_response(status, body, b"", adapter, has_started=False)
    elif classify_status(expected) is AttemptOutcome.SUCCESS:
        response = check_buffered_response(status, body, b"", adapter, has_started=False)
        assert (response.status, response.body) == (expected, body)
    else:
        with pytest.raises(UpstreamRefusedError) as caught:
            check_buffered_response(status, body, b"", adapter, has_started=False)
        assert caught.value.status == expected


TOO_LONG = "The input (70 tokens) is longer than the model's context length (64 tokens)."
EVENTS: list[tuple[BackendKind, dict[str, Any], int]] = [
    ("vllm", {"error": {"message": TOO_LONG, "type": "BadRequestError", "code": 400}}, 400),
    ("vllm", {"error": {"message": "EngineCore died", "code": 500}}, 500),
    ("sglang", {"error": {"object": "error", "message": TOO_LONG, "code": 400}}, 400),
    ("sglang", {"error": {"object": "error", "message": "The queue is full.", "code": 503}}, 503),
    ("tensorrt-llm", {"object": "error", "message": TOO_LONG, "type": "X", "code": 400}, 400),
    ("lmdeploy", {"object": "error", "message": TOO_LONG, "type": "X", "code": 400}, 400),
    (
        "tgi",
        {"error": {"message": f"Input validation error: {TOO_LONG}", "http_status_code": 422}},
        422,
    ),
    ("tgi", {"error": {"message": "Model is overloaded", "http_status_code": 422}}, 429),
    ("tgi", {"error": {"message": "Request failed: x", "http_status_code": 422}}, 500),
    ("openai", {"error": {"message": TOO_LONG, "code": "400"}}, 400),  # as LiteLLM's proxy
    ("openai", {"error": {"message": "Slow down", "type": "rate_limit_error"}}, 429),
    # Another gateway of Argosy.
    (
        "openai",
        {"error": {"message": TOO_LONG, "type": "invalid_request_error", "code": "refused"}},
        400,
    ),
    ("openai", {"error": {"message": "x", "type": "overloaded_error", "code": "draining"}}, 503),
    ("openai", {"error": {"message": "x"}}, 0),
]


@pytest.mark.parametrize("choices", [1, 2])  # which have parsers of their own
@pytest.mark.parametrize(("kind", "event", "status"), EVENTS)
def test_error_event_stands_for_a_status(
    kind: BackendKind, event: dict[str, Any], status: int, choices: int
) -> None:
    body = {"model": "m", "prompt": "Hi", "stream": True, "n": choices}
    fields = parse_request_fields(json.dumps(body).encode(), "prompt")
    continuation = StreamContinuation(fields, b"/v1/completions", DeliveredOutput())
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter(kind), "m"))
    assert plan is not None
    assert not plan.parser.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
    assert plan.parser.failure_status == status
    assert event.get("error", event)["message"] in plan.parser.failure
