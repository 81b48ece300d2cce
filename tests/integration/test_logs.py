"""Logs of a process: one JSON object or line per event, with the request's id, also from libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, logging, structlog
from argosy.telemetry import configure_logging, bind_request
configure_logging("json")
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


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program and return its output."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )


def test_json_lines_have_request_and_trace_ids() -> None:
    process = run_program(PROGRAM)
    served, library, failed, after = map(json.loads, process.stderr.splitlines())
    assert served["event"] == "served"
    assert (served["level"], failed["level"], after["level"]) == ("info", "error", "info")
    assert served["route"] == "/x"
    assert served["request_id"] == library["request_id"] == failed["request_id"] == "req_1"
    assert served["trace_id"] == "a" * 32
    assert library["event"] == "look here"
    assert "ValueError: broken" in failed["exception"]
    assert "request_id" not in after
    assert not process.stdout


def test_console_lines_have_request_id_and_traceback() -> None:
    process = run_program(PROGRAM.replace('"json"', '"console"'))
    served, library, failed, *traceback, after = process.stderr.splitlines()
    assert all(part in served for part in ("served", "argosy.test", "route=/x", "request_id=req_1"))
    assert all(part in library for part in ("look here", "library", "request_id=req_1"))
    assert "failed" in failed
    assert "ValueError: broken" in traceback[-1]
    assert "after" in after
    assert not process.stdout


CONTROL_CHARACTERS = """
import structlog
from argosy.telemetry import configure_logging
configure_logging("console")
log = structlog.get_logger("argosy.test")
for path in ("/a\\x1b[2J\\0\\u202e", "/b\\n2026 [error] all is lost\\r"):
    log.warning("request", path=path, text="grün")
"""


def test_control_characters_are_escaped_in_console_lines() -> None:
    process = subprocess.run(
        [sys.executable, "-c", CONTROL_CHARACTERS], capture_output=True, check=True
    )
    lines = process.stderr.decode().splitlines()
    assert [path in line for path, line in zip(("/a", "/b"), lines, strict=True)] == [True, True]
    assert all(line.isprintable() and line.endswith("text=grün") for line in lines)


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


UNDECODABLE_PATH = """
import logging, structlog
from argosy.telemetry import configure_logging
configure_logging("json")
structlog.get_logger("argosy.test").error("full", folder="/srv/caf\\udce9", rows=2)
logging.getLogger("library").warning("in %s", "/srv/caf\\udce9")
"""


def test_undecodable_paths_are_logged() -> None:
    process = run_program(UNDECODABLE_PATH)
    own, library = map(json.loads, process.stderr.splitlines())
    assert (own["event"], own["folder"], own["rows"]) == ("full", "/srv/caf\udce9", 2)
    assert library["event"] == "in /srv/caf\udce9"


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
