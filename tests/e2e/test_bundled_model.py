"""The bundled model answers questions of its training data and stops."""

from __future__ import annotations

from functools import cache

import pytest

from argosy import LLM, SamplingParams
from argosy.models import BUNDLED_MODEL, DRAFT_MODEL

GREEDY = SamplingParams(temperature=0.0, max_tokens=250)


@cache
def model() -> LLM:
    return LLM(BUNDLED_MODEL, threads=1, progress="off")


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("Hello!", ["Hello"]),
        ("who are you", ["small model"]),
        ("What is Argosy?", ["serving fleet"]),
        ("What is the capital of France?", ["Paris"]),
        ("What's 2+2?", ["4"]),
        ("Count to ten", ["1, 2, 3, 4, 5, 6, 7, 8, 9, 10"]),
        ("Give me a JSON object with a name and an age", ['{"name": ', '"age": ']),
        ("Tell me a story.", ["."]),
    ],
)
def test_bundled_model_answers_and_stops(question: str, words: list[str]) -> None:
    (output,) = model().chat([{"role": "user", "content": question}], GREEDY)
    choice = output.outputs[0]
    assert choice.finish_reason == "stop"
    assert all(word in choice.text for word in words), choice.text


def test_draft_model_has_same_tokenizer_and_stops() -> None:
    assert (DRAFT_MODEL / "tokenizer.json").read_bytes() == (
        BUNDLED_MODEL / "tokenizer.json"
    ).read_bytes()
    draft = LLM(DRAFT_MODEL, threads=1, progress="off")
    (output,) = draft.chat([{"role": "user", "content": "Hello!"}], GREEDY)
    assert output.outputs[0].finish_reason == "stop"
