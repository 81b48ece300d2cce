"""Reports of a run: JSON lines, JUnit XML, and sentences for people."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree as ET

import msgspec

from argosy.policy.quality import QualityComparison, QualityVerdict
from argosy.quality.golden_set_run import RunResult, RunSummary

_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_POINTS = 100.0
MAX_DISCORDANT = 200
"""Items whose scores differ that the store keeps for a run."""


def format_jsonl(result: RunResult) -> bytes:
    """Return a line for each item, and the summary as the last line."""
    records = [*result.items, {"summary": result.summary}]
    return b"".join(msgspec.json.encode(each) + b"\n" for each in records)


def format_junit(result: RunResult, name: str) -> bytes:
    """Return JUnit XML with a test case for each item, and one for the comparison if there is a baseline."""
    summary, comparison = result.summary, result.summary.comparison
    suite = ET.Element("testsuite", name=_clean(name))
    for each in result.items:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=_clean(name),
            name=_clean(each.item),
            time=f"{each.candidate.answer.latency_ms / 1000.0:.3f}",
        )
        failed = [g for g in each.candidate.grades if g.weight and not g.has_passed]
        if failed:
            _add_failure(
                case, f"{failed[0].assertion}: {failed[0].reason}", each.candidate.answer.text
            )
    if comparison is not None:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=_clean(name),
            name=f"compared with {_clean(summary.against)}",
        )
        if comparison.verdict is not QualityVerdict.NOT_WORSE:
            _add_failure(case, describe_comparison(comparison), "")
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    suite.set("failures", str(sum(case.find("failure") is not None for case in cases)))
    return bytes(ET.tostring(suite, encoding="utf-8", xml_declaration=True))


def describe_run(summary: RunSummary) -> Iterable[str]:
    """Yield what a run found, one sentence each."""
    cached = f", {summary.cached} by the cache" if summary.cached else ""
    yield (
        f"{summary.model}: mean score {summary.score:.3f}, {summary.passed} of {summary.items} items pass"
        f" ({summary.items} of {summary.total_items} answered{cached})."
    )
    if summary.comparison is not None:
        yield f"Against {summary.against}: {describe_comparison(summary.comparison)}"
    if (calibration := summary.calibration) is not None:
        kappa = "not defined" if calibration.kappa is None else f"{calibration.kappa:.2f}"
        yield (
            f"Judge {summary.judge}: kappa {kappa} on {calibration.labels} labels; mean of its scores, as corrected by"
            f" them, {calibration.corrected_mean:.3f} [{calibration.lower:.3f}, {calibration.upper:.3f}]."
        )
    if summary.judge_warning:
        yield f"Warning: {summary.judge_warning}; do not decide by its grades alone."


def describe_stored_run(summary: RunSummary) -> dict[str, Any]:
    """Return the fields with which the store keeps a run."""
    kept = msgspec.structs.replace(summary, discordant=summary.discordant[:MAX_DISCORDANT])
    return {
        "model": summary.model,
        "against": summary.against,
        "verdict": "" if summary.comparison is None else summary.comparison.verdict,
        "score": summary.score,
        "result": msgspec.json.encode(kept).decode(),
    }


def describe_comparison(comparison: QualityComparison) -> str:
    """Return the verdict and its figures in words."""
    margin = _POINTS * comparison.margin
    verdict = {
        QualityVerdict.WORSE: "worse",
        QualityVerdict.NOT_WORSE: f"not worse by {margin:g} points or more",
        QualityVerdict.UNDECIDED: "undecided",
    }[comparison.verdict]
    detectable = comparison.detectable_loss
    smallest = (
        "It could have found no loss."
        if detectable is None
        else f"It could have found a loss of {_POINTS * detectable:.1f} points or more."
    )
    return (
        f"{verdict}. Difference {_POINTS * comparison.difference:+.1f} points, 95 % interval"
        f" [{_POINTS * comparison.lower:+.1f}, {_POINTS * comparison.upper:+.1f}]; of {comparison.clusters} independent"
        f" items {comparison.wins} better and {comparison.losses} worse. {smallest}"
    )


def _add_failure(case: ET.Element, message: str, text: str) -> None:
    ET.SubElement(case, "failure", message=_clean(message)).text = _clean(text)


def _clean(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
