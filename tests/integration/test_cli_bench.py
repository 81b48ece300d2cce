"""`argosy bench` as a command: what it writes, and what it refuses in one sentence."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.support.replica_servers import MODEL, Served
from tests.support.scripted_server import Asked, rough_server
from typer.testing import CliRunner
from typer.testing import Result as Ran

from argosy.bench import load_result
from argosy.cli.app import app


def cli(*arguments: str) -> Ran:
    return CliRunner().invoke(app, ["bench", *arguments])


async def test_the_command_writes_what_compare_reads(served: Served, tmp_path: Path) -> None:
    a, b, page = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "a.html"
    common = ("--url", served.url, "--rate", "200", "--requests", "8", "--output-len", "4")
    more = ("--goodput", "ttft:5000", "--warmup", "1", "--save", str(a), "--html", str(page))
    ran = await asyncio.to_thread(cli, *common, *more, "--api-key", "secret-key")
    assert ran.exit_code == 0, ran.output
    assert "Successful requests:                     8" in ran.output
    assert "Request goodput" in ran.output
    assert load_result(a).runs[0].summary.completed == 8
    assert "secret-key" not in a.read_text()
    assert page.read_text().startswith("<!doctype html>")
    ran = await asyncio.to_thread(cli, *common, "--save", str(b))
    assert ran.exit_code == 0, ran.output
    for sides, runs in (((a, b), [1, 1]), ((f"{a},{b}", tmp_path / "?.json"), [2, 2])):
        compared = await asyncio.to_thread(cli, "compare", *map(str, sides), "--output", str(page))
        assert compared.exit_code == 0, compared.output
        assert "95 % interval" in compared.output
        ratios = json.loads(page.read_text())
        assert {each["measure"] for each in ratios} >= {"ttft p50 ms"}
        assert all(each["runs"] == runs for each in ratios)


async def test_the_command_writes_what_other_programs_read(served: Served, tmp_path: Path) -> None:
    table, metrics = tmp_path / "a.csv", tmp_path / "a.prom"
    metrics.write_text("of an earlier run")
    ran = await asyncio.to_thread(
        cli,
        *("--url", served.url, "--rate", "200", "--requests", "8", "--output-len", "4"),
        *("--csv", str(table), "--prometheus", str(metrics)),
    )
    assert ran.exit_code == 0, ran.output
    assert len(table.read_text().splitlines()) == 9
    assert 'argosy_bench_requests{load="rate 200"' in metrics.read_text()
    assert set(os.listdir(tmp_path)) == {"a.csv", "a.prom"}  # noqa: PTH208 - blocks no one


def test_self_check() -> None:
    ran = cli("--self-check")
    assert ran.exit_code == 0, ran.output
    for line in ("added TTFT", "ITL error", "schedule lag", "maximum requests", "maximum chunks"):
        assert line in ran.output


def test_a_self_check_ends_in_peace_at_ctrl_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "argosy.cli", "bench", "--self-check"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        checking = psutil.Process(process.pid)
        while not any(child.net_connections() for child in checking.children()):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate()[1]
    assert process.returncode
    assert "Traceback" not in said
    assert "failed" not in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--url", "localhost:1"), "is no URL"),
        (("--url", "http://127.0.0.1:99999"), "is no URL"),
        (("--url", "http://127.0.0.1:9"), "Start the server"),
        (("--url", "unix:"), "is no URL"),
        (("--url", "unix:/nonexistent/a.sock"), "unix:/nonexistent/a.sock"),
        (("--rate", "0"), "numbers above 0"),
        (("--rate", "x"), "numbers above 0"),
        (("--concurrency", "1.5"), "whole number"),
        (("--input-len", "zipf:1"), "is not a length"),
        (("--goodput", "speed:5"), "is not an objective"),
        (("--trace", "/nonexistent"), "Cannot read the trace"),
        (("--prompts", "/nonexistent"), "Cannot read the prompts"),
        (("--extra-body", "{"), "is not JSON"),
        (("--extra-body", "[]"), "takes a JSON object"),
        (("--header", "nothing"), "is not a header"),
        (("--save", "/nonexistent/a.json"), "does not exist"),
        (("--find-rate", "--rate", "1"), "needs objectives"),
        (("--csv", "/nonexistent/a.csv"), "does not exist"),
        (("--save", "/"), "/ is a directory"),
        (("--html", "/proc/a.html"), "Cannot write /proc/a.html"),
        (("--url", "http://a..b"), "Cannot connect to a..b"),
        (("--url", f"http://{'a' * 70}.example"), "Cannot connect"),
        (("--api-key", "one\r\n"), "API key contains"),
        (("--api-key", "\udcff"), "API key contains"),
        (("--header", "a: \udcff"), "is not a header"),
        (("compare", "/nonexistent", "/nonexistent"), "Cannot read"),
        (("compare", "/nonexistent/*.json", "/nonexistent"), "No file matches"),
    ],
)
def test_refusals_are_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    ran = cli(*arguments)
    assert ran.exit_code == 2
    assert sentence in ran.output
    assert "Traceback" not in ran.output
    assert len(ran.output.strip().splitlines()) == 1


@pytest.mark.parametrize("option", ["--prefix-groups", "--prefix-len", "--requests", "--warmup"])
def test_what_no_memory_would_hold_is_refused(option: str) -> None:
    ran = cli(option, "9999999999999999999999")
    assert ran.exit_code == 2
    assert "10000000" in ran.output


async def test_no_more_are_sent_at_once_than_there_are(served: Served) -> None:
    few = ("--requests", "3", "--output-len", "2", "--concurrency", "1e30")
    ran = await asyncio.to_thread(cli, "--url", served.url, *few)
    assert ran.exit_code == 0, ran.output
    assert "Successful requests:                     3" in ran.output


async def test_a_wrong_model_is_refused(served: Served) -> None:
    ran = await asyncio.to_thread(cli, "--url", served.url, "--model", "none")
    assert ran.exit_code == 2
    assert f"it has {MODEL}" in ran.output


async def test_a_malformed_trace_is_refused(served: Served, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": "soon"}\n')
    ran = await asyncio.to_thread(cli, "--url", served.url, "--trace", str(trace))
    assert ran.exit_code == 2
    assert "line 1" in ran.output


async def test_a_run_without_an_answer_is_no_success() -> None:
    async def refused(asked: Asked) -> None:
        asked.json(429, {"error": {"message": "slow down"}})

    async with rough_server(refused) as server:
        ran = await asyncio.to_thread(
            cli, "--url", server.url, "--concurrency", "1", "--requests", "3"
        )
    assert ran.exit_code == 1
    assert "slow down" in ran.output


async def test_the_key_is_the_one_that_the_other_commands_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 X\r\ncontent-length: 0\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name in ("OPENAI_API_KEY", "ARGOSY_API_KEY"):
            monkeypatch.setenv(name, f"key-of-{name}")
            ran = await asyncio.to_thread(cli, "--url", url)
            assert ran.exit_code == 2, ran.output
            assert f"Bearer key-of-{name}".encode() in heads[-1]
