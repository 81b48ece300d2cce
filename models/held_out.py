"""Cases with tools, schemas and long texts that do not occur in training, and their scores.

The file `data/held_out.json` has the tools with requests, and `evaluate.py` runs the cases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs

from models.corpus.agents import NO_TOOL
from models.corpus.long_documents import draw_retrieval
from models.corpus.thinking import PUZZLES
from models.corpus.tools import generate_tool

CASES = Path(__file__).resolve().parent / "data" / "held_out.json"
LENGTHS = (2048, 4096, 8192)
MAX_THOUGHT_TOKENS = 100
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_TOKENS_PER_TOOL = 130


@dataclass(frozen=True, slots=True)
class Case:
    """Conversation to continue, and the scores by name. A score says whether an answer is right in one way."""

    group: str
    messages: list[dict[str, Any]]
    scores: dict[str, Callable[[str], bool]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    schema: dict[str, Any] | None = None
    thinking: bool = False
    new_tokens: int = 200


def read_calls(text: str) -> list[dict[str, Any]] | None:
    """Return the calls of an answer, or None if a call is not valid JSON."""
    try:
        calls = [json.loads(call) for call in _CALL.findall(text)]
    except ValueError:
        return None
    return calls if all(isinstance(call, dict) and "name" in call for call in calls) else None


def expect_calls(
    tools: list[dict[str, Any]], calls: list[tuple[str, dict[str, Any]]]
) -> dict[str, Callable[[str], bool]]:
    """Return the scores of calls: right tools, valid arguments, and exactly the expected arguments."""
    schemas = {tool["name"]: tool["parameters"] for tool in tools}

    def has_tools(text: str) -> bool:
        return [call["name"] for call in read_calls(text) or []] == [name for name, _ in calls]

    def is_valid(text: str) -> bool:
        found = read_calls(text)
        return bool(found) and all(
            call["name"] in schemas
            and jsonschema_rs.is_valid(schemas[call["name"]], call.get("arguments"))
            for call in found or []
        )

    def is_exact(text: str) -> bool:
        return [(call["name"], call.get("arguments")) for call in read_calls(text) or []] == calls

    return {"tool": has_tools, "valid": is_valid, "exact": is_exact}


def expect_pattern(pattern: str) -> dict[str, Callable[[str], bool]]:
    """Return the score of a plain answer that matches a pattern."""
    return {
        "right": lambda text: (
            "<tool_call>" not in text and re.search(pattern, text, re.DOTALL) is not None
        )
    }


def expect_document(
    schema: dict[str, Any], value: dict[str, Any]
) -> dict[str, Callable[[str], bool]]:
    """Return the scores of a JSON document: valid, and exactly the expected one."""

    def parse(text: str) -> object:
        try:
            return json.loads(text)
        except ValueError:
            return None

    return {
        "valid": lambda text: jsonschema_rs.is_valid(schema, parse(text)),
        "exact": lambda text: parse(text) == value,
    }


def expect_thought(answer: str) -> dict[str, Callable[[str], bool]]:
    """Return the scores of an answer after reasoning: the reasoning is closed, and the answer is right."""
    return {
        "closed": lambda text: "</think>" in text,
        "right": lambda text: text.partition("</think>")[2].strip() == answer,
    }


def user(text: str) -> dict[str, Any]:
    """Return a user turn."""
    return {"role": "user", "content": text}


def pick_tools(
    content: dict[str, Any], names: list[str], count: int, rng: Random
) -> list[dict[str, Any]]:
    """Return the named tools among other held-out tools."""
    tools = [entry["tool"] for entry in content["tools"]]
    chosen = [tool for tool in tools if tool["name"] in names]
    chosen += rng.sample([tool for tool in tools if tool["name"] not in names], count - len(chosen))
    rng.shuffle(chosen)
    return chosen


def short_cases(content: dict[str, Any]) -> Iterator[Case]:
    """Yield the cases with a few tools."""
    rng = Random(1)
    for entry in content["tools"]:
        name = entry["tool"]["name"]
        for case in entry["cases"]:
            tools = pick_tools(content, [name], 3, rng)
            yield Case(
                "single call",
                [user(case["ask"])],
                expect_calls(tools, [(name, case["arguments"])]),
                tools,
            )
            yield Case(
                "call after thinking", [user(case["ask"])],
                expect_calls(tools, [(name, case["arguments"])]) | {"closed": lambda text: "</think>" in text},
                tools, thinking=True,
            )  # fmt: skip
            tools = pick_tools(content, [name], 8, rng)
            yield Case(
                "one of eight tools",
                [user(case["ask"])],
                expect_calls(tools, [(name, case["arguments"])]),
                tools,
            )
    for case in content["parallel"]:
        calls = [(name, arguments) for name, arguments in case["calls"]]
        tools = pick_tools(content, [name for name, _ in calls], 3, rng)
        yield Case("parallel calls", [user(case["ask"])], expect_calls(tools, calls), tools)
    for asked in content["no_tool"]:
        tools = pick_tools(content, [], 3, rng)
        yield Case("no tool fits", [user(asked)], expect_pattern(re.escape(NO_TOOL)), tools)
    for asked, pattern in content["chat"]:
        yield Case(
            "chat beside tools",
            [user(asked)],
            expect_pattern(pattern),
            pick_tools(content, [], 3, rng),
        )
    for case in content["results"]:
        name, arguments = case["call"]
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        messages = [
            user(case["ask"]),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": case["content"]},
        ]
        pattern = "".join(f"(?=.*{re.escape(want)})" for want in case["want"])
        yield Case(
            "answer from result",
            messages,
            expect_pattern(pattern),
            pick_tools(content, [name], 3, rng),
        )


def other_cases(content: dict[str, Any]) -> Iterator[Case]:
    """Yield the cases with schemas and with reasoning."""
    for case in content["schemas"]:
        asked = f"Answer with JSON that follows this schema: {json.dumps(case['schema'])}"
        scores = expect_document(case["schema"], case["value"])
        yield Case(
            "JSON by schema in system",
            [{"role": "system", "content": asked}, user(case["text"])],
            scores,
            schema=case["schema"],
        )
        asked = f"{case['text']}\n\n{asked}"
        yield Case("JSON by schema in user", [user(asked)], scores, schema=case["schema"])
    rng = Random(99_991)
    for index in range(40):
        question, _, answer = PUZZLES[index % len(PUZZLES)](rng)
        yield Case(
            "thinking",
            [user(f"{question}?")],
            expect_thought(answer),
            thinking=True,
            new_tokens=MAX_THOUGHT_TOKENS,
        )


def long_cases(content: dict[str, Any], length: int, count: int) -> Iterator[Case]:
    """Yield calls of a tool among many, and facts from a long text."""
    rng = Random(length)
    for index in range(count):
        entry = content["tools"][(index * 5) % len(content["tools"])]
        case = entry["cases"][0]
        others = [
            generate_tool(rng).definition for _ in range(length * 8 // 10 // _TOKENS_PER_TOOL)
        ]
        others.insert(index * len(others) // max(1, count - 1), entry["tool"])
        scores = expect_calls(others, [(entry["tool"]["name"], case["arguments"])])
        yield Case(f"call, {length} tokens of tools", [user(case["ask"])], scores, others)
    for _ in range(count):
        document = draw_retrieval(rng, length * 9 // 10)
        kept = document.messages[: 2 if document.messages[0].role == "system" else 1]
        messages = [{"role": message.role, "content": message.content} for message in kept]
        answer = document.messages[len(kept)].content
        yield Case(
            f"fact, {length} tokens of text",
            messages,
            {"right": answer.__eq__},
        )


def read_cases(*, long: int = 0) -> Iterator[Case]:
    """Yield all cases. `long` is the number of cases of each kind and length with a long context."""
    content = json.loads(CASES.read_text(encoding="utf-8"))
    yield from short_cases(content)
    yield from other_cases(content)
    for length in LENGTHS if long else ():
        yield from long_cases(content, length, long)
