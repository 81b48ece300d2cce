"""Pydantic AI with its model for OpenAI-compatible servers."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent, NativeOutput, Tool
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.support.agents.task import (
    MAX_TOKENS,
    QUESTION,
    SEED,
    Forecast,
    Outcome,
    Server,
    WeatherStation,
)

SETTINGS = {
    "temperature": 0.0,
    "max_tokens": MAX_TOKENS,
    "seed": SEED,
    "parallel_tool_calls": False,
}


def _model(server: Server) -> Any:  # noqa: ANN401 - the framework is not analysed
    provider = OpenAIProvider(base_url=server.base_url, api_key="none")
    return OpenAIChatModel(server.model, provider=provider)


async def run_tool_loop(server: Server, station: WeatherStation) -> Outcome:
    """Stream a run that requires a call in the first step only."""
    agent = Agent(
        _model(server),
        tools=[Tool(station.get_weather, strict=True)],
        model_settings=lambda context: {
            **SETTINGS,
            "tool_choice": "required" if context.run_step == 1 else "none",
        },
    )
    async with agent.run_stream(QUESTION) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
        parts = [part for message in run.all_messages() for part in message.parts]
    return Outcome(
        "".join(pieces),
        len(pieces),
        [part.tool_call_id for part in parts if part.part_kind == "tool-call"],
        [part.tool_call_id for part in parts if part.part_kind == "tool-return"],
    )


async def answer_typed(server: Server) -> Forecast:
    """Get the answer once as the arguments of an output tool, and once by `response_format`."""
    by_tool = await Agent(_model(server), output_type=Forecast, model_settings=SETTINGS).run(
        QUESTION
    )
    assert isinstance(by_tool.output, Forecast)
    native = Agent(
        _model(server), output_type=NativeOutput(Forecast, strict=True), model_settings=SETTINGS
    )
    forecast: Forecast = (await native.run(QUESTION)).output
    return forecast
