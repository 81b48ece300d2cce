"""LangChain agents, which run on LangGraph, with `ChatOpenAI`."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI

from tests.support.agents.task import (
    MAX_TOKENS,
    QUESTION,
    SEED,
    Forecast,
    Outcome,
    Server,
    WeatherStation,
)


def _model(server: Server) -> Any:  # noqa: ANN401 - the framework is not analysed
    return ChatOpenAI(
        model=server.model,
        base_url=server.base_url,
        api_key="none",
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        seed=SEED,
        max_retries=0,
    )


async def _require_first_call(request: Any, handler: Any) -> Any:  # noqa: ANN401 - the same
    has_called = any(message.type == "tool" for message in request.messages)
    return await handler(request.override(tool_choice="none" if has_called else "required"))


async def run_tool_loop(server: Server, station: WeatherStation) -> Outcome:
    """Stream the messages of an agent that requires a call first."""
    agent = create_agent(
        _model(server),
        tools=[StructuredTool.from_function(station.get_weather)],
        middleware=[wrap_model_call(_require_first_call)],
    )
    num_streamed, state = 0, {}
    inputs = {"messages": [{"role": "user", "content": QUESTION}]}
    async for mode, event in agent.astream(inputs, stream_mode=["messages", "values"]):
        if mode == "messages":
            num_streamed += 1
        else:
            state = event
    messages = state["messages"]
    return Outcome(
        messages[-1].content,
        num_streamed,
        [call["id"] for message in messages for call in getattr(message, "tool_calls", ())],
        [message.tool_call_id for message in messages if message.type == "tool"],
    )


async def answer_typed(server: Server) -> Forecast:
    """Get the answer from an agent with a response format, and from the model itself."""
    agent = create_agent(_model(server), response_format=ProviderStrategy(Forecast))
    state = await agent.ainvoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert isinstance(state["structured_response"], Forecast)
    by_call = _model(server).with_structured_output(Forecast, method="function_calling")
    assert isinstance(await by_call.ainvoke(QUESTION), Forecast)
    forecast: Forecast = await _model(server).with_structured_output(Forecast).ainvoke(QUESTION)
    return forecast
