"""Streams with characters of several tokens are resumed after a replica fails within a character."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.backend_formats import (
    DONE,
    LlamaCpp,
    Sglang,
    TensorRtLlm,
    Vllm,
)
from tests.support.fake_backend import FIRST_TOKEN_ID, FakeBackend, Generation, sse
from tests.support.fake_upstream import Json, UpstreamRequest
from tests.support.gateway_client import CHAT, COMPLETION, chunk_text
from tests.unit.gateway.test_stream_continuation import parse_stream, run_continuation

from argosy.deployment import BackendKind, ResumeMode
from argosy.gateway.backends import get_adapter

TOKENS = ("Once", " upon", "", "", " 🦊", " a time", ",", "", " ä", "", "", "", "🐈", " said", ".")
TEXT = "".join(TOKENS)
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


offsets = st.lists(st.integers(0, 10_000), max_size=4)
every_backend = pytest.mark.parametrize(
    ("backend_class", "kind", "resume_mode", "path"),
    [
        (SplitVllm, "vllm", "exact", CHAT),
        (SplitVllm, "vllm", "exact", COMPLETION),
        (SplitVllm, "vllm", "prefill", CHAT),
        (SplitSglang, "sglang", "exact", CHAT),
        (SplitSglang, "sglang", "exact", COMPLETION),
        (SplitTensorRtLlm, "tensorrt-llm", "exact", COMPLETION),
        (SplitLlamaCpp, "llama.cpp", "exact", CHAT),
        (SplitLlamaCpp, "llama.cpp", "exact", COMPLETION),
    ],
)


@every_backend
@settings(max_examples=60)
@given(failures=offsets, cuts=offsets)
def test_stream_is_complete_after_failure_within_character(
    backend_class: type[FakeBackend],
    kind: BackendKind,
    resume_mode: ResumeMode,
    path: str,
    failures: list[int],
    cuts: list[int],
) -> None:
    passed, delivered = run_continuation(
        get_adapter(kind, resume_mode), path, failures, cuts, backend_class=backend_class, **LIMIT
    )
    result = parse_stream(passed)
    assert (result.text, result.finish_reasons, result.done_count) == (TEXT, ["stop"], 1)
    assert delivered.output_tokens == result.usage[-1]["completion_tokens"] == len(TOKENS)


@every_backend
@settings(max_examples=30)
@given(failures=offsets, limit=st.integers(1, len(TOKENS)))
def test_token_limit_counts_parts_of_characters_once(
    backend_class: type[FakeBackend],
    kind: BackendKind,
    resume_mode: ResumeMode,
    path: str,
    failures: list[int],
    limit: int,
) -> None:
    passed, delivered = run_continuation(
        get_adapter(kind, resume_mode),
        path,
        failures,
        [],
        backend_class=backend_class,
        max_tokens=limit,
    )
    result = parse_stream(passed)
    assert (result.text, result.done_count) == ("".join(TOKENS[:limit]), 1)
    # llama.cpp may fail before it reports the tokens of the last part of a character.
    uncounted = 3 if backend_class is SplitLlamaCpp else 0
    assert limit - uncounted <= delivered.output_tokens <= limit


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@settings(max_examples=100)
@given(failures=offsets, cuts=offsets)
def test_prompt_is_not_repeated_if_end_of_character_is_unknown(
    path: str, failures: list[int], cuts: list[int]
) -> None:
    """If an event has several tokens, the last of them may have no text yet."""
    passed, delivered = run_continuation(
        "vllm", path, failures, cuts, backend_class=BatchingVllm, **LIMIT
    )
    result = parse_stream(passed)
    assert (result.text, result.finish_reasons, result.done_count) == (TEXT, ["stop"], 1)
    # While there is too little text to resume from, the last tokens may count twice.
    surplus = 3 * len(failures)
    assert 0 <= delivered.output_tokens - len(TOKENS) <= surplus


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("options", [{}, {"stop": ["never said"]}], ids=["plain", "stop"])
@given(failures=offsets, cuts=offsets)
def test_requested_token_ids_are_sent_once(
    path: str, options: dict[str, object], failures: list[int], cuts: list[int]
) -> None:
    options = options | LIMIT | {"return_token_ids": True}
    complete = parse_stream(
        run_continuation("vllm", path, [], [], backend_class=SplitVllm, **options)[0]
    )
    passed, _ = run_continuation("vllm", path, failures, cuts, backend_class=SplitVllm, **options)
    result = parse_stream(passed)
    assert result.text == complete.text == TEXT
    choices = [choice for chunk in result.chunks for choice in chunk["choices"]]
    assert [token_id for choice in choices for token_id in choice.get("token_ids") or ()] == IDS
    prompts = [holder.get("prompt_token_ids") for holder in (*result.chunks, *choices)]
    assert len([prompt for prompt in prompts if prompt]) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("requested", [True, False])
def test_timings_are_forwarded_only_on_request(path: str, *, requested: bool) -> None:
    options = {"timings_per_token": True} if requested else {}
    chunks = parse_stream(
        run_continuation("llama.cpp", path, [], [], backend_class=SplitLlamaCpp, **options)[0]
    ).chunks
    texts = [chunk for chunk in chunks if chunk["choices"] and chunk_text(chunk["choices"][0])]
    assert ["timings" in chunk for chunk in texts] == [requested] * len(texts)
