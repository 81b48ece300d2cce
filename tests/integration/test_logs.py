"""Logs of a process: one JSON object or line per event, with the request's id, also from libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, logging, structlog, sys
from argosy.telemetry import configure_logging, bind_request
configure_logging(sys.argv[1])
log = structlog.get_logger("argosy.test")
async def answer():
    bind_request("req_1", "00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    log.info("served", route="/x")
    logging.getLogger("library").warning("look %s", "here")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
asyncio.run(answer())
log.debug("hidden")
log.info("after")
"""
ODD_TEXTS = """
for path in ("/a\\x1b[2J\\0\\u202e", "/b\\n2026 [error] all is lost\\r"):
    log.warning("request", path=path, text="grün")
"""
UNDECODABLE_PATHS = """
log.error("full", folder="/srv/caf\\udce9", rows=2)
logging.getLogger("library").warning("in %s", "/srv/caf\\udce9")
"""


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program and return its output."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )


def test_json_lines_have_request_and_trace_ids_and_any_path() -> None:
    process = run_program(PROGRAM + UNDECODABLE_PATHS, "json")
    served, library, failed, after, full, path = map(json.loads, process.stderr.splitlines())
    assert served["event"] == "served"
    assert (served["level"], failed["level"], after["level"]) == ("info", "error", "info")
    assert served["route"] == "/x"
    assert served["request_id"] == library["request_id"] == failed["request_id"] == "req_1"
    assert served["trace_id"] == "a" * 32
    assert library["event"] == "look here"
    assert "ValueError: broken" in failed["exception"]
    assert "request_id" not in after
    assert (full["event"], full["folder"], full["rows"]) == ("full", "/srv/caf\udce9", 2)
    assert path["event"] == "in /srv/caf\udce9"
    assert not process.stdout


def test_console_lines_have_request_id_and_traceback_and_no_control_characters() -> None:
    process = run_program(PROGRAM + ODD_TEXTS, "console")
    served, library, failed, *traceback, after, a, b = process.stderr.splitlines()
    assert all(part in served for part in ("served", "argosy.test", "route=/x", "request_id=req_1"))
    assert all(part in library for part in ("look here", "library", "request_id=req_1"))
    assert "failed" in failed
    assert "ValueError: broken" in traceback[-1]
    assert "after" in after
    for line, path in ((a, "/a"), (b, "/b")):
        assert path in line
        assert line.isprintable()
        assert line.endswith("text=grün")
    assert not process.stdout


PERSONAL_TEXTS = """
import logging, structlog, sys
from argosy.telemetry import configure_logging
configure_logging(sys.argv[1])
log = structlog.get_logger("argosy.test")
log.warning("first", reason="line\\n4111111111111111", more="tab\\t4111111111111111")
logging.getLogger("library").warning("second %s", "4111111111111111")
try:
    raise ValueError("third\\n4111111111111111")
except ValueError:
    log.exception("failed")
    logging.getLogger("library").exception("fourth")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_personal_data_is_removed_at_the_start_of_a_line_and_from_libraries(
    log_format: str,
) -> None:
    lines = run_program(PERSONAL_TEXTS, log_format).stderr
    assert "4111" not in lines
    assert lines.count("[card]") == 5
    assert all(each in lines for each in ("first", "second", "third", "fourth"))


CLOSED_STDERR = """
import os, sys, structlog
from argosy.telemetry import configure_logging
configure_logging(sys.argv[1])
log = structlog.get_logger("argosy.test")
log.info("before")
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 2)
log.warning("pipe without reader")
sys.stderr.close()
log.error("stderr is closed")
sys.stderr = None
log.exception("stderr is None")
print("continued")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_closed_stderr_does_not_stop_the_process(log_format: str) -> None:
    process = run_program(CLOSED_STDERR, log_format)
    assert process.stdout == "continued\n"
    assert "before" in process.stderr


BUFFERED_BY_LOOP = """
import asyncio, os, signal, structlog, sys
from argosy.telemetry import configure_logging
configure_logging("json")
log = structlog.get_logger("argosy.test")
async def main():
    log.info("first")
    log.info("second")
    await asyncio.to_thread(sys.stdin.read)
    log.info("third")
    log.warning("last")
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_loop_flushes_lines_soon_and_warnings_at_once() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", BUFFERED_BY_LOOP], stdin=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        events = [json.loads(process.stderr.readline())["event"] for _ in range(2)]
        process.stdin.close()
        events += [json.loads(line)["event"] for line in process.stderr]
    assert events == ["first", "second", "third", "last"]


LATENCY_OF_A_LINE = """
import asyncio, os, time, structlog, uvloop
from argosy.telemetry import configure_logging
reading, writing = os.pipe()
os.set_blocking(reading, False)
os.dup2(writing, 2)
configure_logging("json")
log = structlog.get_logger("argosy.test")
async def written():
    async with asyncio.timeout(60):
        while True:
            try:
                return os.read(reading, 1 << 16)
            except BlockingIOError:
                await asyncio.sleep(0)
async def main():
    for _ in range(20):
        while time.monotonic() % 0.001 < 0.0007:  # the loop's clock has whole milliseconds
            pass
        log.info("first")
        await written()
        log.info("the next, at once")
        await written()
uvloop.run(main())
"""


def test_line_is_written_within_the_flush_interval() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.run(
        [sys.executable, "-c", LATENCY_OF_A_LINE], env=environment, check=False
    )
    assert process.returncode == 0
