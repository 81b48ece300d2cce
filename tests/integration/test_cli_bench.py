"""`argosy bench` as a command: output files, and one-line error messages."""

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
from tests.support.fake_upstream import UpstreamRequest, fake_upstream
from tests.support.replica_servers import MODEL, RunningReplica
from tests.support.waiting import wait_for
from typer.testing import CliRunner
from typer.testing import Result as CommandResult

from argosy.bench import load_result
from argosy.cli.app import app


def cli(*arguments: str) -> CommandResult:
    return CliRunner().invoke(app, ["bench", *arguments])


async def test_results_are_saved_exported_and_compared(
    replica_server: RunningReplica, tmp_path: Path
) -> None:
    a, b, page = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "a.html"
    table, metrics = tmp_path / "a.csv", tmp_path / "a.prom"
    metrics.write_text("previous run")
    common = [
        *("--url", replica_server.url, "--rate", "200", "--requests", "8", "--output-len", "4"),
        *("--concurrency", "1e30"),  # more than the requests
    ]
    files = ("--csv", str(table), "--prometheus", str(metrics))
    more = ("--goodput", "ttft:5000", "--warmup", "1", "--save", str(a), "--html", str(page))
    result = await asyncio.to_thread(cli, *common, *more, *files, "--api-key", "secret-key")
    assert result.exit_code == 0, result.output
    assert "Successful requests:                     8" in result.output
    assert "Request goodput" in result.output
    assert load_result(a).runs[0].summary.completed == 8
    assert "secret-key" not in a.read_text()
    assert page.read_text().startswith("<!doctype html>")
    assert len(table.read_text().splitlines()) == 10
    assert 'argosy_bench_requests{load="rate 200' in metrics.read_text()
    assert len(list(tmp_path.iterdir())) == 4, "no temporary file is left"  # noqa: ASYNC240 - no other task runs
    result = await asyncio.to_thread(cli, *common, "--save", str(b))
    assert result.exit_code == 0, result.output
    for sides, runs in (((a, b), [1, 1]), ((f"{a},{b}", tmp_path / "?.json"), [2, 2])):
        compared = await asyncio.to_thread(cli, "compare", *map(str, sides), "--output", str(page))
        assert compared.exit_code == 0, compared.output
        assert "95 % interval" in compared.output
        ratios = json.loads(page.read_text())
        assert {each["measure"] for each in ratios} >= {"ttft p50 ms"}
        assert all(each["runs"] == runs for each in ratios)


def test_self_check_prints_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.bench.noise_floor.SCHEDULED_REQUESTS", 20)
    monkeypatch.setattr("argosy.bench.noise_floor.FLOOD_REQUESTS", 200)
    result = cli("--self-check")
    assert result.exit_code == 0, result.output
    for line in ("added TTFT", "ITL error", "schedule lag", "maximum requests", "maximum chunks"):
        assert line in result.output


def test_interrupted_self_check_prints_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "argosy.cli", "bench", "--self-check"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    ) as process:
        self_check = psutil.Process(process.pid)
        wait_for(
            lambda: (
                any(child.net_connections() for child in self_check.children())
                or process.poll() is not None
            )
        )
        os.killpg(process.pid, signal.SIGINT)
        stderr = process.communicate()[1]
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "failed" not in stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--url", "localhost:1"), "is not the URL"),
        (("--url", "http://127.0.0.1:99999"), "is not a URL"),
        (("--url", "http://127.0.0.1:9"), "Start the server"),
        (("--url", "unix:"), "is not the URL"),
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
def test_invalid_argument_is_one_error_line(arguments: tuple[str, ...], message: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_huge_counts_are_rejected() -> None:
    for option in ("--prefix-groups", "--prefix-len", "--requests", "--warmup"):
        result = cli(option, "9999999999999999999999")
        assert (result.exit_code, "10000000" in result.output) == (2, True), option


@pytest.mark.parametrize(
    ("path", "arguments", "message"),
    [
        ("", ("--model", "none"), f"only {MODEL}"),
        ("", ("--trace", "trace.jsonl"), "line 1"),
        ("/somewhere", (), "list its models"),
    ],
)
async def test_rejected_benchmark_of_a_server_names_the_reason(
    replica_server: RunningReplica,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text('{"timestamp": "soon"}\n')  # noqa: ASYNC240 - no other task runs
    result = await asyncio.to_thread(cli, "--url", replica_server.url + path, *arguments)
    assert (result.exit_code, message in result.output) == (2, True), result.output


async def test_run_without_completed_request_exits_1() -> None:
    async def reject(request: UpstreamRequest) -> None:
        request.send_json(429, {"error": {"message": "slow down"}})

    async with fake_upstream(reject) as server:
        result = await asyncio.to_thread(
            cli, "--url", server.url, "--concurrency", "1", "--requests", "3"
        )
    assert result.exit_code == 1
    assert "slow down" in result.output


async def test_interrupted_run_exits_130() -> None:
    async def interrupt(request: UpstreamRequest) -> None:
        if request.body:
            process.send_signal(signal.SIGINT)

    async with fake_upstream(interrupt) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "argosy.cli", "bench", "--url", server.url),
            *("--concurrency", "1", "--requests", "3"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert await process.wait() == 130


async def test_api_key_comes_from_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads: list[bytes] = []

    async def reject_key(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 X\r\ncontent-length: 0\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(reject_key, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for name in ("OPENAI_API_KEY", "ARGOSY_API_KEY"):
            monkeypatch.setenv(name, f"key-of-{name}")
            result = await asyncio.to_thread(cli, "--url", url)
            assert result.exit_code == 2, result.output
            assert f"Bearer key-of-{name}".encode() in heads[-1]
