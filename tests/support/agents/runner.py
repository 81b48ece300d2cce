"""Runs the task with one framework and prints the report as the last line, as JSON.

Usage: python -m tests.support.agents.runner FRAMEWORK BASE_URL MODEL
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from typing import cast

import msgspec

from tests.support.agents.task import Framework, Report, Server, WeatherStation


async def _run(framework: Framework, server: Server) -> Report:
    station = WeatherStation()
    outcome = await framework.run_tool_loop(server, station)
    forecast = await framework.answer_typed(server)
    return Report(station.calls, outcome, forecast.model_dump())


if __name__ == "__main__":
    name, base_url, model = sys.argv[1:]
    module = cast("Framework", importlib.import_module(f"tests.support.agents.{name}"))
    report = asyncio.run(_run(module, Server(base_url, model)))
    sys.stdout.write(f"\n{msgspec.json.encode(report).decode()}\n")
