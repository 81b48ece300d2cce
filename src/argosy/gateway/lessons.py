"""Lessons of the console as data: what a reader sets, and what a run of the simulation shows.

A package above the gateway declares them, since they run the digital twin. The gateway lists them, checks the values of
a run, and starts a process for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class LessonControl(msgspec.Struct, frozen=True, kw_only=True):
    """Integer that a reader sets: with a slider, or as one of several choices."""

    name: str
    label: str
    unit: str = ""
    value: int
    """Value at the start."""
    minimum: int
    maximum: int
    step: int = 1
    choices: tuple[str, ...] = ()
    """Names of the values from `minimum` on. Empty for a slider."""


class Lesson(msgspec.Struct, frozen=True, kw_only=True):
    """Simulation that shows how a part of the product decides."""

    id: str
    title: str
    question: str
    look: str
    """Sentence that names what to look at."""
    setting: str
    """Settings of the product that the controls are."""
    page: str
    """Page of the documentation."""
    controls: tuple[LessonControl, ...]

    def complete_values(self, values: Mapping[str, int]) -> dict[str, int]:
        """Return the values of all controls. Raises ValueError if one is unknown or out of its bounds."""
        controls = {control.name: control for control in self.controls}
        for name, value in values.items():
            control = controls.get(name)
            if control is None:
                raise ValueError(f"The lesson {self.id} has no control '{name[:100]}'.")
            is_within = control.minimum <= value <= control.maximum
            if not is_within or (value - control.minimum) % control.step:
                raise ValueError(
                    f"Invalid value for '{name}': it is {value}, and not from {control.minimum} to {control.maximum} "
                    f"in steps of {control.step}."
                )
        return {name: values.get(name, control.value) for name, control in controls.items()}


class LessonLine(msgspec.Struct, frozen=True):
    """Line of a plot."""

    label: str
    values: tuple[float | None, ...]


class LessonPlot(msgspec.Struct, frozen=True, kw_only=True):
    """Plot of the variants."""

    title: str
    unit: str
    x: tuple[float, ...]
    x_label: str
    """Quantity of `x`; empty for seconds since the start."""
    lines: tuple[LessonLine, ...]


class LessonFigure(msgspec.Struct, frozen=True):
    """Figure with a value for each variant."""

    label: str
    unit: str
    values: tuple[float | None, ...]


class LessonGoal(msgspec.Struct, frozen=True):
    """Goal of a challenge."""

    text: str
    is_met: bool


class LessonRun(msgspec.Struct, frozen=True, kw_only=True):
    """A lesson that was run with some values."""

    lesson: str
    values: dict[str, int]
    variants: tuple[str, ...]
    plots: tuple[LessonPlot, ...]
    figures: tuple[LessonFigure, ...]
    goals: tuple[LessonGoal, ...] = ()
    finding: str
    """The comparison in one sentence."""
    identity: str
    """Seed and hashes by which the run repeats."""
