"""The task that every agent framework is given: a tool to call, and a type to answer in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "What is the weather in Rome?"
MAX_TOKENS = 256
SEED = 7

Unit = Literal["celsius", "fahrenheit"]


class Forecast(BaseModel):
    """Forecast for one city."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(max_length=24, description="Name of the city.")
    temperature: int = Field(ge=-90, le=60)
    sky: Literal["clear", "cloudy", "rain"]


@dataclass
class WeatherStation:
    """Tool that the model calls. It records the arguments of each call."""

    calls: list[tuple[str, Unit]] = field(default_factory=list)

    def get_weather(self, city: str, unit: Unit) -> str:
        """Get the weather of a city.

        Args:
            city: Name of the city.
            unit: Unit of the temperature.
        """
        self.calls.append((city, unit))
        return "21 degrees and clear"


@dataclass(frozen=True)
class Server:
    """Server under test."""

    base_url: str
    model: str

    @property
    def root_url(self) -> str:
        """Address without the path of the OpenAI API."""
        return self.base_url.removesuffix("/v1")


@dataclass(frozen=True)
class Outcome:
    """Result of a tool loop."""

    answer: str
    num_streamed: int
    """Pieces of output that the framework streamed."""
    call_ids: list[str]
    """Ids of the calls in the order of the model's messages."""
    result_ids: list[str]
    """Ids under which the framework sent the results back."""


@dataclass(frozen=True)
class Report:
    """Report of a framework that ran in a process of its own."""

    tool_calls: list[tuple[str, Unit]]
    """Arguments of each call of the tool."""
    outcome: Outcome
    forecast: dict[str, str | int]
    """The typed answer, which the framework has validated."""
