"""Settings of quality: samples of answers, the model that grades them, and scheduled runs of golden sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from argosy.settings import ByOperator, SettingError

Name = Annotated[str, Meta(min_length=1, max_length=200)]


class SampleJudge(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model that grades sampled answers of projects whose consent is `judged`."""

    model: ByOperator[Name]
    """Name of the model."""
    rubric: ByOperator[Annotated[str, Meta(min_length=1, max_length=4000)]] = (
        "The answer is correct, complete, and follows the instructions of the question."
    )
    """Description of a good answer."""
    min_score: ByOperator[Annotated[float, Meta(gt=0, le=1)]] = 0.5
    """Smallest score that passes."""


class ScheduledRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Golden set of the store that is run again and again."""

    set: ByOperator[Annotated[str, Meta(min_length=1, max_length=200, examples=["support"])]]
    """`NAME` of a set of the whole gateway (its latest version), `NAME@NUMBER`, or the id of any version."""
    model: ByOperator[Name]
    """Model that is graded."""
    against: ByOperator[Name | None] = None
    """Model that it is compared with. None for none."""
    every_hours: ByOperator[Annotated[float, Meta(ge=1, le=8760)]] = 24.0
    """Hours between two runs."""


class QualityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Samples of answers, of projects that permit it, and scheduled runs of golden sets. Both need a store."""

    sample_ratio: ByOperator[Annotated[float, Meta(ge=0, le=1)]] = 0.05
    """Share of the requests of these projects whose answers are sampled."""
    max_samples_per_minute: ByOperator[Annotated[int, Meta(ge=0, le=600)]] = 10
    """Maximum samples of one gateway in a minute, of all projects together."""
    project: ByOperator[Annotated[str, Meta(min_length=1, max_length=200)] | None] = None
    """Id of the project that pays for judges and scheduled runs, and whose limits and budgets hold for them."""
    judge: ByOperator[SampleJudge | None] = None
    """Grades sampled answers. None grades all by fixed checks."""
    schedule: ByOperator[Annotated[tuple[ScheduledRun, ...], Meta(max_length=50)]] = ()
    """Golden sets that one of the gateways of a store runs."""


def find_quality_problems(config: QualityConfig, *, has_accounts: bool) -> Iterator[SettingError]:
    """Yield an error for each contradiction."""
    if config.judge is None and not config.schedule:
        return
    if not has_accounts:
        yield SettingError.at(("quality",), "samples and golden sets need a store. Add `store`.")
    if config.project is None:
        problem = "a project pays for judges and scheduled runs. Add `project` with its id."
        yield SettingError.at(("quality",), problem)
