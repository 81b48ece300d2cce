"""Run of a golden set: answers, grades, and the paired comparison with a baseline, until the evidence suffices."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from argosy.policy.quality import (
    JudgeCalibration,
    PairedComparison,
    QualityComparison,
    QualityVerdict,
    calibrate_judge,
)
from argosy.quality.assertions import Answer, Grade, grade_answer, make_grade, mean_score
from argosy.quality.golden_set import Assertion, GoldenItem, GoldenSet
from argosy.quality.judge import (
    build_comparison,
    build_grading,
    read_score,
    read_verdicts,
)
from argosy.quality.model_client import ModelClient, QualityRunError

T = TypeVar("T")
DEFAULT_MARGIN = 0.05
_DIGITS = 6


class GradedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of one model to one item, with its grades."""

    answer: Answer
    grades: list[Grade]
    score: float

    @property
    def has_passed(self) -> bool:
        """Whether each assertion that has a weight passes."""
        return all(each.has_passed for each in self.grades if each.weight)


class ItemResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one item."""

    item: str
    cluster: str
    candidate: GradedAnswer
    baseline: GradedAnswer | None = None

    @property
    def difference(self) -> float:
        """Score of the candidate minus that of the baseline; 0 without a baseline."""
        return 0.0 if self.baseline is None else self.candidate.score - self.baseline.score


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run without its answers."""

    set_digest: str
    model: str
    against: str
    """Model of the baseline. Empty for none."""
    items: int
    """Items that were answered. An early verdict leaves others out."""
    total_items: int
    score: float
    """Mean score of the candidate."""
    passed: int
    """Items whose assertions all pass."""
    cached: int
    """Answers of the candidate that an earlier run had got."""
    fingerprints: list[str]
    """Weights and arithmetic that answered as the candidate."""
    comparison: QualityComparison | None
    judge: str
    judge_warning: str
    """Why grades of the judge should not decide. Empty if there is no judge, or no objection."""
    calibration: JudgeCalibration | None
    discordant: list[tuple[str, float, float]]
    """Items whose scores differ: id, score of the candidate, score of the baseline."""


class RunResult(NamedTuple):
    """Result of a run."""

    summary: RunSummary
    items: list[ItemResult]


class GoldenSetRun:
    """Run of one set. The order of the items depends on the set alone.

    Args:
        golden_set: Set to run.
        candidate: Model that is graded.
        baseline: Model that it is compared with, or None.
        judge: Model that grades by rubrics. None if the set has none.
        margin: Loss that counts as none.
        concurrency: Items at a time.
        stops_early: Whether a verdict ends the run.
        on_progress: Called with the number of items that are done.

    Raises:
        ValueError: The set needs a judge.
    """

    def __init__(
        self,
        golden_set: GoldenSet,
        candidate: ModelClient,
        baseline: ModelClient | None = None,
        judge: ModelClient | None = None,
        *,
        margin: float = DEFAULT_MARGIN,
        concurrency: int = 8,
        stops_early: bool = True,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        if golden_set.has_rubrics and judge is None:
            raise ValueError(
                "the set has rubrics (llm-rubric); name a judge, such as --judge MODEL"
            )
        self._set = golden_set
        self._candidate = candidate
        self._baseline = baseline
        self._judge = judge if golden_set.has_rubrics else None
        self._margin = margin
        self._concurrency = concurrency
        self._stops_early = stops_early
        self._on_progress = on_progress

    async def run(self) -> RunResult:
        """Send the requests and grade the answers.

        Raises:
            QualityRunError: A model does not answer, or a judge gives no grade.
        """
        comparison = None if self._baseline is None else PairedComparison(self._margin)
        results: list[ItemResult] = []
        clusters = order_clusters(self._set)
        for cluster_batch in _batch(clusters, self._concurrency):
            batch = [item for cluster in cluster_batch for item in cluster]
            graded: list[ItemResult] = []
            for part in _split(batch, self._concurrency):
                graded += await asyncio.gather(*map(self._run_item, part))
            results += graded
            self._on_progress(len(results))
            if comparison is None:
                continue
            by_cluster = iter(graded)
            for cluster in cluster_batch:
                comparison.add([next(by_cluster).difference for _ in cluster])
            if self._stops_early and comparison.verdict is not QualityVerdict.UNDECIDED:
                break
        if comparison is not None and len(results) == len(self._set.items):
            comparison.finish()
        return RunResult(await self._summarize(results, comparison), results)

    async def _answer(self, item: GoldenItem) -> tuple[Answer, Answer | None]:
        body = {**self._set.parameters, **item.parameters, "messages": item.messages}
        if self._baseline is None:
            return await self._candidate.answer(body), None
        candidate, baseline = await asyncio.gather(
            self._candidate.answer(body), self._baseline.answer(body)
        )
        return candidate, baseline

    async def _run_item(self, item: GoldenItem) -> ItemResult:
        answer, other = await self._answer(item)
        grades: list[Grade] = []
        other_grades: list[Grade] = []
        for assertion in item.assertions:
            if assertion.type != "llm-rubric":
                grades.append(grade_answer(assertion, answer))
                if other is not None:
                    other_grades.append(grade_answer(assertion, other))
            elif other is None:
                grades.append(await self._judge_one(assertion, item, answer))
            else:
                score, reason = await self._compare(assertion, item, answer, other)
                grades.append(make_grade(assertion, score, reason))
                other_grades.append(make_grade(assertion, 1.0 - score, reason))
        return ItemResult(
            item=item.id,
            cluster=item.cluster,
            candidate=_summarize_answer(answer, grades),
            baseline=None if other is None else _summarize_answer(other, other_grades),
        )

    async def _judge_one(self, assertion: Assertion, item: GoldenItem, answer: Answer) -> Grade:
        if answer.error:
            return make_grade(assertion, 0.0, answer.error)
        body = build_grading(assertion.value, _last_text(item), answer.text)
        score, reason = read_score(await self._ask_judge(body))
        return make_grade(assertion, 1.0 - score if assertion.is_negated else score, reason)

    async def _compare(
        self, assertion: Assertion, item: GoldenItem, answer: Answer, other: Answer
    ) -> tuple[float, str]:
        """Return the score of the first answer, by both orders. Equal answers are not sent."""
        if answer.error or other.error:
            score = 0.5 if answer.error and other.error else float(bool(other.error))
            return score, answer.error or other.error
        if answer.text == other.text:
            return 0.5, "the answers are equal"
        rubric, question = assertion.value, _last_text(item)
        forward, backward = await asyncio.gather(
            self._ask_judge(build_comparison(rubric, question, answer.text, other.text)),
            self._ask_judge(build_comparison(rubric, question, other.text, answer.text)),
        )
        score, reason = read_verdicts(forward, backward)
        return 1.0 - score if assertion.is_negated else score, reason

    async def _ask_judge(self, body: dict[str, object]) -> str:
        judge = self._judge
        if judge is None:  # checked when the run was created
            raise RuntimeError("a set with rubrics runs without a judge")
        answer = await judge.answer(body)
        if answer.error:
            raise QualityRunError(f"the judge {judge.model!r} refuses to grade: {answer.error}")
        return answer.text

    async def _summarize(
        self, results: list[ItemResult], comparison: PairedComparison | None
    ) -> RunSummary:
        scores = [each.candidate.score for each in results]
        calibration = await self._calibrate(results) if self._judge is not None else None
        return RunSummary(
            set_digest=self._set.digest,
            model=self._candidate.model,
            against="" if self._baseline is None else self._baseline.model,
            items=len(results),
            total_items=len(self._set.items),
            score=round(sum(scores) / len(scores), _DIGITS),
            passed=sum(each.candidate.has_passed for each in results),
            cached=sum(each.candidate.answer.is_cached for each in results),
            fingerprints=sorted(self._candidate.fingerprints),
            comparison=None if comparison is None else comparison.summarize(),
            judge="" if self._judge is None else self._judge.model,
            judge_warning=self._find_judge_warning(calibration),
            calibration=calibration,
            discordant=[
                (each.item, each.candidate.score, each.baseline.score)
                for each in results
                if each.baseline is not None and each.difference
            ],
        )

    async def _calibrate(self, results: list[ItemResult]) -> JudgeCalibration | None:
        """Let the judge grade the labelled answers, and correct the mean of its scores."""
        labels = self._set.labels
        if not labels:
            return None
        labelled: list[tuple[float, float]] = []
        for part in _split(labels, self._concurrency):
            texts = await asyncio.gather(
                *(
                    self._ask_judge(build_grading(each.rubric, each.input, each.output))
                    for each in part
                )
            )
            labelled += [
                (read_score(text)[0], each.score) for text, each in zip(texts, part, strict=True)
            ]
        scores = [
            grade.score
            for each in results
            for grade in each.candidate.grades
            if grade.assertion.endswith("llm-rubric")
        ]
        return calibrate_judge(labelled, scores)

    def _find_judge_warning(self, calibration: JudgeCalibration | None) -> str:
        if self._judge is None:
            return ""
        if self._judge.model == self._candidate.model or (
            self._judge.fingerprints & self._candidate.fingerprints
        ):
            return "the judge is the model that it grades"
        if len(self._judge.fingerprints) > 1:
            return "the weights or the arithmetic of the judge changed during the run"
        if calibration is None or not calibration.is_calibrated:
            labels = 0 if calibration is None else calibration.labels
            return f"the judge is uncalibrated ({labels} labels of people)"
        return ""


def order_clusters(golden_set: GoldenSet) -> list[list[GoldenItem]]:
    """Return the items by cluster, in an order that looks random and is the same for each run of the set."""
    clusters: dict[tuple[bool, str], list[GoldenItem]] = {}
    for item in golden_set.items:
        clusters.setdefault((bool(item.cluster), item.cluster or item.id), []).append(item)
    digest = golden_set.digest
    ordered = sorted(clusters, key=lambda key: hashlib.sha256(f"{digest}\0{key}".encode()).digest())
    return [clusters[key] for key in ordered]


def _batch(clusters: list[list[GoldenItem]], size: int) -> list[list[list[GoldenItem]]]:
    """Return the clusters in groups of at least `size` items, except for the last one."""
    groups: list[list[list[GoldenItem]]] = [[]]
    for cluster in clusters:
        if sum(map(len, groups[-1])) >= size:
            groups.append([])
        groups[-1].append(cluster)
    return groups


def _split(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def _summarize_answer(answer: Answer, grades: list[Grade]) -> GradedAnswer:
    return GradedAnswer(answer=answer, grades=grades, score=round(mean_score(grades), _DIGITS))


def _last_text(item: GoldenItem) -> str:
    content = item.messages[-1].get("content")
    return content if isinstance(content, str) else msgspec.json.encode(content).decode()
