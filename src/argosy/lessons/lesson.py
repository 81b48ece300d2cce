"""Result of a lesson: the parameters with their bounds, the frames, and a sentence that sums them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

F = TypeVar("F")


class LessonParameter(msgspec.Struct, frozen=True, kw_only=True):
    """Parameter of a lesson, as a slider shows it."""

    name: str
    label: str
    unit: str
    value: int
    minimum: int
    maximum: int
    step: int


class LessonRun(msgspec.Struct, Generic[F], frozen=True, kw_only=True):
    """A lesson that was run: its parameters, and one frame for each moment."""

    object: Literal["lesson_run"] = "lesson_run"
    parameters: list[LessonParameter]
    frames: list[F]
    result: str
    """Summary of the frames in a few sentences."""


def slider(label: str, minimum: int, maximum: int, *, unit: str = "", step: int = 1) -> Meta:
    """Return the annotation of an integer that `describe_parameters` describes."""
    return Meta(
        ge=minimum,
        le=maximum,
        multiple_of=step,
        title=label,
        extra_json_schema={"x-unit": unit},
    )


def describe_parameters(parameters: msgspec.Struct) -> list[LessonParameter]:
    """Describe a struct of integers, each annotated with a `slider`."""
    _, components = msgspec.json.schema_components([type(parameters)])
    (schema,) = components.values()
    return [
        LessonParameter(
            name=name,
            label=field["title"],
            unit=field["x-unit"],
            value=getattr(parameters, name),
            minimum=field["minimum"],
            maximum=field["maximum"],
            step=field["multipleOf"],
        )
        for name, field in schema["properties"].items()
    ]


def join_words(words: Sequence[object]) -> str:
    """Join words as an English list: "1, 2 and 3"."""
    *head, last = map(str, words)
    return f"{', '.join(head)} and {last}" if head else last


def count_of(number: int, noun: str) -> str:
    """Return the number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def name_requests(numbers: Sequence[int]) -> str:
    """Return "Request 1" or "Requests 1 and 2"."""
    return f"Request{'s' if len(numbers) > 1 else ''} {join_words(numbers)}"
