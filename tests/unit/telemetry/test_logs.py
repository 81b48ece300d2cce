"""Logs as a process writes them: one JSON object a line, with the request's id, the libraries' too."""

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


def test_json_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    served, library, failed, after = map(json.loads, done.stderr.splitlines())
    assert served["event"] == "served"
    assert (served["level"], failed["level"], after["level"]) == ("info", "error", "info")
    assert served["route"] == "/x"
    assert served["request_id"] == library["request_id"] == failed["request_id"] == "req_1"
    assert served["trace_id"] == "a" * 32
    assert library["event"] == "look here"
    assert "ValueError: broken" in failed["exception"]
    assert "request_id" not in after
    assert not done.stdout


def test_lines_for_people() -> None:
    program = PROGRAM.replace('"json"', '"console"')
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    served, library, failed, *traceback, after = done.stderr.splitlines()
    assert all(part in served for part in ("served", "argosy.test", "route=/x", "request_id=req_1"))
    assert all(part in library for part in ("look here", "library", "request_id=req_1"))
    assert "failed" in failed
    assert "ValueError: broken" in traceback[-1]
    assert "after" in after
    assert not done.stdout


HOSTILE = """
import structlog
from argosy.telemetry import configure_logging
configure_logging("console")
log = structlog.get_logger("argosy.test")
for path in ("/a\\x1b[2J\\0\\u202e", "/b\\n2026 [error] all is lost\\r"):
    log.warning("asked", path=path, text="grün")
"""


def test_what_clients_sent_neither_steers_a_terminal_nor_looks_like_a_line() -> None:
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, check=True)
    lines = done.stderr.decode().splitlines()
    assert [path in line for path, line in zip(("/a", "/b"), lines, strict=True)] == [True, True]
    assert all(line.isprintable() and line.endswith("text=grün") for line in lines)


NOBODY_READS = """
import os, sys, structlog
from argosy.telemetry import configure_logging
configure_logging(sys.argv[1])
log = structlog.get_logger("argosy.test")
log.info("before")
reading, writing = os.pipe()
os.close(reading)
os.dup2(writing, 2)
log.warning("nobody reads")
sys.stderr.close()
log.error("nor can it be written")
sys.stderr = None
log.exception("not even tried")
print("went on")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_what_cannot_be_logged_is_lost_and_nothing_else(log_format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOBODY_READS, log_format], capture_output=True, text=True, check=True
    )
    assert done.stdout == "went on\n"
    assert "before" in done.stderr


UNICODE_HAS_NOT = """
import logging, structlog
from argosy.telemetry import configure_logging
configure_logging("json")
structlog.get_logger("argosy.test").error("full", folder="/srv/caf\\udce9", rows=2)
logging.getLogger("library").warning("in %s", "/srv/caf\\udce9")
"""


def test_names_of_files_may_be_any_bytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNICODE_HAS_NOT], capture_output=True, text=True, check=True
    )
    ours, theirs = map(json.loads, done.stderr.splitlines())
    assert (ours["event"], ours["folder"], ours["rows"]) == ("full", "/srv/caf\udce9", 2)
    assert theirs["event"] == "in /srv/caf\udce9"


UNDER_A_LOOP = """
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


def test_lines_under_a_loop_come_soon_and_warnings_bring_all_before_them_at_once() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", UNDER_A_LOOP], stdin=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        told = [json.loads(process.stderr.readline())["event"] for _ in range(2)]
        process.stdin.close()
        told += [json.loads(line)["event"] for line in process.stderr]
    assert told == ["first", "second", "third", "last"]


ONE_AFTER_ANOTHER = """
import asyncio, os, time, structlog, uvloop
from argosy.telemetry import configure_logging
reading, writing = os.pipe()
os.set_blocking(reading, False)
os.dup2(writing, 2)
configure_logging("json")
log = structlog.get_logger("argosy.test")
async def written():
    async with asyncio.timeout(10):
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


def test_a_line_waits_for_others_only_so_long() -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", ONE_AFTER_ANOTHER], env=buffered, check=False)
    assert done.returncode == 0
