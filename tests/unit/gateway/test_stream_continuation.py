"""Answers carried over servers that die at any byte, any number of times: the client gets one whole answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.backend_formats import (
    LlamaCpp,
    Lmdeploy,
    Sglang,
    TensorRtLlm,
    Tgi,
    Vllm,
)
from tests.support.fake_backend import ANSWER, WHOLE, Asked, Double
from tests.support.gateway_client import BODIES, CHAT, COMPLETION, Seen

from argosy.gateway.backends import (
    BackendAdapter,
    BackendKind,
    ResumeMode,
    StreamContinuation,
    UpstreamPlan,
    get_adapter,
)
from argosy.gateway.backends.delivered_output import DeliveredOutput
from argosy.gateway.request_fields import RequestFields, parse_request_fields
from argosy.protocol import ApiError, EventParser

KINDS: dict[BackendKind, type[Double]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "tgi": Tgi,
    "llama.cpp": LlamaCpp,
    "tensorrt-llm": TensorRtLlm,
    "lmdeploy": Lmdeploy,
}
CARRIED = [
    (kind, path)
    for kind in KINDS
    for path in (CHAT, COMPLETION)
    if path.encode() in get_adapter(kind).token_id_paths | get_adapter(kind).prefill_paths
]


def ask_for(path: str, **changes: object) -> RequestFields:
    body = BODIES[path] | {"stream": True} | changes
    return parse_request_fields(json.dumps(body).encode(), "messages" if path == CHAT else "prompt")


def test_servers_that_can_keep_the_cached_prompts_of_tenants_apart() -> None:
    def salt(kind: BackendKind, domain: str, **own: object) -> str | None:
        ask = msgspec.structs.replace(ask_for(CHAT, **own), cache_domain=domain)
        leg = StreamContinuation(ask, CHAT.encode(), DeliveredOutput()).plan_upstream(
            get_adapter(kind), "m"
        )
        assert leg is not None
        told: str | None = json.loads(leg.request.body).get("cache_salt")
        return told

    for kind in ("vllm", "sglang"):
        salts = {salt(kind, "a"), salt(kind, "b"), salt(kind, "a", cache_salt="b")}
        assert len(salts) == 3
        assert None not in salts
    assert salt("vllm", "a") == salt("vllm", "a", cache_salt=None)
    assert salt("vllm", "", cache_salt="own") == "own"
    assert salt("tgi", "a", cache_salt="own") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, b"1e400") for name in ("stop", "cache_salt", "response_format", "min_tokens")),
        ("stream_options", b'{"include_usage":true,"x":1e400}'),
        ("response_format", b'{"type":' + b"9" * 5000 + b"}"),
    ],
)
def test_what_can_be_no_value_here_is_refused_by_name(name: str, value: bytes) -> None:
    """Also where an engine would take it."""
    body = json.dumps(BODIES[CHAT] | {"stream": True}).encode()
    ask = parse_request_fields(body[:-1] + b',"%b":%b}' % (name.encode(), value), "messages")
    with pytest.raises(ApiError) as caught:
        StreamContinuation(ask, CHAT.encode(), DeliveredOutput()).plan_upstream(
            get_adapter("vllm"), "m"
        )
    assert (caught.value.status, caught.value.param) == (400, name)


def stream_of(kind: BackendKind, leg: UpstreamPlan) -> bytes:
    """What a server of this kind answers."""
    outgoing, double = leg.request, KINDS[kind]()
    asked = Asked(outgoing.path.decode(), {}, json.loads(outgoing.body))
    assert double.refusal(asked) is None
    return b"".join(double.events(asked, double.part(asked)))


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    """The stream in pieces, cut at these places (modulo its length)."""
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


def seen_in(passed: bytes) -> Seen:
    seen = Seen()
    for data in EventParser().feed(passed):
        seen.take(data.decode())
    return seen


def carry(
    kind: BackendKind | BackendAdapter,
    path: str,
    deaths: list[int],
    cuts: list[int],
    **changes: object,
) -> tuple[bytes, DeliveredOutput]:
    """All that the client gets over servers that die after so many bytes each, but for the last."""
    adapter = kind if isinstance(kind, BackendAdapter) else get_adapter(kind)
    ask, delivered, passed = ask_for(path, **changes), DeliveredOutput(), b""
    carrier = StreamContinuation(ask, path.encode(), delivered)
    for death in (*deaths, None):
        leg = carrier.plan_upstream(adapter, "cat", 64)
        assert leg is not None
        stream = stream_of(adapter.kind, leg)
        alive = stream if death is None else stream[: death % len(stream)]
        for piece in pieces(alive, cuts):
            passed += leg.parser.feed(piece)
        assert not leg.parser.failure
        if death is None:
            assert leg.parser.is_done
            return passed + leg.parser.flush(), delivered
        ending = carrier.build_missing_tail()
        if ending is not None:
            return passed + ending, delivered
        assert carrier.can_resume
    raise AssertionError


places = st.lists(st.integers(0, 10_000), max_size=4)
parts = st.builds(
    lambda begin, length: WHOLE[begin : begin + length],
    st.integers(0, len(WHOLE) - 1),
    st.integers(1, 12),
)


@pytest.mark.parametrize(("kind", "path"), CARRIED)
@settings(max_examples=30)
@given(deaths=places, cuts=places)
def test_whatever_dies_wherever_the_answer_is_whole(
    kind: BackendKind, path: str, deaths: list[int], cuts: list[int]
) -> None:
    passed, delivered = carry(kind, path, deaths, cuts, stream_options={"include_usage": True})
    seen = seen_in(passed)
    assert (seen.text, seen.finish, seen.done) == (WHOLE, ["stop"], 1)
    assert len(seen.identities) == 1
    assert delivered.output_tokens == len(ANSWER)
    assert [usage["completion_tokens"] for usage in seen.usage] == [len(ANSWER)]
    assert seen.usage[0]["prompt_tokens"] == delivered.prompt_tokens


@pytest.mark.parametrize(("kind", "path"), CARRIED)
@settings(max_examples=30)
@given(deaths=places, limit=st.integers(1, len(ANSWER)))
def test_a_limit_holds_over_all_servers_together(
    kind: BackendKind, path: str, deaths: list[int], limit: int
) -> None:
    passed, delivered = carry(kind, path, deaths, [], max_tokens=limit)
    seen = seen_in(passed)
    assert seen.text == "".join(ANSWER[:limit])
    assert seen.finish == ["length"]
    assert delivered.output_tokens == limit


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@given(deaths=places)
def test_a_limit_below_zero_is_none_wherever_the_answer_goes_on(
    path: str, deaths: list[int]
) -> None:
    passed, delivered = carry("llama.cpp", path, deaths, [], max_tokens=-1)
    seen = seen_in(passed)
    assert (seen.text, seen.finish) == (WHOLE, ["stop"])
    assert delivered.output_tokens == len(ANSWER)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("limit", [4, 12])
@pytest.mark.parametrize("how", ["exact", "prefill"])
@given(deaths=places, cuts=places, stop=parts)
def test_a_stop_string_ends_the_answer_whichever_servers_its_parts_come_from(
    path: str, limit: int, how: ResumeMode, deaths: list[int], cuts: list[int], stop: str
) -> None:
    vllm = get_adapter("vllm", how)
    alone = seen_in(carry(vllm, path, [], cuts, stop=[stop, "never"], max_tokens=limit)[0])
    passed, delivered = carry(vllm, path, deaths, cuts, stop=[stop, "never"], max_tokens=limit)
    seen = seen_in(passed)
    told = "".join(ANSWER[:limit])
    assert seen.text == alone.text == told.partition(stop)[0]
    assert seen.finish == alone.finish == ["stop" if stop in told or limit == 12 else "length"]
    assert seen.done == 1
    ends = [stop in "".join(ANSWER[: count + 1]) for count in range(limit)]
    assert delivered.output_tokens == min([*(n + 1 for n, e in enumerate(ends) if e), 9, limit])


@pytest.mark.parametrize(("kind", "path"), CARRIED)
@settings(max_examples=30)
@given(cuts=places)
def test_how_a_stream_is_cut_into_pieces_does_not_matter(
    kind: BackendKind, path: str, cuts: list[int]
) -> None:
    for changes in ({}, {"n": 2}):  # both readers: the one that carries on, and the one that passes
        one, two = (seen_in(carry(kind, path, [], at, **changes)[0]) for at in (cuts, []))
        assert [{**chunk, "id": ""} for chunk in one.chunks] == [
            {**chunk, "id": ""} for chunk in two.chunks
        ]
        assert one.done == two.done == 1


fields = st.sampled_from(
    [
        "choices",
        "usage",
        "error",
        "delta",
        "text",
        "content",
        "index",
        "finish_reason",
        "token_ids",
        "prompt_token_ids",
        "completion_tokens",
        "prompt_tokens_details",
        "object",
        "id",
    ]
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=4),
    max_leaves=12,
)


@given(
    events=st.lists(
        json_values.map(lambda v: b"data: " + json.dumps(v).encode()) | st.binary(max_size=30)
    ),
    n=st.sampled_from([1, 2]),
)
def test_no_stream_whatsoever_breaks_its_reader(events: list[bytes], n: int) -> None:
    carrier = StreamContinuation(ask_for(CHAT, n=n), CHAT.encode(), DeliveredOutput())
    leg = carrier.plan_upstream(get_adapter("vllm"), "cat")
    assert leg is not None
    leg.parser.feed(b"".join(event + b"\n\n" for event in events))
    carrier.build_missing_tail()
    carrier.plan_upstream(get_adapter("vllm"), "cat")


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"tools": [], "logprobs": False, "n": 1, "response_format": {"type": "text"}}, True),
        ({"tools": [{"type": "function"}]}, False),
        ({"response_format": {"type": "json_schema"}}, False),
        ({"logprobs": True}, False),
        ({"n": 2}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
    ],
)
def test_only_plain_text_is_asked_for_in_a_way_that_can_be_carried_on(
    changes: dict[str, object], plain: bool
) -> None:
    leg = StreamContinuation(
        ask_for(CHAT, **changes), CHAT.encode(), DeliveredOutput()
    ).plan_upstream(get_adapter("vllm"), "cat")
    assert leg is not None
    assert ("return_token_ids" in json.loads(leg.request.body)) == plain


def test_a_conversation_that_ends_with_the_assistant_goes_on_in_its_message() -> None:
    messages = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "Well,"}]
    ask = ask_for(CHAT, messages=messages, continue_final_message=True)
    carrier = StreamContinuation(ask, CHAT.encode(), DeliveredOutput())
    adapter: BackendAdapter = get_adapter("sglang")
    first = carrier.plan_upstream(adapter, "cat")
    assert first is not None
    chunk = {
        "id": "1",
        "choices": [{"index": 0, "delta": {"content": " then"}, "finish_reason": None}],
    }
    first.parser.feed(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    second = carrier.plan_upstream(adapter, "cat")
    assert second is not None
    assert json.loads(second.request.body)["messages"][-1]["content"] == "Well, then"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"video_url": {"url": "https://example.com/cat.mp4"}},
    ],
    ids=lambda part: [*part][-1],
)
def test_a_chat_with_more_than_text_keeps_that_where_it_goes_on(part: dict[str, object]) -> None:
    """The token ids of its prompt only say where a picture stands."""
    content = [{"type": "text", "text": "What is this?"}, part]
    ask = ask_for(CHAT, messages=[{"role": "user", "content": content}])
    carrier = StreamContinuation(ask, CHAT.encode(), DeliveredOutput())
    first = carrier.plan_upstream(get_adapter("vllm"), "cat", 64)
    assert first is not None
    chunk = {"id": "1", "prompt_token_ids": [1, 2, 2, 2], "choices": []}
    delta = {"index": 0, "delta": {"content": "A cat"}, "token_ids": [7, 8]}
    first.parser.feed(b"data: " + msgspec.json.encode(chunk | {"choices": [delta]}) + b"\n\n")
    second = carrier.plan_upstream(get_adapter("vllm"), "cat", 64)
    assert second is not None
    assert second.request.path == CHAT.encode()
    messages = json.loads(second.request.body)["messages"]
    assert messages == [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "A cat"},
    ]


def told(chunk: dict[str, Any], **more: object) -> bytes:
    """An event of a completion."""
    choices = [{"index": 0, "finish_reason": None, **chunk}] if chunk else []
    return b"data: " + msgspec.json.encode({"id": "1", "choices": choices, **more}) + b"\n\n"


@pytest.mark.parametrize("kind", ["vllm", "tensorrt-llm"])
def test_an_event_that_brings_several_tokens_counts_as_many(kind: BackendKind) -> None:
    delivered = DeliveredOutput()
    carrier = StreamContinuation(ask_for(COMPLETION), COMPLETION.encode(), delivered)
    first = carrier.plan_upstream(get_adapter(kind, "prefill"), "cat")
    assert first is not None
    assert json.loads(first.request.body)["stream_options"]["continuous_usage_stats"]
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert b'"usage":null' in first.parser.feed(told({"text": "Once upon a"}, usage=usage))
    second = carrier.plan_upstream(get_adapter(kind, "prefill"), "cat")
    assert second is not None
    assert json.loads(second.request.body)["max_tokens"] == BODIES[COMPLETION]["max_tokens"] - 3
    assert delivered.output_tokens == 3


def test_white_space_alone_is_no_text_to_go_on_from() -> None:
    carrier, adapter = (
        StreamContinuation(ask_for(COMPLETION), COMPLETION.encode(), DeliveredOutput()),
        "tgi",
    )
    first = carrier.plan_upstream(get_adapter(adapter), "cat")
    assert first is not None
    assert b'" "' in first.parser.feed(told({"text": " "}))
    second = carrier.plan_upstream(get_adapter(adapter), "cat")
    assert second is not None
    assert json.loads(second.request.body)["prompt"] == "Tell me"
    assert seen_in(second.parser.feed(told({"text": " Once"}))).text == "Once"


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled", "timeout"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_that_its_server_broke_off_is_no_answer(reason: str, n: int) -> None:
    carrier = StreamContinuation(ask_for(COMPLETION, n=n), COMPLETION.encode(), DeliveredOutput())
    leg = carrier.plan_upstream(get_adapter("tensorrt-llm"), "cat")
    assert leg is not None
    assert not leg.parser.feed(told({"text": "", "finish_reason": reason}) + b"data: [DONE]\n\n")
    assert leg.parser.failure
    assert not leg.parser.is_done


def test_cached_tokens_are_told_as_they_are_counted() -> None:
    ask = ask_for(COMPLETION, stream_options={"include_usage": True})
    delivered = DeliveredOutput()
    carrier = StreamContinuation(ask, COMPLETION.encode(), delivered)
    first = carrier.plan_upstream(get_adapter("vllm"), "cat")
    assert first is not None
    first.parser.feed(told({"text": "Once", "token_ids": [100], "prompt_token_ids": [1, 2, 3]}))
    second = carrier.plan_upstream(get_adapter("vllm"), "cat")
    assert second is not None
    second.parser.feed(told({"text": ".", "token_ids": [101], "finish_reason": "stop"}))
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    (seen,) = seen_in(second.parser.feed(told({}, usage=usage | details))).usage
    assert seen["prompt_tokens_details"]["cached_tokens"] == delivered.cached_tokens == 0
    assert (seen["prompt_tokens"], seen["completion_tokens"], seen["total_tokens"]) == (3, 2, 5)


def test_an_end_that_a_server_could_not_tell_repeats_no_token_ids() -> None:
    carrier = StreamContinuation(
        ask_for(COMPLETION, return_token_ids=True, max_tokens=1),
        COMPLETION.encode(),
        DeliveredOutput(),
    )
    leg = carrier.plan_upstream(get_adapter("vllm"), "cat")
    assert leg is not None
    leg.parser.feed(told({"text": "Once", "token_ids": [100], "prompt_token_ids": [1, 2, 3]}))
    ending = carrier.build_missing_tail()
    assert ending is not None
    (choice,) = json.loads(EventParser().feed(ending)[0])["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (None, None)
    assert choice["finish_reason"] == "length"


def test_what_is_held_back_for_a_stop_string_can_be_told_at_last() -> None:
    carrier = StreamContinuation(
        ask_for(COMPLETION, stop=["never"]), COMPLETION.encode(), DeliveredOutput()
    )
    leg = carrier.plan_upstream(get_adapter("vllm"), "cat")
    assert leg is not None
    passed = leg.parser.feed(told({"text": "Once up", "token_ids": [100, 101]}))
    assert seen_in(passed).text == "Onc"
    passed += carrier.flush_held_text()
    assert seen_in(passed).text == "Once up"
    assert not carrier.flush_held_text()


@pytest.mark.parametrize("more", [{"stop_token_ids": [7]}, {"skip_special_tokens": False}])
def test_stop_strings_are_the_servers_where_stop_tokens_have_text(more: dict[str, object]) -> None:
    """With `include_stop_str_in_output` vLLM leaves their text in, too."""
    carrier = StreamContinuation(
        ask_for(COMPLETION, stop=["\n"], **more), COMPLETION.encode(), DeliveredOutput()
    )
    leg = carrier.plan_upstream(get_adapter("vllm"), "cat")
    assert leg is not None
    assert "include_stop_str_in_output" not in json.loads(leg.request.body)
