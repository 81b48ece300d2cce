"""Lesson on speculation: the engine's policy for drafts, no drafts, and a fixed number, over sizes of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from argosy.engine.scheduling import DraftCandidate, DraftLengthPolicy, DraftSource
from argosy.gateway import LessonFigure, LessonLine, LessonPlot, LessonRun
from argosy.lessons.measurement import SEED, Values, describe_finding
from argosy.lessons.traffic import COST
from argosy.twin import LinearStepCost, derive_stream

BATCHES = (1, 2, 4, 8, 16, 32, 64)
STEPS = 200
PROMPT_TOKENS = 500
SOURCE = DraftSource("prompt_lookup", 8)
MAX_DRAFTS = 12
Choose = Callable[[int], Sequence[int]]
"""Returns the drafts of each sequence of a batch."""


def run_speculation(values: Values) -> LessonRun:
    """Run batches of each size with all three ways."""
    cost = (LinearStepCost(), COST)[values["hardware"]]
    acceptance, fixed = values["acceptance"] / 100, values["drafts"]
    labels = ("no drafts", f"always {fixed}", "the policy")
    rates: list[list[float]] = [[], [], []]
    for batch in BATCHES:
        none = _measure(cost, batch, acceptance, lambda size: [0] * size)
        rates[0].append(none)
        rates[1].append(_measure(cost, batch, acceptance, lambda size: [fixed] * size))
        rates[2].append(_measure_policy(cost, batch, acceptance))
    relative = [
        tuple(round(rate / none, 3) for rate, none in zip(line, rates[0], strict=True))
        for line in rates
    ]
    plot = LessonPlot(
        title="Tokens per second, relative to no drafts",
        unit="times",
        x=BATCHES,
        x_label="sequences in the batch",
        lines=tuple(LessonLine(*each) for each in zip(labels, relative, strict=True)),
    )
    figures = tuple(
        LessonFigure(
            f"Speed with {batch} in the batch", "times", tuple(line[at] for line in relative)
        )
        for at, batch in enumerate(BATCHES)
    )
    return LessonRun(
        lesson="speculation",
        values=dict(values),
        variants=labels,
        plots=(plot,),
        figures=figures,
        finding=describe_finding(figures[-1], labels),
        identity=f"seed {SEED}, {STEPS} steps of each batch",
    )


def _measure_policy(cost: LinearStepCost, batch: int, acceptance: float) -> float:
    """Return the tokens per second if the policy chooses, and learns from each step."""
    ridge_tokens = max(2, round(cost.step_s / cost.token_s))
    policy = DraftLengthPolicy(ridge_tokens)
    histories = [policy.create_history(b"") for _ in range(batch)]
    candidates = [DraftCandidate(each, SOURCE, MAX_DRAFTS) for each in histories]

    def record(lengths: Sequence[int], accepted: Sequence[int], seconds: float) -> None:
        for history, drafted, right in zip(histories, lengths, accepted, strict=True):
            if drafted:
                policy.record_drafts(history, SOURCE, drafted, right)
        policy.record_step(batch, sum(lengths), seconds)

    def choose(size: int) -> Sequence[int]:
        return policy.select_lengths(candidates, size)

    return _measure(cost, batch, acceptance, choose, record)


def _measure(
    cost: LinearStepCost,
    batch: int,
    acceptance: float,
    choose: Choose,
    record: Callable[[Sequence[int], Sequence[int], float], None] = lambda *_: None,
) -> float:
    """Return the tokens per second of a batch whose drafts are right with this chance, each given those before it."""
    stream, seconds, tokens = derive_stream(SEED, f"drafts-{batch}"), 0.0, 0
    context = batch * PROMPT_TOKENS
    for _ in range(STEPS):
        lengths = choose(batch)
        accepted = [_draw_accepted(stream.random, drafted, acceptance) for drafted in lengths]
        step_s = cost.step_seconds(batch + sum(lengths), context)
        record(lengths, accepted, step_s)
        seconds += step_s
        tokens += batch + sum(accepted)
    return tokens / seconds


def _draw_accepted(draw: Callable[[], float], drafted: int, acceptance: float) -> int:
    for index in range(drafted):
        if draw() >= acceptance:
            return index
    return drafted
