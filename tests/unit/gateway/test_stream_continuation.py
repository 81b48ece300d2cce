"""Streams that are resumed after replicas fail at any byte, any number of times, are complete."""

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
from tests.support.fake_backend import ANSWER_TEXT, ANSWER_TOKENS, FakeBackend
from tests.support.fake_upstream import UpstreamRequest
from tests.support.gateway_client import BODIES, CHAT, COMPLETION, StreamResult

from argosy.deployment import BackendKind, ResumeMode
from argosy.gateway.backends import (
    BackendAdapter,
    StreamContinuation,
    UpstreamPlan,
    UpstreamTarget,
    get_adapter,
)
from argosy.gateway.backends.stream_parser import DeliveredOutput
from argosy.gateway.request_fields import RequestFields, parse_request_fields
from argosy.protocol import ApiError, EventParser

KINDS: dict[BackendKind, type[FakeBackend]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "tgi": Tgi,
    "llama.cpp": LlamaCpp,
    "tensorrt-llm": TensorRtLlm,
    "lmdeploy": Lmdeploy,
}
RESUMABLE = [
    (kind, path)
    for kind in KINDS
    for path in (CHAT, COMPLETION)
    if path.encode() in get_adapter(kind).token_id_paths | get_adapter(kind).prefill_paths
]


def make_fields(path: str, **changes: object) -> RequestFields:
    body = BODIES[path] | {"stream": True} | changes
    return parse_request_fields(json.dumps(body).encode(), "messages" if path == CHAT else "prompt")


def test_cache_salt_separates_domains_where_engine_supports_it() -> None:
    def salt(kind: BackendKind, domain: str, **own: object) -> str | None:
        fields = msgspec.structs.replace(make_fields(CHAT, **own), cache_domain=domain)
        plan = StreamContinuation(fields, CHAT.encode(), DeliveredOutput()).plan_upstream(
            UpstreamTarget(get_adapter(kind), "m")
        )
        assert plan is not None
        salt_sent: str | None = json.loads(plan.body).get("cache_salt")
        return salt_sent

    for kind in ("vllm", "sglang"):
        salts = {salt(kind, "a"), salt(kind, "b"), salt(kind, "a", cache_salt="b")}
        assert len(salts) == 3
        assert None not in salts
    assert salt("vllm", "a") == salt("vllm", "a", cache_salt=None)
    assert salt("vllm", "", cache_salt="own") == "own"
    assert salt("tgi", "a", cache_salt="own") is None


@pytest.mark.parametrize(
    ("resume_mode", "is_exact", "resumes"),
    [("exact", True, True), ("exact", False, False), ("prefill", True, False)],
)
def test_native_stream_is_resumed_only_exactly(
    resume_mode: ResumeMode, is_exact: bool, resumes: bool
) -> None:
    delivered = DeliveredOutput(token_id_pieces={0: [b"7,8"]}, is_exact=is_exact)
    continuation = StreamContinuation(make_fields(CHAT), CHAT.encode(), delivered)
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter("argosy", resume_mode), "m"))
    assert (plan is not None) is resumes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, b"1e400") for name in ("stop", "cache_salt", "response_format", "min_tokens")),
        ("stream_options", b'{"include_usage":true,"x":1e400}'),
        ("response_format", b'{"type":' + b"9" * 5000 + b"}"),
    ],
)
def test_invalid_field_is_rejected_by_name(name: str, value: bytes) -> None:
    """Applies to fields that an engine would accept, too."""
    body = json.dumps(BODIES[CHAT] | {"stream": True}).encode()
    fields = parse_request_fields(body[:-1] + b',"%b":%b}' % (name.encode(), value), "messages")
    with pytest.raises(ApiError) as caught:
        StreamContinuation(fields, CHAT.encode(), DeliveredOutput()).plan_upstream(
            UpstreamTarget(get_adapter("vllm"), "m")
        )
    assert (caught.value.status, caught.value.param) == (400, name)


def stream_from_backend(backend: FakeBackend, plan: UpstreamPlan) -> bytes:
    """Return the backend's stream for a planned request."""
    request = UpstreamRequest(plan.path.decode(), {}, json.loads(plan.body))
    assert backend.rejection(request) is None
    return b"".join(backend.stream_events(request, backend.generate(request)))


def split_stream(stream: bytes, cuts: list[int]) -> list[bytes]:
    """Split the stream at these offsets, modulo its length."""
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


def parse_stream(passed: bytes) -> StreamResult:
    result = StreamResult()
    for data in EventParser().feed(passed):
        result.add_event(data.decode())
    return result


def run_continuation(
    kind: BackendKind | BackendAdapter,
    path: str,
    failures: list[int],
    cuts: list[int],
    *,
    backend_class: type[FakeBackend] | None = None,
    **changes: object,
) -> tuple[bytes, DeliveredOutput]:
    """Return the client's stream over replicas that fail at these offsets, except for the last."""
    adapter = kind if isinstance(kind, BackendAdapter) else get_adapter(kind)
    backend_class = backend_class or KINDS[adapter.kind]
    fields, delivered, passed = make_fields(path, **changes), DeliveredOutput(), b""
    continuation = StreamContinuation(fields, path.encode(), delivered)
    for failure in (*failures, None):
        plan = continuation.plan_upstream(UpstreamTarget(adapter, "cat", 64))
        assert plan is not None
        stream = stream_from_backend(backend_class(), plan)
        delivered_part = stream if failure is None else stream[: failure % len(stream)]
        for chunk in split_stream(delivered_part, cuts):
            passed += plan.parser.feed(chunk)
        assert not plan.parser.failure
        if failure is None:
            assert plan.parser.is_done
            return passed + plan.parser.flush(), delivered
        ending = continuation.build_missing_tail()
        if ending is not None:
            return passed + ending, delivered
        assert continuation.can_resume
    raise AssertionError


offsets = st.lists(st.integers(0, 10_000), max_size=4)
substrings = st.builds(
    lambda begin, length: ANSWER_TEXT[begin : begin + length],
    st.integers(0, len(ANSWER_TEXT) - 1),
    st.integers(1, 12),
)


@pytest.mark.parametrize(("kind", "path"), RESUMABLE)
@settings(max_examples=30)
@given(failures=offsets, cuts=offsets)
def test_stream_is_complete_after_failures_anywhere(
    kind: BackendKind, path: str, failures: list[int], cuts: list[int]
) -> None:
    passed, delivered = run_continuation(
        kind, path, failures, cuts, stream_options={"include_usage": True}
    )
    result = parse_stream(passed)
    assert (result.text, result.finish_reasons, result.done_count) == (ANSWER_TEXT, ["stop"], 1)
    assert len(result.stream_ids) == 1
    assert delivered.output_tokens == len(ANSWER_TOKENS)
    assert [usage["completion_tokens"] for usage in result.usage] == [len(ANSWER_TOKENS)]
    assert result.usage[0]["prompt_tokens"] == delivered.prompt_tokens


@pytest.mark.parametrize(("kind", "path"), RESUMABLE)
@settings(max_examples=30)
@given(failures=offsets, limit=st.integers(1, len(ANSWER_TOKENS)))
def test_token_limit_holds_across_replicas(
    kind: BackendKind, path: str, failures: list[int], limit: int
) -> None:
    passed, delivered = run_continuation(kind, path, failures, [], max_tokens=limit)
    result = parse_stream(passed)
    assert result.text == "".join(ANSWER_TOKENS[:limit])
    assert result.finish_reasons == ["length"]
    assert delivered.output_tokens == limit


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@given(failures=offsets)
def test_negative_token_limit_is_unlimited_after_resume(path: str, failures: list[int]) -> None:
    passed, delivered = run_continuation("llama.cpp", path, failures, [], max_tokens=-1)
    result = parse_stream(passed)
    assert (result.text, result.finish_reasons) == (ANSWER_TEXT, ["stop"])
    assert delivered.output_tokens == len(ANSWER_TOKENS)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("limit", [4, 12])
@pytest.mark.parametrize("resume_mode", ["exact", "prefill"])
@given(failures=offsets, cuts=offsets, stop=substrings)
def test_stop_string_is_found_across_replicas(
    path: str, limit: int, resume_mode: ResumeMode, failures: list[int], cuts: list[int], stop: str
) -> None:
    vllm = get_adapter("vllm", resume_mode)
    uninterrupted = parse_stream(
        run_continuation(vllm, path, [], cuts, stop=[stop, "never"], max_tokens=limit)[0]
    )
    passed, delivered = run_continuation(
        vllm, path, failures, cuts, stop=[stop, "never"], max_tokens=limit
    )
    result = parse_stream(passed)
    full_text = "".join(ANSWER_TOKENS[:limit])
    assert result.text == uninterrupted.text == full_text.partition(stop)[0]
    assert (
        result.finish_reasons
        == uninterrupted.finish_reasons
        == ["stop" if stop in full_text or limit == 12 else "length"]
    )
    assert result.done_count == 1
    ends = [stop in "".join(ANSWER_TOKENS[: count + 1]) for count in range(limit)]
    assert delivered.output_tokens == min([*(n + 1 for n, e in enumerate(ends) if e), 9, limit])


@pytest.mark.parametrize(("kind", "path"), RESUMABLE)
@settings(max_examples=30)
@given(cuts=offsets)
def test_segmentation_of_stream_does_not_matter(
    kind: BackendKind, path: str, cuts: list[int]
) -> None:
    for choices in (1, 2):  # the resumable parser and the passthrough parser
        one, two = (
            parse_stream(run_continuation(kind, path, [], at, n=choices)[0]) for at in (cuts, [])
        )
        assert [{**chunk, "id": ""} for chunk in one.chunks] == [
            {**chunk, "id": ""} for chunk in two.chunks
        ]
        assert one.done_count == two.done_count == 1


field_names = st.sampled_from(
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
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(field_names, inner, max_size=4),
    max_leaves=12,
)


@given(
    events=st.lists(
        json_values.map(lambda v: b"data: " + json.dumps(v).encode()) | st.binary(max_size=30)
    ),
    n=st.sampled_from([1, 2]),
)
def test_parser_survives_any_stream(events: list[bytes], n: int) -> None:
    continuation = StreamContinuation(make_fields(CHAT, n=n), CHAT.encode(), DeliveredOutput())
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat"))
    assert plan is not None
    plan.parser.feed(b"".join(event + b"\n\n" for event in events))
    continuation.build_missing_tail()
    continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat"))


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, True),
        ({"tools": [], "logprobs": False, "n": 1, "response_format": {"type": "text"}}, True),
        ({"tools": [{"type": "function"}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"guided_regex": "a"}, False),
        ({"structural_tag": "{}"}, False),
        ({"thinking_token_budget": 5}, False),
        ({"logprobs": True}, False),
        ({"n": 2}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
    ],
)
def test_token_ids_are_requested_for_plain_text_only(
    changes: dict[str, object], plain: bool
) -> None:
    plan = StreamContinuation(
        make_fields(CHAT, **changes), CHAT.encode(), DeliveredOutput()
    ).plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat"))
    assert plan is not None
    assert ("return_token_ids" in json.loads(plan.body)) == plain


def test_final_assistant_message_is_extended() -> None:
    messages = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "Well,"}]
    fields = make_fields(CHAT, messages=messages, continue_final_message=True)
    continuation = StreamContinuation(fields, CHAT.encode(), DeliveredOutput())
    adapter: BackendAdapter = get_adapter("sglang")
    first = continuation.plan_upstream(UpstreamTarget(adapter, "cat"))
    assert first is not None
    chunk = {
        "id": "1",
        "choices": [{"index": 0, "delta": {"content": " then"}, "finish_reason": None}],
    }
    first.parser.feed(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
    second = continuation.plan_upstream(UpstreamTarget(adapter, "cat"))
    assert second is not None
    assert json.loads(second.body)["messages"][-1]["content"] == "Well, then"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"video_url": {"url": "https://example.com/cat.mp4"}},
    ],
    ids=lambda part: [*part][-1],
)
def test_multimodal_chat_is_resumed_with_its_media(part: dict[str, object]) -> None:
    """The token ids of the prompt only mark the position of a picture."""
    content = [{"type": "text", "text": "What is this?"}, part]
    fields = make_fields(CHAT, messages=[{"role": "user", "content": content}])
    continuation = StreamContinuation(fields, CHAT.encode(), DeliveredOutput())
    first = continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat", 64))
    assert first is not None
    chunk = {"id": "1", "prompt_token_ids": [1, 2, 2, 2], "choices": []}
    delta = {"index": 0, "delta": {"content": "A cat"}, "token_ids": [7, 8]}
    first.parser.feed(b"data: " + msgspec.json.encode(chunk | {"choices": [delta]}) + b"\n\n")
    second = continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat", 64))
    assert second is not None
    assert second.path == CHAT.encode()
    messages = json.loads(second.body)["messages"]
    assert messages == [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "A cat"},
    ]


def format_chunk(chunk: dict[str, Any], **more: object) -> bytes:
    """Return an event of a completion."""
    choices = [{"index": 0, "finish_reason": None, **chunk}] if chunk else []
    return b"data: " + msgspec.json.encode({"id": "1", "choices": choices, **more}) + b"\n\n"


def test_usage_with_each_event_is_requested_only_where_engine_has_it() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for kind, sent in (("vllm", options), ("openai", {"include_usage": True})):
        plan = StreamContinuation(
            make_fields(CHAT, stream_options=options), CHAT.encode(), DeliveredOutput()
        ).plan_upstream(UpstreamTarget(get_adapter(kind, "none"), "m"))
        assert plan is not None
        assert json.loads(plan.body)["stream_options"] == sent


@pytest.mark.parametrize("kind", ["vllm", "tensorrt-llm"])
def test_event_with_several_tokens_counts_all(kind: BackendKind) -> None:
    delivered = DeliveredOutput()
    continuation = StreamContinuation(make_fields(COMPLETION), COMPLETION.encode(), delivered)
    first = continuation.plan_upstream(UpstreamTarget(get_adapter(kind, "prefill"), "cat"))
    assert first is not None
    assert json.loads(first.body)["stream_options"]["continuous_usage_stats"]
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert b'"usage":null' in first.parser.feed(format_chunk({"text": "Once upon a"}, usage=usage))
    second = continuation.plan_upstream(UpstreamTarget(get_adapter(kind, "prefill"), "cat"))
    assert second is not None
    assert json.loads(second.body)["max_tokens"] == BODIES[COMPLETION]["max_tokens"] - 3
    assert delivered.output_tokens == 3


def test_white_space_is_not_enough_to_resume_from() -> None:
    continuation, adapter = (
        StreamContinuation(make_fields(COMPLETION), COMPLETION.encode(), DeliveredOutput()),
        "tgi",
    )
    first = continuation.plan_upstream(UpstreamTarget(get_adapter(adapter), "cat"))
    assert first is not None
    assert b'" "' in first.parser.feed(format_chunk({"text": " "}))
    second = continuation.plan_upstream(UpstreamTarget(get_adapter(adapter), "cat"))
    assert second is not None
    assert json.loads(second.body)["prompt"] == "Tell me"
    assert parse_stream(second.parser.feed(format_chunk({"text": " Once"}))).text == "Once"


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled", "timeout"])
@pytest.mark.parametrize("n", [1, 2])
def test_aborted_stream_is_failure(reason: str, n: int) -> None:
    continuation = StreamContinuation(
        make_fields(COMPLETION, n=n), COMPLETION.encode(), DeliveredOutput()
    )
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter("tensorrt-llm"), "cat"))
    assert plan is not None
    assert not plan.parser.feed(
        format_chunk({"text": "", "finish_reason": reason}) + b"data: [DONE]\n\n"
    )
    assert plan.parser.failure
    assert not plan.parser.is_done


def test_cached_tokens_after_resume_match_count() -> None:
    fields = make_fields(COMPLETION, stream_options={"include_usage": True})
    delivered = DeliveredOutput()
    continuation = StreamContinuation(fields, COMPLETION.encode(), delivered)
    first = continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat"))
    assert first is not None
    first.parser.feed(
        format_chunk({"text": "Once", "token_ids": [100], "prompt_token_ids": [1, 2, 3]})
    )
    second = continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat"))
    assert second is not None
    second.parser.feed(format_chunk({"text": ".", "token_ids": [101], "finish_reason": "stop"}))
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    (result,) = parse_stream(second.parser.feed(format_chunk({}, usage=usage | details))).usage
    assert result["prompt_tokens_details"]["cached_tokens"] == delivered.cached_tokens == 0
    assert (result["prompt_tokens"], result["completion_tokens"], result["total_tokens"]) == (
        3,
        2,
        5,
    )


def test_generated_tail_repeats_no_token_ids() -> None:
    continuation = StreamContinuation(
        make_fields(COMPLETION, return_token_ids=True, max_tokens=1),
        COMPLETION.encode(),
        DeliveredOutput(),
    )
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat"))
    assert plan is not None
    plan.parser.feed(
        format_chunk({"text": "Once", "token_ids": [100], "prompt_token_ids": [1, 2, 3]})
    )
    ending = continuation.build_missing_tail()
    assert ending is not None
    (choice,) = json.loads(EventParser().feed(ending)[0])["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (None, None)
    assert choice["finish_reason"] == "length"


def test_text_held_for_stop_string_is_flushed_once() -> None:
    continuation = StreamContinuation(
        make_fields(COMPLETION, stop=["never"]), COMPLETION.encode(), DeliveredOutput()
    )
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat"))
    assert plan is not None
    passed = plan.parser.feed(format_chunk({"text": "Once up", "token_ids": [100, 101]}))
    assert parse_stream(passed).text == "Onc"
    passed += continuation.flush_held_text()
    assert parse_stream(passed).text == "Once up"
    assert not continuation.flush_held_text()


@pytest.mark.parametrize("more", [{"stop_token_ids": [7]}, {"skip_special_tokens": False}])
def test_engine_keeps_stop_strings_if_stop_tokens_are_visible(more: dict[str, object]) -> None:
    """With `include_stop_str_in_output`, vLLM would leave the text of stop tokens in the output, too."""
    continuation = StreamContinuation(
        make_fields(COMPLETION, stop=["\n"], **more), COMPLETION.encode(), DeliveredOutput()
    )
    plan = continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat"))
    assert plan is not None
    assert "include_stop_str_in_output" not in json.loads(plan.body)
