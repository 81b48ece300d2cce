"""Lines of logs: selection, text for people, and what a log has gained, whatever processes write."""

from __future__ import annotations

import json
import re

import pytest
import structlog
from hypothesis import example, given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.support.fake_clock import FakeClock

from argosy.telemetry import (
    LogFormatter,
    LogSelection,
    RepeatedWarning,
    find_new_lines,
    parse_log,
)

EVENT = {"event": "request", "timestamp": "2026-11-28T10:00:00.250000Z", "logger": "argosy"}
LOG = (
    "loading",
    json.dumps(EVENT | {"level": "info", "request_id": "req-1", "ms": 1.5}),
    "2026-11-28T10:00:10.000000Z [warning  ] attempt_failed                 [argosy] ms=2",
    "INFO 11-28 10:00:11 started",
    json.dumps(
        EVENT | {"level": "error", "timestamp": "2026-11-28T10:01:00Z", "exception": "a\nb"}
    ),
    "Fatal Python error: Segmentation fault",
)
TEN = 1795860000.0
"""2026-11-28T10:00:00Z"""


@pytest.mark.parametrize(
    ("selection", "numbers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"since": TEN}, [1, 2, 3, 4, 5]),
        ({"since": TEN + 5}, [2, 3, 4, 5]),
        ({"since": TEN + 61}, []),
        ({"level": "warning"}, [0, 2, 4, 5]),
        ({"level": "error"}, [0, 4, 5]),
        ({"request": "req-1"}, [1]),
    ],
)
def test_lines_are_selected_in_every_format(
    selection: dict[str, object], numbers: list[int]
) -> None:
    wanted = LogSelection(**selection)  # type: ignore[arg-type] # those of a table
    selected = [line.text for line in parse_log(LOG) if wanted.matches(line)]
    assert selected == [LOG[number] for number in numbers]


def test_events_are_formatted_for_people() -> None:
    texts = [LogFormatter().format(line) for line in parse_log(LOG)]
    assert " ".join(texts[1].split()) == (
        "2026-11-28 10:00:00.250 [info ] request ms=1.5 request_id=req-1"
    )
    assert texts[4].splitlines()[1:] == ["a", "b"]
    (undecodable,) = parse_log([json.dumps(EVENT | {"folder": "/caf\udce9"})])
    assert "folder=/caf\\udce9" in LogFormatter().format(undecodable)
    assert [texts[number] for number in (0, 2, 3, 5)] == [LOG[number] for number in (0, 2, 3, 5)]


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(), lambda each: st.lists(each, max_size=2)
)
names = st.text() | st.sampled_from(
    ["event", "timestamp", "level", "exception", "exc_info", "stack", "logger"]
)
lines = st.text() | st.dictionaries(names, values).map(json.dumps)


@example(f'{{"event": "a", "b": {"[" * 900}{"]" * 900}}}')
@example(f'{{"event": "a", "b": {"[" * 100_000}{"]" * 100_000}}}')
@given(lines.map(lambda line: line.replace("\n", " ")))
def test_no_line_fails_or_controls_a_terminal(line: str) -> None:
    (parsed,) = parse_log([line])
    assert LogSelection().matches(parsed)
    text = LogFormatter().format(parsed)
    assert all(each.isprintable() or each in "\n\t" for each in text)
    is_traceback = parsed.is_event and re.search("exception|stack", line)
    assert "\n" not in text or is_traceback


@given(
    st.lists(st.sampled_from("abc") | st.text("abcdef", min_size=4, max_size=8), max_size=40),
    st.lists(st.integers(0, 5), max_size=10),
    st.integers(6, 12),
)
def test_reads_of_the_end_give_each_line_once(
    log: list[str], growths: list[int], window: int
) -> None:
    unique = [f"{number} {line}" for number, line in enumerate(log)]
    for lines_of_log, size in ((unique, window), (log, len(log))):  # equal lines, if all are read
        end, seen, printed = 0, list[str](), list[str]()
        for growth in growths:
            end = min(end + growth, len(log))
            read = lines_of_log[max(0, end - size) : end]
            gained, is_missing = find_new_lines(seen, read)
            assert not is_missing
            printed, seen = [*printed, *gained], read
        assert printed == lines_of_log[:end]


def test_lost_and_unfinished_lines_are_noticed() -> None:
    assert find_new_lines(["a", "b"], ["d", "e"]) == (["d", "e"], True)
    assert find_new_lines(["a", "b"], ["b", "c"]) == (["c"], False)
    assert find_new_lines(["a", "b"], ["a", "beta", "c"]) == (["beta", "c"], False)
    assert find_new_lines(["b", "c"], ["a", "b", "c", "d"]) == (["d"], False)
    assert find_new_lines(["a", "b"], []) == ([], False)


def test_problem_that_repeats_is_logged_once_a_minute_with_a_count() -> None:
    clock = FakeClock(0.0)
    problem = RepeatedWarning(structlog.get_logger(), clock)
    with capture_logs() as logs:
        for _ in range(13):
            problem.report("store_failed", "gone")
            clock.now += 10.0
    assert [(each["event"], each["left_out"]) for each in logs] == [
        ("store_failed", 0),
        ("store_failed", 5),
        ("store_failed", 5),
    ]
