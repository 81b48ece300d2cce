"""Runs the task with one framework and prints the report as the last line, as JSON.

The module of a framework has a function that streams a tool loop, and one that asks for an answer of type `Forecast`.

Usage: python -m tests.support.agents.runner FRAMEWORK BASE_URL MODEL
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from types import ModuleType

import msgspec

from tests.support.agents.task import Report, Server, WeatherStation


async def _run(framework: ModuleType, server: Server) -> Report:
    station = WeatherStation()
    outcome = await framework.run_tool_loop(server, station)
    forecast = await framework.answer_typed(server)
    return Report(station.calls, outcome, forecast.model_dump())


if __name__ == "__main__":
    name, base_url, model = sys.argv[1:]
    module = importlib.import_module(f"tests.support.agents.{name}")
    report = asyncio.run(_run(module, Server(base_url, model)))
    sys.stdout.write(f"\n{msgspec.json.encode(report).decode()}\n")
