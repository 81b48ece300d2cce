"""Held-out cases of the bundled model: their tools do not occur in its training text."""

from __future__ import annotations

import json
from itertools import chain, islice

from models.chat_format import render
from models.corpus.chat import generate_documents
from models.corpus.tools import COMMON, NOUNS
from models.corpus.values import WORDS
from models.held_out import CASES, read_cases


def test_held_out_tools_have_no_names_or_nouns_of_training() -> None:
    content = json.loads(CASES.read_text("utf-8"))
    known = {*WORDS, *chain.from_iterable(noun.split("_") for noun in NOUNS)}
    known |= set(chain.from_iterable(entry["names"] for entry in COMMON))
    for entry in content["tools"]:
        name = entry["tool"]["name"]
        assert name not in known
        assert name.split("_", 1)[1] not in known


def test_cases_are_scored() -> None:
    case = next(iter(read_cases()))
    right = (
        '<tool_call>\n{"name": "get_humidity", "arguments": {"greenhouse": "Nord"}}\n</tool_call>'
    )
    wrong = right.replace("Nord", "South")
    assert {name: score(right) for name, score in case.scores.items()} == dict.fromkeys(
        ("tool", "valid", "exact"), True
    )
    assert not case.scores["exact"](wrong)
    assert not case.scores["tool"]("Hello!")


def test_training_text_is_endless_and_repeats_with_its_seed() -> None:
    first, again = (
        [render(document) for document in islice(generate_documents(3, 1024), 100)]
        for _ in range(2)
    )
    assert first == again
    assert any("<tool_call>" in text for text in first)
    assert any("<think>" in text for text in first)
