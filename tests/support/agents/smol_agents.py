"""Smolagents with its model for OpenAI-compatible servers."""

from __future__ import annotations

import asyncio
from typing import Any

import smolagents
from smolagents.memory import ActionStep

from tests.support.agents.task import (
    MAX_TOKENS,
    QUESTION,
    SEED,
    Forecast,
    Outcome,
    Server,
    Unit,
    WeatherStation,
)


def _model(server: Server) -> Any:  # noqa: ANN401 - the framework is not analysed
    return smolagents.OpenAIServerModel(
        server.model,
        api_base=server.base_url,
        api_key="none",
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        seed=SEED,
    )


async def run_tool_loop(server: Server, station: WeatherStation) -> Outcome:
    """Run an agent, which requires a call in each step and gives its final answer as a call.

    Only the tool is there in the first step, and only the final answer after it.
    """

    def get_weather(city: str, unit: Unit) -> str:
        """Get the weather of a city.

        Args:
            city: Name of the city.
            unit: Unit of the temperature.
        """
        return station.get_weather(city, unit)

    def offer_final_answer(step: Any, agent: Any) -> None:  # noqa: ANN401 - the framework is not analysed
        agent.tools = final_answer

    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(get_weather)],
        model=_model(server),
        max_steps=3,
        stream_outputs=True,
        verbosity_level=smolagents.LogLevel.OFF,
        step_callbacks={ActionStep: offer_final_answer},
    )
    final_answer = {"final_answer": agent.tools.pop("final_answer")}
    events = await asyncio.to_thread(lambda: list(agent.run(QUESTION, stream=True)))
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    calls = [call for step in steps for call in step.tool_calls or ()]
    return Outcome(str(events[-1].output), len(events), [call.id for call in calls], [])


async def answer_typed(server: Server) -> Forecast:
    """Ask the model for an answer with a response format, as an agent with structured outputs does."""
    response_format = {
        "type": "json_schema",
        "json_schema": {
            "name": "forecast",
            "strict": True,
            "schema": Forecast.model_json_schema(),
        },
    }
    message = await asyncio.to_thread(
        _model(server).generate,
        [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        response_format=response_format,
    )
    return Forecast.model_validate_json(message.content)
