"""Answers of the bundled model: to questions of its training data, and under random schemas."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from tests.support.schema_strategy import random_schema

from argosy import LLM, SamplingParams
from argosy.constraints import read_constraint, validate_document
from argosy.models import BUNDLED_MODEL, DRAFT_MODEL

GREEDY = SamplingParams(temperature=0.0, max_tokens=250)
CHOICES = 8
MAX_TOKENS = 160
QUESTION = [{"role": "user", "content": "Answer with a JSON document."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
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
def test_bundled_model_answers_and_stops(llm: LLM, question: str, words: list[str]) -> None:
    (output,) = llm.chat([{"role": "user", "content": question}], GREEDY)
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


def test_drafts_are_accepted_and_change_nothing(llm: LLM) -> None:
    sentence = "the quick brown fox jumps over the lazy dog. "
    prompts = [f"Repeat: {sentence * 3}", "Count to ten: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3,"]
    sampling = [
        SamplingParams(temperature=0.0, max_tokens=60, logprobs=2),
        SamplingParams(temperature=0.7, max_tokens=60, seed=3, ignore_eos=True),
    ]
    accepted_before = read_accepted_drafts(llm)
    outputs = [llm.generate(prompts, params) for params in sampling]
    accepted = read_accepted_drafts(llm)
    assert accepted > accepted_before
    assert llm.generate(prompts, sampling[0], speculation=False) is not None
    assert read_accepted_drafts(llm) == accepted
    options: dict[str, Any]
    for options, is_drafting in (
        ({"speculation": "off"}, False),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, True),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_min": 100}}, False),
    ):
        other = LLM(BUNDLED_MODEL, threads=1, progress="off", **options)
        for expected, params in zip(outputs, sampling, strict=True):
            actual = other.generate(prompts, params)
            assert [output.outputs for output in actual] == [output.outputs for output in expected]
        assert (read_accepted_drafts(other) > 0) == is_drafting
        drafts, tokens = (
            sum(metric.value for metric in other.get_metrics() if metric.name == name)
            for name in ("argosy_drafts_total", "argosy_draft_tokens_total")
        )
        assert tokens <= 2 * drafts


def read_accepted_drafts(llm: LLM) -> float:
    return sum(
        metric.value
        for metric in llm.get_metrics()
        if metric.name == "argosy_accepted_draft_tokens_total"
    )


def generate_answers(llm: LLM, seeds: range) -> Counter[str]:
    """Generate `CHOICES` answers under one schema for each seed, and count how they ended."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        is_strict = seed % 2 == 0
        schema = random_schema(random.Random(seed), strict=is_strict)
        response_format = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": is_strict},
        }
        constraint = read_constraint({"response_format": response_format})
        assert constraint is not None
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
        (output,) = llm.chat(QUESTION, sampling, n=CHOICES, response_format=response_format)
        assert len(output.outputs) == CHOICES
        for answer in output.outputs:
            assert answer.error is None, (seed, answer.error)
            assert answer.finish_reason in {"stop", "length"}, (seed, answer.finish_reason)
            if answer.finish_reason == "length":
                outcomes["length"] += 1
                continue
            problem = validate_document(constraint, answer.text)
            assert problem is None or constraint.relaxations, (seed, problem, answer.text)
            outcomes["reported" if problem else "valid"] += 1
    return outcomes


def test_finished_answers_validate(llm: LLM) -> None:
    outcomes = generate_answers(llm, range(4))
    assert outcomes["valid"] > outcomes["reported"]


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_ten_thousand_finished_answers_validate(llm: LLM) -> None:
    outcomes = generate_answers(llm, range(1_000, 1_000 + 10_000 // CHOICES))
    assert outcomes.total() == 10_000
    assert outcomes["valid"] > 5_000, outcomes
