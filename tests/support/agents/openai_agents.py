"""OpenAI Agents SDK with its chat completions model."""

from __future__ import annotations

from typing import Any

import agents
from openai import AsyncOpenAI

from tests.support.agents.task import (
    MAX_TOKENS,
    QUESTION,
    Forecast,
    Outcome,
    Server,
    Unit,
    WeatherStation,
)


def _agent(server: Server, **options: Any) -> Any:  # noqa: ANN401 - the framework is not analysed
    client = AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    return agents.Agent(
        name="Weather",
        instructions="Use the tool.",
        model=agents.OpenAIChatCompletionsModel(server.model, client),
        **options,
    )


async def run_tool_loop(server: Server, station: WeatherStation) -> Outcome:
    """Stream a run. After the first call the SDK resets `tool_choice`, and the tool is not there any more."""

    def get_weather(city: str, unit: Unit) -> str:
        """Get the weather of a city."""
        return station.get_weather(city, unit)

    agent = _agent(
        server,
        tools=[agents.function_tool(get_weather, is_enabled=lambda *_: not station.calls)],
        model_settings=agents.ModelSettings(
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0.0,
            max_tokens=MAX_TOKENS,
            include_usage=True,
        ),
    )
    run = agents.Runner.run_streamed(agent, QUESTION, max_turns=4)
    num_streamed = 0
    async for event in run.stream_events():
        num_streamed += event.type == "raw_response_event"
    items = run.to_input_list()
    return Outcome(
        run.final_output,
        num_streamed,
        [item["call_id"] for item in items if item.get("type") == "function_call"],
        [item["call_id"] for item in items if item.get("type") == "function_call_output"],
    )


async def answer_typed(server: Server) -> Forecast:
    """Run an agent whose output type becomes a strict `response_format`."""
    settings = agents.ModelSettings(temperature=0.0, max_tokens=MAX_TOKENS)
    agent = _agent(server, output_type=Forecast, model_settings=settings)
    result = await agents.Runner.run(agent, QUESTION)
    forecast: Forecast = result.final_output_as(Forecast, raise_if_incorrect_type=True)
    return forecast
