"""Answers whose characters are several tokens, carried on from wherever a server dies: within a character, too."""

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
from tests.support.fake_backend import (
    FIRST_ID,
    Asked,
    Double,
    Json,
    Part,
    sse,
)
from tests.support.gateway_client import CHAT, COMPLETION, said
from tests.unit.gateway.test_stream_continuation import ask_for, pieces, seen_in

from argosy.gateway.backends import BackendKind, ResumeMode, StreamContinuation, get_adapter
from argosy.gateway.backends.delivered_output import DeliveredOutput

SAID = ("Once", " upon", "", "", " 🦊", " a time", ",", "", " ä", "", "", "", "🐈", " said", ".")
TEXT = "".join(SAID)
PROMPT = "system\nBe kind.\nuser\nTell me\nassistant\n"
"""As vLLM would write it; of its answer nobody gets any of it."""
IDS = list(range(FIRST_ID, FIRST_ID + len(SAID)))
LIMIT = {"max_tokens": 20, "stream_options": {"include_usage": True}}


class HalfSglang(Sglang):
    answer = SAID


class HalfTensorRtLlm(TensorRtLlm):
    answer = SAID


class HalfLlamaCpp(LlamaCpp):
    """Of parts of a character it tells nothing, so an event may have several tokens. It says how many, when asked."""

    answer = SAID

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        for at, event in enumerate(super().events(asked, part), int(not asked.chat)):
            if event == DONE:
                yield event
                continue
            chunk: Json = json.loads(event[6:])
            choice = chunk["choices"][0] if chunk["choices"] else {"finish_reason": "told"}
            if said(choice) and asked.body.get("timings_per_token"):
                chunk["timings"] = {"predicted_n": at}
            if said(choice) or choice["finish_reason"] or "role" in choice.get("delta", {}):
                yield sse(chunk)


class HalfVllm(Vllm):
    """Asked to go on within a character, it tells all that it was given together with the rest of that character.

    So does `DecodeStream` of Hugging Face's tokenizers, with which vLLM makes text.
    """

    answer = SAID

    def _texts(self, asked: Asked, part: Part) -> list[str]:
        texts = super()._texts(asked, part)
        if part.start and not SAID[part.start - 1] and isinstance(asked.body.get("prompt"), list):
            at = next(at for at, text in enumerate(texts) if text)
            texts[at] = PROMPT + "".join(SAID[: part.start]) + texts[at]
        return texts


class BusyVllm(HalfVllm):
    """Its events bring three tokens, as they do where the engine is ahead of its server."""

    def events(self, asked: Asked, part: Part) -> Iterator[bytes]:
        role: list[Json] = []
        told: list[Json] = []
        rest: list[Json] = []
        for event in list(super().events(asked, part))[:-1]:
            chunk: Json = json.loads(event[6:])
            choices = chunk["choices"]
            of = (
                rest if not choices else told if "role" not in choices[0].get("delta", {}) else role
            )
            of.append(chunk)
        few = (told[at : at + 3] for at in range(0, len(told), 3))
        yield from map(sse, (*role, *map(_together, few), *rest))
        yield DONE


def _together(chunks: list[Json]) -> Json:
    """Chunks as one."""
    choices: list[Json] = [chunk["choices"][0] for chunk in chunks]
    text = "".join(map(said, choices))
    own: Json = {"delta": {"content": text}} if "delta" in choices[0] else {"text": text}
    ids = [choice["token_ids"] for choice in choices]
    own["token_ids"] = None if None in ids else [*itertools.chain(*ids)]
    if "prompt_token_ids" in choices[0]:
        own["prompt_token_ids"] = choices[0]["prompt_token_ids"]
    return chunks[-1] | {"choices": [choices[-1] | own]}


def carried(
    family: type[Double],
    kind: BackendKind,
    how: ResumeMode,
    path: str,
    deaths: list[int],
    cuts: list[int],
    **changes: object,
) -> tuple[bytes, DeliveredOutput]:
    """What the client gets over servers that die after so many bytes each, but for the last."""
    adapter, ask, delivered = get_adapter(kind, how), ask_for(path, **changes), DeliveredOutput()
    carrier, passed = StreamContinuation(ask, path.encode(), delivered), b""
    for death in (*deaths, None):
        leg = carrier.plan_upstream(adapter, "cat", 64)
        assert leg is not None
        double, out = family(), leg.request
        asked = Asked(out.path.decode(), {}, json.loads(out.body))
        stream = b"".join(double.events(asked, double.part(asked)))
        alive = stream if death is None else stream[: death % len(stream)]
        for piece in pieces(alive, cuts):
            passed += leg.parser.feed(piece)
        assert not leg.parser.failure
        ending = leg.parser.flush() if death is None else carrier.build_missing_tail()
        if ending is not None:
            return passed + ending, delivered
    raise AssertionError


places = st.lists(st.integers(0, 10_000), max_size=4)
ways = pytest.mark.parametrize(
    ("family", "kind", "how", "path"),
    [
        (HalfVllm, "vllm", "exact", CHAT),
        (HalfVllm, "vllm", "exact", COMPLETION),
        (HalfVllm, "vllm", "prefill", CHAT),
        (HalfSglang, "sglang", "exact", CHAT),
        (HalfSglang, "sglang", "exact", COMPLETION),
        (HalfTensorRtLlm, "tensorrt-llm", "exact", COMPLETION),
        (HalfLlamaCpp, "llama.cpp", "exact", CHAT),
        (HalfLlamaCpp, "llama.cpp", "exact", COMPLETION),
    ],
)


@ways
@settings(max_examples=60)
@given(deaths=places, cuts=places)
def test_an_answer_is_whole_wherever_in_a_character_its_servers_die(
    family: type[Double],
    kind: BackendKind,
    how: ResumeMode,
    path: str,
    deaths: list[int],
    cuts: list[int],
) -> None:
    passed, delivered = carried(family, kind, how, path, deaths, cuts, **LIMIT)
    seen = seen_in(passed)
    assert (seen.text, seen.finish, seen.done) == (TEXT, ["stop"], 1)
    assert delivered.output_tokens == seen.usage[-1]["completion_tokens"] == len(SAID)


@ways
@settings(max_examples=30)
@given(deaths=places, limit=st.integers(1, len(SAID)))
def test_a_limit_counts_no_part_of_a_character_twice(
    family: type[Double],
    kind: BackendKind,
    how: ResumeMode,
    path: str,
    deaths: list[int],
    limit: int,
) -> None:
    passed, delivered = carried(family, kind, how, path, deaths, [], max_tokens=limit)
    seen = seen_in(passed)
    assert (seen.text, seen.done) == ("".join(SAID[:limit]), 1)
    untold = (
        3 if family is HalfLlamaCpp else 0
    )  # it may be lost before it has told of the last parts
    assert limit - untold <= delivered.output_tokens <= limit


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@settings(max_examples=100)
@given(deaths=places, cuts=places)
def test_nobody_sees_the_prompt_where_the_end_of_a_character_is_unknown(
    path: str, deaths: list[int], cuts: list[int]
) -> None:
    """Of several tokens in one event the last may have no text yet."""
    passed, delivered = carried(BusyVllm, "vllm", "exact", path, deaths, cuts, **LIMIT)
    seen = seen_in(passed)
    assert (seen.text, seen.finish, seen.done) == (TEXT, ["stop"], 1)
    past = 3 * len(
        deaths
    )  # while there is too little text to go by, its last tokens may count twice
    assert 0 <= delivered.output_tokens - len(SAID) <= past


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("asks", [{}, {"stop": ["never said"]}], ids=["plain", "stop"])
@given(deaths=places, cuts=places)
def test_a_client_that_wants_token_ids_gets_each_once(
    path: str, asks: dict[str, object], deaths: list[int], cuts: list[int]
) -> None:
    asks = asks | LIMIT | {"return_token_ids": True}
    whole = seen_in(carried(HalfVllm, "vllm", "exact", path, [], [], **asks)[0])
    passed, _ = carried(HalfVllm, "vllm", "exact", path, deaths, cuts, **asks)
    seen = seen_in(passed)
    assert seen.text == whole.text == TEXT
    choices = [choice for chunk in seen.chunks for choice in chunk["choices"]]
    assert [one for choice in choices for one in choice.get("token_ids") or ()] == IDS
    prompts = [told.get("prompt_token_ids") for told in (*seen.chunks, *choices)]
    assert len([prompt for prompt in prompts if prompt]) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("asked", [True, False])
def test_timings_with_each_event_are_for_who_asked_for_them(path: str, *, asked: bool) -> None:
    asks = {"timings_per_token": True} if asked else {}
    chunks = seen_in(carried(HalfLlamaCpp, "llama.cpp", "exact", path, [], [], **asks)[0]).chunks
    texts = [chunk for chunk in chunks if chunk["choices"] and said(chunk["choices"][0])]
    assert ["timings" in chunk for chunk in texts] == [asked] * len(texts)
