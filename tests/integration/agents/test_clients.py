"""Official clients and agent frameworks, in Python and JavaScript: conversations, tool loops and typed answers.

Each framework runs in a process of its own, which keeps its imports, clients and threads out of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.integration.test_metrics import samples
from tests.support.agents.task import Forecast, Report, Server
from tests.support.conversation import (
    APIS,
    Answer,
    Person,
    Question,
    Script,
    Sdks,
    Transcript,
)
from tests.support.javascript_sdk import run_javascript
from tests.support.waiting import until

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CAPITAL, FOX = "What is the capital of France?", "Tell me a story about a fox."
IN_PARIS = Question("What is the weather in Paris?", tool=WEATHER)
SCRIPT = Script(
    questions={
        "whole": Question(CAPITAL, stream=False),
        "streamed": Question(CAPITAL),
        "stopped": Question("Count from one to nine.", stop=("5",)),
        "reasoning": Question("What is 17 + 25?", effort="low"),
        "call": IN_PARIS,
    },
    tool_loop=IN_PARIS,
    typed=Question("Give me a person as JSON."),
    cancelled=Question(FOX),
)
ROOT = Path(__file__).parents[3]
OFFLINE = {"LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"}


async def ask_in_python(server: Server, api: str) -> dict[str, Answer]:
    """Return the answers to all questions."""
    sdks = Sdks(server.root_url, "unused")
    async with contextlib.aclosing(sdks):
        return {
            name: await sdks.ask(api, server.model, each) for name, each in SCRIPT.questions.items()
        }


async def converse_in_javascript(server: Server) -> dict[str, Transcript]:
    script = msgspec.json.encode(SCRIPT).decode()
    results = await run_javascript("conversation.mjs", server.root_url, server.model, script)
    return msgspec.convert(results, dict[str, Transcript])


async def test_clients_of_all_apis_hold_the_same_conversation(server: Server) -> None:
    cancelled = count_cancelled(server)
    python, javascript = await asyncio.gather(
        asyncio.gather(*(ask_in_python(server, api) for api in APIS)),
        converse_in_javascript(server),
    )
    first, expected = javascript["chat"], python[0]
    for api, answers_in_python in zip(APIS, python, strict=True):
        transcript = javascript[api]
        for answers in (answers_in_python, transcript.answers):
            if api == "responses":  # has no stop sequences
                del answers["stopped"]
            for name, answer in answers.items():
                assert answer == expected[name], (api, name)
        assert transcript.tool_loop == first.tool_loop, api
        Person.model_validate(transcript.typed)
        assert transcript.error[0] == 404
        assert "'missing'" in transcript.error[1]
        assert transcript.cancelled_after
    # On a busy machine some streams end before their client leaves.
    await until(lambda: count_cancelled(server) > cancelled)
    check_answers(first)


def check_answers(transcript: Transcript) -> None:
    answers = transcript.answers
    assert "Paris" in answers["whole"].text
    assert answers["streamed"] == answers["whole"]
    assert answers["stopped"].text.endswith("4, ")
    assert answers["reasoning"].thinking
    assert answers["reasoning"].text
    assert answers["call"].calls == [("get_weather", {"city": "Paris"})]
    assert transcript.tool_loop.calls == answers["call"].calls
    assert transcript.tool_loop.text


def count_cancelled(server: Server) -> float:
    """Return how many requests ended because their client left."""
    text = httpx2.get(f"{server.root_url}/metrics").text
    return sum(
        value
        for name, labels, value in samples(text)
        if name == "argosy_gateway_requests_total" and labels["status"] == "cancelled"
    )


@pytest.mark.parametrize("framework", ["openai_agents", "langchain_agents"])
async def test_a_framework_runs_a_tool_loop_and_gets_a_typed_answer(
    framework: str, server: Server
) -> None:
    report = await run_framework(framework, server)
    outcome = report.outcome
    assert report.tool_calls
    assert outcome.answer
    assert "<tool_call>" not in outcome.answer
    assert outcome.num_streamed
    assert outcome.call_ids
    assert len(set(outcome.call_ids)) == len(outcome.call_ids)
    assert outcome.result_ids == outcome.call_ids
    Forecast.model_validate(report.forecast)


async def run_framework(name: str, server: Server) -> Report:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.agents.runner", name, server.base_url, server.model),
        cwd=ROOT,
        env=os.environ | OFFLINE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return msgspec.json.decode(out.splitlines()[-1], type=Report)


async def test_javascript_sdks_run_tool_loops_and_get_typed_answers(server: Server) -> None:
    results = await run_javascript("agents.mjs", server.base_url, server.model)
    for forecast in (results["parsed"], results["generatedObject"]):
        Forecast.model_validate(forecast)
    check_openai(results)
    for loop in (results["generateText"], results["streamText"]):
        assert loop["calls"]
        assert loop["text"]
    assert results["generateText"]["finishReasons"][0] == "tool-calls"
    parts = results["streamText"]["parts"]
    assert parts["tool-call"] == parts["tool-result"] == len(results["streamText"]["calls"])
    assert parts["tool-input-delta"]
    assert results["streamText"]["outputTokens"] > 1


def check_openai(results: dict[str, Any]) -> None:
    assert results["streamedArguments"] == results["wholeArguments"]
    assert results["deltas"] == "".join(results["wholeArguments"])
    assert results["parsedArguments"] == list(map(json.loads, results["wholeArguments"]))
    assert results["streamedContent"] is None
    assert results["finishReason"] == "tool_calls"
    assert results["runTools"]["calls"]
    assert results["runTools"]["roles"][:3] == ["user", "assistant", "tool"]
    assert results["streamingRunner"]["chunks"]
    assert results["streamingRunner"]["roles"][:2] == ["user", "assistant"]
