"""Helpers of the OpenAI SDK for JavaScript, and the AI SDK: typed answers, tool loops and their streams."""

from __future__ import annotations

import json
from typing import Any

from tests.support.agents.task import Forecast, Server
from tests.support.javascript_sdk import run_javascript


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
