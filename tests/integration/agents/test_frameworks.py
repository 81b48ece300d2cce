"""Agent frameworks and JavaScript SDKs, as their users install them, run tool loops and get typed answers.

Each framework runs in a process of its own, which keeps its imports, clients and threads out of the tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.agents.task import Forecast, Report, Server
from tests.support.javascript_sdk import run_javascript

ROOT = Path(__file__).parents[3]
OFFLINE = {"LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"}


@pytest.mark.parametrize(
    "framework",
    [
        "openai_agents",
        "langchain_agents",
        pytest.param("pydantic_agents", marks=pytest.mark.exhaustive),
        pytest.param("smol_agents", marks=pytest.mark.exhaustive),
    ],
)
async def test_a_framework_runs_a_tool_loop_and_gets_a_typed_answer(
    framework: str, server: Server
) -> None:
    report = await run_framework(framework, server)
    outcome = report.outcome
    assert report.tool_calls
    assert outcome.answer
    if framework != "smol_agents":  # leaves the tools out in the end, so a call would be text
        assert "<tool_call>" not in outcome.answer
    assert outcome.num_streamed
    assert outcome.call_ids
    assert len(set(outcome.call_ids)) == len(outcome.call_ids)
    assert outcome.result_ids == ([] if framework == "smol_agents" else outcome.call_ids)
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
