"""Grades of answers by assertions that need no judge."""

from __future__ import annotations

import json
import re
from typing import TypeAlias

import msgspec

from argosy.constraints import OutputConstraint, validate_document
from argosy.quality.golden_set import Assertion, compile_pattern

_REFUSAL = re.compile(
    r"^\W*(?:i(?:'m| am) (?:sorry|unable|not able|not allowed)|sorry\b|i apologi[sz]e"
    r"|(?:as an ai|i)\b.{0,40}\b(?:cannot|can't|can not|won't|will not|must decline))",
    re.IGNORECASE | re.DOTALL,
)
Schema: TypeAlias = dict[str, object] | bool
_PASSING = 0.5
_MAX_SHOWN = 200
"""Characters of an expected text in a reason."""
_MAX_SCANNED = 64
"""Places of an answer where a JSON document may begin."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a model to one request."""

    text: str = ""
    tool_calls: list[dict[str, object]] = []
    refusal: str = ""
    fingerprint: str = ""
    """`system_fingerprint` of the response: equal values mean the same weights and arithmetic. Empty if unknown."""
    latency_ms: float = 0.0
    error: str = ""
    """Why there is no answer. Empty if there is one."""
    is_cached: bool = False


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """Score of an answer by one assertion, from 0 to 1."""

    assertion: str
    score: float
    reason: str = ""
    metric: str = ""
    weight: float = 1.0
    passing: float = _PASSING
    """Smallest score that passes."""

    @property
    def has_passed(self) -> bool:
        """Whether the score passes."""
        return self.score >= self.passing


def grade_answer(assertion: Assertion, answer: Answer) -> Grade:
    """Grade an answer by an assertion other than a rubric. A request that failed meets none, negated or not."""
    if answer.error:
        problem = answer.error
    else:
        problem = _find_problem(assertion, answer)
        if assertion.is_negated:
            problem = "" if problem else f"the answer meets {assertion.type}"
    return make_grade(assertion, 0.0 if problem else 1.0, problem)


def check_answer(answer: Answer, response_format: object = None) -> str:
    """Return what is wrong with an answer whatever its question, or an empty text.

    It must not be empty or a refusal, and must have the JSON of its `response_format` and tool calls that can be read.
    """
    if answer.tool_calls:
        return check_calls(answer)
    if not answer.text.strip():
        return "the answer is empty"
    if answer.refusal or _REFUSAL.match(answer.text):
        return "the answer is a refusal"
    if not isinstance(response_format, dict):
        return ""
    match response_format.get("type"):
        case "json_object":
            return _check_document(answer.text, None)
        case "json_schema":
            described = response_format.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            return _check_document(answer.text, schema if isinstance(schema, dict) else None)
    return ""


def make_grade(assertion: Assertion, score: float, reason: str) -> Grade:
    """Return the grade of an assertion."""
    return Grade(
        assertion=assertion.name,
        score=score,
        reason=reason,
        metric=assertion.metric,
        weight=assertion.weight,
        passing=_PASSING if assertion.type != "llm-rubric" else assertion.threshold or _PASSING,
    )


def mean_score(grades: list[Grade]) -> float:
    """Return the weighted mean of scores; 1 if no grade has a weight."""
    total = sum(each.weight for each in grades)
    return sum(each.weight * each.score for each in grades) / total if total else 1.0


def _find_problem(assertion: Assertion, answer: Answer) -> str:
    """Return why an answer does not meet an assertion without its negation; empty if it does."""
    text, value = answer.text, assertion.value
    match assertion.type:
        case "is-json" | "contains-json":
            return _find_json_problem(text, value, is_whole=assertion.type == "is-json")
        case "is-valid-openai-tools-call":
            return check_calls(answer)
        case "latency":
            return (
                ""
                if answer.latency_ms <= (assertion.threshold or 0.0)
                else f"it took {answer.latency_ms:.0f} ms"
            )
        case "is-refusal":
            is_met = bool(answer.refusal or _REFUSAL.match(text))
        case "regex":
            is_met = compile_pattern(value).search(_repair(text)) is not None
        case "equals":
            is_met = text.strip() == value.strip()
        case "starts-with":
            is_met = text.startswith(value)
        case _:
            is_met = _contains(assertion, text)
    if is_met:
        return ""
    return "it is no refusal" if value is None else f"expected {str(value)[:_MAX_SHOWN]!r}"


def _contains(assertion: Assertion, text: str) -> bool:
    wanted = assertion.value if isinstance(assertion.value, list) else [assertion.value]
    if assertion.type.startswith("icontains"):
        text, wanted = text.casefold(), [each.casefold() for each in wanted]
    combine = all if assertion.type.endswith("-all") else any
    return combine(each in text for each in wanted)


def _find_json_problem(text: str, schema: Schema | None, *, is_whole: bool) -> str:
    if is_whole:
        return _check_document(text, schema)
    decoder, problem = json.JSONDecoder(), "the answer contains no JSON object or list"
    starts = [match.start() for match in re.finditer(r"[\[{]", text)][:_MAX_SCANNED]
    for start in starts:
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        problem = _check_document(text[start:end], schema)
        if not problem:
            return ""
    return problem


def _check_document(text: str, schema: Schema | None) -> str:
    constraint = OutputConstraint(
        kind="json_schema", param="", grammars=(), schema=True if schema is None else schema
    )
    return validate_document(constraint, text) or ""


def check_calls(answer: Answer, tools: object = None) -> str:
    """Return what is wrong with the tool calls of an answer, or an empty text.

    Args:
        answer: The answer.
        tools: Tools as in a chat completion. None checks only that the arguments are JSON objects.
    """
    if not answer.tool_calls:
        return "the answer calls no tool"
    schemas = _read_schemas(tools)
    for call in answer.tool_calls:
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            if isinstance(call.get("custom"), dict):
                continue  # its input may be any text
            return "a call names no function"
        name, text = function["name"], str(function.get("arguments"))
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return f"the arguments of {name!r} are no JSON object"
        if schemas and name not in schemas:
            return f"there is no function {name!r}"
        problem = _check_document(text, schemas[name]) if schemas else ""
        if problem:
            return f"the arguments of {name!r} do not fit their schema: {problem}"
    return ""


def _read_schemas(tools: object) -> dict[str, Schema | None]:
    """Return the schemas of functions by name. None permits any arguments."""
    schemas: dict[str, Schema | None] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            schemas[function["name"]] = schema if isinstance(schema, dict) else None
    return schemas


def _repair(text: str) -> str:
    """Return a text without halves of surrogate pairs, which RE2 does not accept."""
    return text.encode(errors="replace").decode()
