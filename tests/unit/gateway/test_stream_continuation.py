"""Streams that are resumed after replicas fail at any byte, any number of times, are complete."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.backend_formats import (
    DONE,
    LlamaCpp,
    Lmdeploy,
    Sglang,
    TensorRtLlm,
    Tgi,
    Vllm,
)
from tests.support.fake_backend import (
    ANSWER_TEXT,
    ANSWER_TOKENS,
    FIRST_TOKEN_ID,
    PROMPT_IDS,
    FakeBackend,
    Generation,
    sse,
)
from tests.support.fake_upstream import Json, UpstreamRequest
from tests.support.gateway_client import BODIES, CHAT, COMPLETION, StreamResult, chunk_text

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

# --- servers whose tokens may be parts of characters ------------------------------------------------

TOKENS = ("Once", " upon", "", "", " 🦊", " a time", ",", "", " ä", "", "", "", "🐈", " said", ".")
PROMPT = "system\nBe kind.\nuser\nTell me\nassistant\n"
"""The prompt as vLLM renders it. No response may contain any of it."""
IDS = list(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + len(TOKENS)))
LIMIT = {"max_tokens": 20, "stream_options": {"include_usage": True}}


class SplitSglang(Sglang):
    answer_tokens = TOKENS


class SplitTensorRtLlm(TensorRtLlm):
    answer_tokens = TOKENS


class SplitLlamaCpp(LlamaCpp):
    """Sends no event for part of a character, so an event may have several tokens. Reports their number on request."""

    answer_tokens = TOKENS

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        for at, event in enumerate(
            super().stream_events(request, generation), int(not request.is_chat)
        ):
            if event == DONE:
                yield event
                continue
            chunk: Json = json.loads(event[6:])
            choice = chunk["choices"][0] if chunk["choices"] else {"finish_reason": "none"}
            if chunk_text(choice) and request.body.get("timings_per_token"):
                chunk["timings"] = {"predicted_n": at}
            if chunk_text(choice) or choice["finish_reason"] or "role" in choice.get("delta", {}):
                yield sse(chunk)


class SplitVllm(Vllm):
    """Repeats the prompt and the tokens before the resume point with the rest of a split character."""

    answer_tokens = TOKENS

    def _visible_texts(self, request: UpstreamRequest, generation: Generation) -> list[str]:
        texts = super()._visible_texts(request, generation)
        if (
            generation.offset
            and not TOKENS[generation.offset - 1]
            and isinstance(request.body.get("prompt"), list)
        ):
            at = next(at for at, text in enumerate(texts) if text)
            texts[at] = PROMPT + "".join(TOKENS[: generation.offset]) + texts[at]
        return texts


class BatchingVllm(SplitVllm):
    """Sends events of three tokens, as vLLM does when the engine is ahead of its API server."""

    def stream_events(self, request: UpstreamRequest, generation: Generation) -> Iterator[bytes]:
        role_chunks: list[Json] = []
        token_chunks: list[Json] = []
        usage_chunks: list[Json] = []
        for event in list(super().stream_events(request, generation))[:-1]:
            chunk: Json = json.loads(event[6:])
            choices = chunk["choices"]
            if not choices:
                usage_chunks.append(chunk)
            elif "role" in choices[0].get("delta", {}):
                role_chunks.append(chunk)
            else:
                token_chunks.append(chunk)
        groups = (token_chunks[at : at + 3] for at in range(0, len(token_chunks), 3))
        yield from map(sse, (*role_chunks, *map(merge_chunks, groups), *usage_chunks))
        yield DONE


def merge_chunks(chunks: list[Json]) -> Json:
    """Merge chunks into one."""
    choices: list[Json] = [chunk["choices"][0] for chunk in chunks]
    text = "".join(map(chunk_text, choices))
    merged: Json = {"delta": {"content": text}} if "delta" in choices[0] else {"text": text}
    ids = [choice["token_ids"] for choice in choices]
    merged["token_ids"] = None if None in ids else [*itertools.chain(*ids)]
    if "prompt_token_ids" in choices[0]:
        merged["prompt_token_ids"] = choices[0]["prompt_token_ids"]
    return chunks[-1] | {"choices": [choices[-1] | merged]}


EACH_SERVER = pytest.mark.parametrize(
    ("backend_class", "kind", "resume_mode", "path"),
    [
        (SplitVllm, "vllm", "exact", CHAT),
        (SplitVllm, "vllm", "exact", COMPLETION),
        (SplitVllm, "vllm", "prefill", CHAT),
        (SplitSglang, "sglang", "exact", CHAT),
        (SplitSglang, "sglang", "exact", COMPLETION),
        (SplitTensorRtLlm, "tensorrt-llm", "exact", COMPLETION),
        (Tgi, "tgi", "exact", CHAT),
        (Tgi, "tgi", "exact", COMPLETION),
        (Lmdeploy, "lmdeploy", "exact", COMPLETION),
        (SplitLlamaCpp, "llama.cpp", "exact", CHAT),
        (SplitLlamaCpp, "llama.cpp", "exact", COMPLETION),
    ],
)
EACH_PATH = pytest.mark.parametrize("path", [CHAT, COMPLETION])
offsets = st.lists(st.integers(0, 10_000), max_size=4)
substrings = st.builds(
    lambda begin, length: ANSWER_TEXT[begin : begin + length],
    st.integers(0, len(ANSWER_TEXT) - 1),
    st.integers(1, 12),
)


# --- one response ----------------------------------------------------------------------------------


class Response:
    """A response, and what the client has received of it."""

    def __init__(self, path: str, adapter: BackendAdapter, **changes: object) -> None:
        self.delivered = DeliveredOutput()
        self.continuation = StreamContinuation(
            make_fields(path, **changes), path.encode(), self.delivered
        )
        self._target = UpstreamTarget(adapter, "cat", 64)

    def plan(self) -> UpstreamPlan:
        """Plan the part of the next server, which can resume the response."""
        plan = self.continuation.plan_upstream(self._target)
        assert plan is not None
        return plan

    def plan_body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.plan().body)
        return body


def make_fields(path: str, **changes: object) -> RequestFields:
    body = BODIES[path] | {"stream": True} | changes
    return parse_request_fields(json.dumps(body).encode(), "messages" if path == CHAT else "prompt")


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
    backend_class: type[FakeBackend],
    adapter: BackendAdapter,
    path: str,
    failures: list[int],
    cuts: list[int],
    **changes: object,
) -> tuple[StreamResult, DeliveredOutput]:
    """Return the client's stream over replicas that fail at these offsets, except for the last."""
    response, passed = Response(path, adapter, **changes), b""
    for failure in (*failures, None):
        plan = response.plan()
        stream = stream_from_backend(backend_class(), plan)
        delivered_part = stream if failure is None else stream[: failure % len(stream)]
        for chunk in split_stream(delivered_part, cuts):
            passed += plan.parser.feed(chunk)
        assert not plan.parser.failure
        if failure is None:
            assert plan.parser.is_done
            return parse_stream(passed + plan.parser.flush()), response.delivered
        ending = response.continuation.build_missing_tail()
        if ending is not None:
            return parse_stream(passed + ending), response.delivered
        assert response.continuation.can_resume
    raise AssertionError


def format_chunk(chunk: dict[str, Any], **more: object) -> bytes:
    """Return an event of a stream with one choice, or none."""
    choices = [{"index": 0, "finish_reason": None, **chunk}] if chunk else []
    return b"data: " + msgspec.json.encode({"id": "1", "choices": choices, **more}) + b"\n\n"


# --- failures anywhere -----------------------------------------------------------------------------


@EACH_SERVER
@settings(max_examples=60)
@given(failures=offsets, cuts=offsets)
def test_stream_is_complete_after_failures_anywhere(
    backend_class: type[FakeBackend],
    kind: BackendKind,
    resume_mode: ResumeMode,
    path: str,
    failures: list[int],
    cuts: list[int],
) -> None:
    adapter, tokens = get_adapter(kind, resume_mode), backend_class.answer_tokens
    complete, _ = run_continuation(backend_class, adapter, path, [], [], **LIMIT)
    result, delivered = run_continuation(backend_class, adapter, path, failures, cuts, **LIMIT)
    assert (result.text, result.finish_reasons) == ("".join(tokens), ["stop"])
    assert (result.done_count, len(result.stream_ids)) == (1, 1)
    assert result.role_chunks == complete.role_chunks
    assert result.token_counts == [(delivered.prompt_tokens, len(tokens))]
    assert delivered.output_tokens == len(tokens)


@EACH_SERVER
@settings(max_examples=30)
@given(failures=offsets, limit=st.integers(1, len(ANSWER_TOKENS)))
def test_token_limit_holds_across_replicas(
    backend_class: type[FakeBackend],
    kind: BackendKind,
    resume_mode: ResumeMode,
    path: str,
    failures: list[int],
    limit: int,
) -> None:
    """Parts of characters count once."""
    result, delivered = run_continuation(
        backend_class, get_adapter(kind, resume_mode), path, failures, [], max_tokens=limit
    )
    assert result.text == "".join(backend_class.answer_tokens[:limit])
    assert (result.finish_reasons, result.done_count) == (["length"], 1)
    # llama.cpp may fail before it reports the tokens of the last part of a character.
    uncounted = 3 if backend_class is SplitLlamaCpp else 0
    assert limit - uncounted <= delivered.output_tokens <= limit


@EACH_PATH
@settings(max_examples=100)
@given(failures=offsets, cuts=offsets)
def test_prompt_is_not_repeated_if_end_of_character_is_unknown(
    path: str, failures: list[int], cuts: list[int]
) -> None:
    """If an event has several tokens, the last of them may have no text yet."""
    result, delivered = run_continuation(
        BatchingVllm, get_adapter("vllm"), path, failures, cuts, **LIMIT
    )
    assert (result.text, result.finish_reasons) == ("".join(TOKENS), ["stop"])
    assert result.done_count == 1
    # While there is too little text to resume from, the last tokens may count twice.
    surplus = 3 * len(failures)
    assert 0 <= delivered.output_tokens - len(TOKENS) <= surplus


@EACH_PATH
@pytest.mark.parametrize("options", [{}, {"stop": ["never said"]}], ids=["plain", "stop"])
@given(failures=offsets, cuts=offsets)
def test_requested_token_ids_are_sent_once(
    path: str, options: dict[str, object], failures: list[int], cuts: list[int]
) -> None:
    options = options | LIMIT | {"return_token_ids": True}
    result, _ = run_continuation(SplitVllm, get_adapter("vllm"), path, failures, cuts, **options)
    assert result.text == "".join(TOKENS)
    choices = [choice for chunk in result.chunks for choice in chunk["choices"]]
    assert [token_id for choice in choices for token_id in choice.get("token_ids") or ()] == IDS
    prompts = [holder.get("prompt_token_ids") for holder in (*result.chunks, *choices)]
    assert len([prompt for prompt in prompts if prompt]) == 1


@EACH_PATH
@given(failures=offsets)
def test_negative_token_limit_is_unlimited_after_resume(path: str, failures: list[int]) -> None:
    result, delivered = run_continuation(
        LlamaCpp, get_adapter("llama.cpp"), path, failures, [], max_tokens=-1
    )
    assert (result.text, result.finish_reasons) == (ANSWER_TEXT, ["stop"])
    assert delivered.output_tokens == len(ANSWER_TOKENS)


@EACH_PATH
@pytest.mark.parametrize("limit", [4, 12])
@pytest.mark.parametrize("resume_mode", ["exact", "prefill"])
@given(failures=offsets, cuts=offsets, stop=substrings)
def test_stop_string_is_found_across_replicas(
    path: str, limit: int, resume_mode: ResumeMode, failures: list[int], cuts: list[int], stop: str
) -> None:
    result, delivered = run_continuation(
        *(Vllm, get_adapter("vllm", resume_mode), path, failures, cuts),
        stop=[stop, "never"],
        max_tokens=limit,
    )
    full_text = "".join(ANSWER_TOKENS[:limit])
    assert result.text == full_text.partition(stop)[0]
    assert result.finish_reasons == ["stop" if stop in full_text or limit == 12 else "length"]
    assert result.done_count == 1
    ends = [stop in "".join(ANSWER_TOKENS[: count + 1]) for count in range(limit)]
    assert delivered.output_tokens == min([*(n + 1 for n, e in enumerate(ends) if e), 9, limit])


@EACH_SERVER
@settings(max_examples=20)
@given(cuts=offsets)
def test_segmentation_of_stream_does_not_matter(
    backend_class: type[FakeBackend],
    kind: BackendKind,
    resume_mode: ResumeMode,
    path: str,
    cuts: list[int],
) -> None:
    for choices in (1, 2):  # the resumable parser and the passthrough parser
        one, two = (
            run_continuation(
                backend_class, get_adapter(kind, resume_mode), path, [], at, n=choices
            )[0]
            for at in (cuts, [])
        )
        assert [{**chunk, "id": ""} for chunk in one.chunks] == [
            {**chunk, "id": ""} for chunk in two.chunks
        ]
        assert one.done_count == two.done_count == 1


@EACH_PATH
@pytest.mark.parametrize("requested", [True, False])
def test_timings_are_forwarded_only_on_request(path: str, *, requested: bool) -> None:
    options = {"timings_per_token": True} if requested else {}
    chunks = run_continuation(SplitLlamaCpp, get_adapter("llama.cpp"), path, [], [], **options)[
        0
    ].chunks
    texts = [chunk for chunk in chunks if chunk["choices"] and chunk_text(chunk["choices"][0])]
    assert ["timings" in chunk for chunk in texts] == [requested] * len(texts)


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
    response = Response(CHAT, get_adapter("vllm"), n=n)
    response.plan().parser.feed(b"".join(event + b"\n\n" for event in events))
    response.continuation.build_missing_tail()
    response.continuation.plan_upstream(UpstreamTarget(get_adapter("vllm"), "cat"))


# --- requests --------------------------------------------------------------------------------------


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
    body = Response(CHAT, get_adapter("vllm"), **changes).plan_body()
    assert ("return_token_ids" in body) == plain


def test_final_assistant_message_is_extended() -> None:
    messages = [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "Well,"}]
    response = Response(CHAT, get_adapter("sglang"), messages=messages, continue_final_message=True)
    response.plan().parser.feed(format_chunk({"delta": {"content": " then"}}))
    assert response.plan_body()["messages"][-1]["content"] == "Well, then"


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
    response = Response(CHAT, get_adapter("vllm"), messages=[{"role": "user", "content": content}])
    delta = {"delta": {"content": "A cat"}, "token_ids": [7, 8]}
    response.plan().parser.feed(format_chunk(delta, prompt_token_ids=[1, 2, 2, 2]))
    second = response.plan()
    assert second.path == CHAT.encode()
    assert json.loads(second.body)["messages"] == [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "A cat"},
    ]


def test_usage_with_each_event_is_requested_only_where_engine_has_it() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for kind, sent in (("vllm", options), ("openai", {"include_usage": True})):
        body = Response(CHAT, get_adapter(kind, "none"), stream_options=options).plan_body()
        assert body["stream_options"] == sent


@pytest.mark.parametrize("more", [{"stop_token_ids": [7]}, {"skip_special_tokens": False}])
def test_engine_keeps_stop_strings_if_stop_tokens_are_visible(more: dict[str, object]) -> None:
    """With `include_stop_str_in_output`, vLLM would leave the text of stop tokens in the output, too."""
    body = Response(COMPLETION, get_adapter("vllm"), stop=["\n"], **more).plan_body()
    assert "include_stop_str_in_output" not in body


def cut_after(response: Response, backend: FakeBackend, events: int) -> dict[str, Any]:
    """Let the next server fail after this many events of its stream, and return the body of its request."""
    plan = response.plan()
    stream = stream_from_backend(backend, plan).split(b"\n\n")
    plan.parser.feed(b"".join(event + b"\n\n" for event in stream[:events]))
    body: dict[str, Any] = json.loads(plan.body)
    return body


@EACH_PATH
def test_vllm_resumes_from_token_ids(path: str) -> None:
    response = Response(path, get_adapter("vllm"))
    cut_after(response, Vllm(), 4)
    plan, delivered = response.plan(), 3 if path == CHAT else 4
    body = json.loads(plan.body)
    assert plan.path == COMPLETION.encode()
    assert body["prompt"] == [*PROMPT_IDS, *IDS[:delivered]]
    assert body["max_tokens"] == (64 - len(PROMPT_IDS) if path == CHAT else 12) - delivered


def test_stream_with_stop_strings_resumes_from_text() -> None:
    """Text lags behind the tokens while it may become a stop string."""
    response = Response(COMPLETION, get_adapter("sglang"), stop=["never"])
    cut_after(response, Sglang(), 3)
    assert response.plan_body()["prompt"] == "Tell meOnce upon a"


def test_chat_without_token_ids_resumes_in_assistant_message() -> None:
    response = Response(CHAT, get_adapter("sglang"))
    cut_after(response, Sglang(), 4)
    body = response.plan_body()
    assert body["messages"][-1] == {"role": "assistant", "content": "Once upon a"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(("resume_mode", "resumes"), [("none", False), ("prefill", True)])
def test_resume_mode_limits_resume(resume_mode: ResumeMode, resumes: bool) -> None:
    response = Response(CHAT, get_adapter("vllm", resume_mode))
    assert "return_token_ids" not in cut_after(response, Vllm(), 4)
    target = UpstreamTarget(get_adapter("vllm", resume_mode), "cat", 64)
    assert (response.continuation.plan_upstream(target) is not None) == resumes


@EACH_PATH
@pytest.mark.parametrize(("seed", "marks"), [(7, {None, "resumed"}), (None, {None})])
def test_resumed_stream_with_seed_is_marked(
    path: str, seed: int | None, marks: set[str | None]
) -> None:
    """From the mark on, the seed no longer determines the output."""
    result, _ = run_continuation(Vllm, get_adapter("vllm"), path, [900], [], seed=seed)
    assert result.text == ANSWER_TEXT
    assert {chunk.get("system_fingerprint") for chunk in result.chunks} == marks


# --- events ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "tensorrt-llm"])
def test_event_with_several_tokens_counts_all(kind: BackendKind) -> None:
    response = Response(COMPLETION, get_adapter(kind, "prefill"))
    first = response.plan()
    assert json.loads(first.body)["stream_options"]["continuous_usage_stats"]
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert b'"usage":null' in first.parser.feed(format_chunk({"text": "Once upon a"}, usage=usage))
    assert response.plan_body()["max_tokens"] == BODIES[COMPLETION]["max_tokens"] - 3
    assert response.delivered.output_tokens == 3


def test_white_space_is_not_enough_to_resume_from() -> None:
    response = Response(COMPLETION, get_adapter("tgi"))
    assert b'" "' in response.plan().parser.feed(format_chunk({"text": " "}))
    second = response.plan()
    assert json.loads(second.body)["prompt"] == "Tell me"
    assert parse_stream(second.parser.feed(format_chunk({"text": " Once"}))).text == "Once"


@pytest.mark.parametrize("reason", ["abort", "error", "cancelled", "timeout"])
@pytest.mark.parametrize("n", [1, 2])
def test_aborted_stream_is_failure(reason: str, n: int) -> None:
    parser = Response(COMPLETION, get_adapter("tensorrt-llm"), n=n).plan().parser
    assert not parser.feed(
        format_chunk({"text": "", "finish_reason": reason}) + b"data: [DONE]\n\n"
    )
    assert parser.failure
    assert not parser.is_done


FIRST_EVENT = format_chunk({"text": "Once", "token_ids": [100], "prompt_token_ids": [1, 2, 3]})


def test_cached_tokens_after_resume_match_count() -> None:
    response = Response(COMPLETION, get_adapter("vllm"), stream_options={"include_usage": True})
    response.plan().parser.feed(FIRST_EVENT)
    parser = response.plan().parser
    parser.feed(format_chunk({"text": ".", "token_ids": [101], "finish_reason": "stop"}))
    usage = {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5}
    details = {"prompt_tokens_details": {"cached_tokens": 4}}
    (result,) = parse_stream(parser.feed(format_chunk({}, usage=usage | details))).usage
    cached = result.pop("prompt_tokens_details")["cached_tokens"]
    assert cached == response.delivered.cached_tokens == 0
    assert result == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_generated_tail_repeats_no_token_ids() -> None:
    response = Response(COMPLETION, get_adapter("vllm"), return_token_ids=True, max_tokens=1)
    response.plan().parser.feed(FIRST_EVENT)
    ending = response.continuation.build_missing_tail()
    assert ending is not None
    (choice,) = json.loads(EventParser().feed(ending)[0])["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (None, None)
    assert choice["finish_reason"] == "length"


def test_text_held_for_stop_string_is_flushed_once() -> None:
    response = Response(COMPLETION, get_adapter("vllm"), stop=["never"])
    passed = response.plan().parser.feed(format_chunk({"text": "Once up", "token_ids": [100, 101]}))
    assert parse_stream(passed).text == "Onc"
    passed += response.continuation.flush_held_text()
    assert parse_stream(passed).text == "Once up"
    assert not response.continuation.flush_held_text()
