"""Golden sets from files of other tools: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.quality import GoldenSet, read_golden_set
from argosy.quality.assertions import Answer, grade_answer
from argosy.quality.golden_set import Assertion

PROMPTFOO = """
description: Translations
prompts: [file://prompts.txt]
assertionTemplates:
  polite: {type: not-is-refusal}
providers:
  - id: openai:gpt-4o
    config: {temperature: 0, max_tokens: 64}
defaultTest:
  assert: [{$ref: '#/assertionTemplates/polite'}]
tests:
  - vars: {text: [Hello, Bye], language: French}
    assert:
      - {type: icontains-any, value: [bonjour, 'au revoir'], weight: 2, metric: right}
      - {type: llm-rubric, value: 'is in {{ language }}', threshold: 0.8}
  - file://more.csv
"""
PROMPTS = """Translate "{{ text }}" into {{ language }}.
---
[{"role": "system", "content": "You translate into {{ language }}."}, {"role": "user", "content": "{{ text }}"}]
"""
MORE = 'text,language,__expected,__expected2\nYes,German,equals: Ja,"not-contains-any: Yes, Oui"\n'


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content)
    return path


def rows(*values: dict[str, Any]) -> str:
    return "".join(json.dumps(each) + "\n" for each in values)


def test_promptfoo_configurations_are_read_with_their_files(tmp_path: Path) -> None:
    write(tmp_path, "more.csv", MORE)
    write(tmp_path, "prompts.txt", PROMPTS)
    golden = read_golden_set(write(tmp_path, "promptfooconfig.yaml", PROMPTFOO))
    assert golden.parameters == {"temperature": 0, "max_tokens": 64}
    assert [item.id for item in golden.items] == ["1", "1.2", "1.3", "1.4", "2", "2.2"]
    first, second = golden.items[:2]
    assert first.messages == [{"role": "user", "content": 'Translate "Hello" into French.'}]
    assert [each["role"] for each in second.messages] == ["system", "user"]
    assert [each.name for each in first.assertions] == [
        *("not-is-refusal", "icontains-any", "llm-rubric"),
    ]
    assert first.assertions[2].value == "is in French"
    assert first.cluster == second.cluster == "test 1"
    assert [each.name for each in golden.items[4].assertions] == [
        *("not-is-refusal", "equals", "not-contains-any"),
    ]
    assert golden.items[4].assertions[2].value == ["Yes", "Oui"]


@pytest.mark.parametrize(
    ("name", "content", "refused"),
    [
        ("a.yaml", "tests: [{assert: [{type: javascript, value: x}]}]", "`javascript` is refused: code"),
        ("a.yaml", "tests: [{assert: [{type: not-python, value: x}]}]", "`not-python` is refused: code"),
        ("a.yaml", "tests: [{assert: [{type: webhook, value: u}]}]", "`webhook` is refused: code"),
        ("a.yaml", "tests: [{assert: [{type: cost, threshold: 1}]}]", "`cost` is refused: this type"),
        ("a.yaml", "tests: [{assert: [{type: similar, value: x}]}]", "`similar` is refused"),
        ("a.yaml", "tests: [{options: {transform: x}}]", "test 1: `transform` is refused"),
        ("a.yaml", "tests: file://tests.py", "`file://tests.py` is refused: code"),
        ("a.yaml", "tests: file://../../etc/passwd.txt", "is refused: it lies outside"),
        ("a.yaml", "tests: https://host/tests.csv", "is refused: it lies outside"),
        ("a.yaml", "prompts: [file://p.js]\ntests: []", "`file://p.js` is refused"),
        ("a.yaml", "prompts: [p]\nproviders: ['file://p.py']\ntests: []", "`file://p.py` is refused"),
        ("a.yaml", "prompts: [p]\nproviders: [{config: {functions: []}}]\ntests: []", "`functions` is refused"),
        ("a.yaml", "tests: [{assert: [{$ref: '#/assertionTemplates/x'}]}]", "an assertion needs a `type`"),
        ("a.yaml", "tests: [{vars: [1], assert: [{type: is-json}]}]", "another form"),
        ("a.yaml", "defaultTest: {options: x}\ntests: [1]", "`1` is refused"),
        ("a.yaml", "prompts: {a: 1}\ntests: [{metadata: 3, assert: [{type: is-json}]}]", "is refused"),
        ("a.jsonl", '{"input": [1], "target": "a"}', "Expected `object`"),
        ("a.jsonl", '{"input": "a", "target": "b", "choices": 3}', "another form"),
        ("a.yaml", "extensions: [x]\ntests: []", "`extensions` is refused"),
        ("a.yaml", "prompts: ['{{ x }}']\ntests: [{assert: [{type: is-json}]}]", "'x' is undefined"),
        ("a.csv", "prompt,__expected\np,javascript: 1\n", "`javascript` is refused"),
        ("a.csv", "prompt,__transform\np,x\n", "`__transform` is refused"),
        ("a.jsonl", '{"input": "a", "target": "b", "sandbox": "docker"}', "`sandbox` is refused"),
        ("a.jsonl", '{"question": "a"}', "row 1: it needs `input` and `target`"),
        ("a.json", '{"items": [], "parameters": {}}', "length >= 1"),
        ("a.yaml", "tests: [{assert: [{type: regex, value: '('}]}]", "invalid in RE2's syntax"),
        ("a.json", '{"items": [{"id": "", "messages": [{}], "assertions": []}]}', "length >= 1"),
        ("a.yaml", "a: &a [*a]", "contains itself"),
    ],
)  # fmt: skip
def test_code_and_what_is_not_supported_is_refused_by_name(
    name: str, content: str, refused: str, tmp_path: Path
) -> None:
    if "tests:" in content and "prompts" not in content:
        content = f"prompts: [p]\n{content}"
    with pytest.raises(ValueError, match=f"^{tmp_path}/{name}: ") as caught:
        read_golden_set(write(tmp_path, name, content))
    assert refused in str(caught.value)


def test_rows_of_other_tools_are_read(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    inspect = rows(
        {"id": "sum", "input": chat, "target": ["2", "two"], "metadata": {"cluster": "sums"}},
        {"input": "Which is red?", "choices": ["Sky", "Blood"], "target": "B"},
    )
    golden = read_golden_set(write(tmp_path, "inspect.jsonl", inspect))
    assert (golden.items[0].id, golden.items[0].cluster) == ("sum", "sums")
    assert golden.items[0].assertions[0].value == ["2", "two"]
    assert "A) Sky\nB) Blood" in golden.items[1].messages[0]["content"]
    (letter,) = golden.items[1].assertions
    for text, score in (("B", 1), ("(B) Blood", 1), ("A", 0), ("Blood", 0)):
        assert grade_answer(letter, Answer(text=text)).score == score
    openai = read_golden_set(write(tmp_path, "e.jsonl", rows({"input": chat, "ideal": "2"})))
    assert openai.items[0].assertions[0].value == ["2"]
    ragas = {"user_input": "Who?", "retrieved_contexts": ["Ada did."], "reference": "Ada"}
    (item,) = read_golden_set(write(tmp_path, "ragas.json", json.dumps([ragas]))).items
    assert "Ada did.\n\nQuestion: Who?" in item.messages[0]["content"]
    assert (item.assertions[0].type, item.cluster) == ("llm-rubric", "Ada did.")
    csv = read_golden_set(
        write(tmp_path, "q.csv", "question,__expected\nWho?,Ada\n"), "{{ question }}"
    )
    assert (csv.items[0].messages[0]["content"], csv.items[0].assertions[0].type) == ("Who?", "equals")  # fmt: skip
    own = read_golden_set(write(tmp_path, "own.json", golden.encode().decode()))
    assert (own, own.digest) == (golden, golden.digest)
    assert isinstance(own, GoldenSet)


SCHEMA = {"type": "object", "required": ["a"]}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("assertion", "good", "bad"),
    [
        ({"type": "equals", "value": "a"}, " a\n", "ab"),
        ({"type": "contains", "value": "b"}, "abc", "B"),
        ({"type": "icontains", "value": "b"}, "ABC", "c"),
        ({"type": "contains-any", "value": ["a", "b"]}, "b", "c"),
        ({"type": "contains-all", "value": ["a", "b"]}, "ba", "b"),
        ({"type": "icontains-all", "value": ["a", "b"]}, "BA", "b"),
        ({"type": "starts-with", "value": "a"}, "ab", "ba"),
        ({"type": "regex", "value": r"\d{3}"}, "a 123\ud800", "12"),
        ({"type": "is-json"}, "[1]", "x [1]"),
        ({"type": "is-json", "value": SCHEMA}, '{"a": 1}', '{"b": 1}'),
        ({"type": "contains-json", "value": SCHEMA}, 'see {} or {"a": 1}.', "see {}"),
        ({"type": "is-refusal"}, "I'm sorry, but I can't help with that.", "I can help."),
        ({"type": "latency", "threshold": 5}, "", None),
        ({"type": "is-valid-openai-tools-call"}, None, "f()"),
        ({"type": "contains", "value": "b", "is_negated": True}, "a", "b"),
    ],
)
def test_assertions_grade_answers(
    assertion: dict[str, Any], good: str | None, bad: str | None
) -> None:
    condition = Assertion(**assertion)
    met = Answer(tool_calls=[CALL]) if good is None else Answer(text=good, latency_ms=4)
    missed = Answer(latency_ms=6) if bad is None else Answer(text=bad)
    assert grade_answer(condition, met).score == 1
    assert grade_answer(condition, missed).reason
    assert grade_answer(condition, Answer(error="refused")).score == 0
