"""`argosy batch run`: results in order, each once, whatever the server does and wherever the run is killed."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.waiting import wait_for
from typer.testing import CliRunner

from argosy.cli.app import app

NUM_LINES = 12
BROKEN = {
    3: b"no JSON",
    5: b'{"custom_id": "5", "url": "/v1/files", "body": {}}',
    7: b'{"custom_id": "' + b"7" * 2000,
}
CHAT = "/v1/chat/completions"


class EchoServer(ThreadingHTTPServer):
    """Answers a chat with its last message."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EchoHandler)
        self.attempts: Counter[str] = Counter()
        self.seeds: dict[str, int] = {}
        self.refusals: dict[str, list[tuple[int, str]]] = {}
        """Statuses of the first attempts, with their `Retry-After`, by message. 0 closes the connection."""
        self.overtaken = ("", "")
        """Message that is answered after the arrival of another one."""
        self.arrivals: dict[str, Event] = defaultdict(Event)


class EchoHandler(BaseHTTPRequestHandler):
    server: EchoServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_json(200, {"data": [{"id": "echo"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == "echo"
        text = body["messages"][-1]["content"]
        self.server.attempts[text] += 1
        self.server.arrivals[text].set()
        if text == self.server.overtaken[0]:
            assert self.server.arrivals[self.server.overtaken[1]].wait(timeout=60)
        if refusals := self.server.refusals.get(text):
            status, retry_after = refusals.pop(0)
            if status == 0:
                self.close_connection = True
                self.connection.close()
                return
            self.send_json(status, {"error": {"message": "no"}}, retry_after)
            return
        self.server.seeds[text] = body["seed"]
        self.send_json(400 if text == "bad" else 200, {"text": text})

    def send_json(self, status: int, content: dict[str, Any], retry_after: str = "") -> None:
        body = json.dumps(content, indent=2).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if retry_after:
            self.send_header("retry-after", retry_after)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EchoServer]:
    monkeypatch.setattr("argosy.cli.batch.RETRY_DELAYS_S", (0.0,) * 4)
    monkeypatch.setattr("argosy.cli.batch.MAX_LINE_BYTES", 1000)
    with EchoServer() as echo:
        thread = Thread(target=echo.serve_forever)
        thread.start()
        yield echo
        echo.shutdown()
        thread.join()


def write_lines(path: Path) -> Path:
    """Write requests, some of them broken, and one that the server refuses."""
    lines = []
    for number in range(1, NUM_LINES + 1):
        message = {"role": "user", "content": "bad" if number == 9 else f"text {number}"}
        request = {"custom_id": str(number), "method": "POST", "url": CHAT}
        line = json.dumps(request | {"body": {"messages": [message]}}).encode()
        lines.append(BROKEN.get(number, line))
    path.write_bytes(b"\n".join(lines))
    return path


def run(server: EchoServer, *arguments: object) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.server_port}"
    result = CliRunner().invoke(app, ["batch", "run", "--url", url, *map(str, arguments)])
    return result.exit_code, result.output


def test_results_are_in_order_and_errors_name_line_and_remedy(
    server: EchoServer, tmp_path: Path
) -> None:
    source, output = write_lines(tmp_path / "in"), tmp_path / "out"
    server.refusals = {
        "text 1": [(503, ""), (0, "")],
        "text 2": [(429, "0")] * 9,  # a limit delays a request for as long as it has to
        "text 4": [(429, "86400")],  # as of a budget that is used up
        "text 6": [(500, "")] * 9,
    }
    server.overtaken = ("text 1", "text 8")
    status, printed = run(server, "-i", source, "-o", output, "--concurrency", 4)
    results = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [each["custom_id"] for each in results] == [
        "" if number in {3, 7} else str(number) for number in range(1, NUM_LINES + 1)
    ]
    statuses = [each["response"] and each["response"]["status_code"] for each in results]
    assert statuses == [200, 200, None, 429, None, 500, None, 200, 400, 200, 200, 200]
    assert results[0]["response"]["body"] == {"text": "text 1"}
    errors = [each["error"] and each["error"]["code"] for each in results]
    assert (errors[2], errors[4], errors[6]) == (
        "invalid_json_line",
        "invalid_url",
        "invalid_json_line",
    )
    assert "line 5: the url is '/v1/files'; use one of" in results[4]["error"]["message"]
    assert (status, "6 requests failed" in printed) == (1, True)
    assert server.attempts["text 2"] == 10
    assert server.attempts["text 6"] == 5


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(num_done=st.integers(0, NUM_LINES), torn=st.integers(0, 60), has_errors=st.booleans())
def test_killed_run_continues_where_it_was(
    server: EchoServer, tmp_path: Path, num_done: int, torn: int, has_errors: bool
) -> None:
    source = write_lines(tmp_path / "in")
    names = ["out", "errors"] if has_errors else ["out"]

    def answer(folder: Path) -> list[list[bytes]]:
        folder.mkdir(exist_ok=True)
        options = [
            part
            for name, flag in zip(names, ("-o", "--errors"), strict=False)
            for part in (flag, folder / name)
        ]
        assert run(server, "-i", source, *options)[0] == 1
        return [(folder / name).read_bytes().splitlines(keepends=True) for name in names]

    expected = answer(tmp_path / f"expected {has_errors}")
    folder = tmp_path / "killed"
    folder.mkdir(exist_ok=True)
    server.attempts.clear()
    failing = {9, *BROKEN} if has_errors else set[int]()
    for is_error, (name, lines) in enumerate(zip(names, expected, strict=True)):
        done = sum((number in failing) == is_error for number in range(1, num_done + 1))
        cut = b"".join(lines[done : done + 1])[:torn]
        (folder / name).write_bytes(b"".join(lines[:done]) + cut)
    assert answer(folder) == expected
    sent = [number for number in range(num_done + 1, NUM_LINES + 1) if number not in BROKEN]
    assert sum(server.attempts.values()) == len(sent)


def test_lost_server_ends_the_run_which_continues_later(server: EchoServer, tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in"), tmp_path / "out"
    server.refusals = {"text 6": [(0, "")] * 9}
    status, printed = run(server, "-i", source, "-o", output, "--concurrency", 1)
    assert (status, output.read_bytes().count(b"\n")) == (1, 5)
    assert "line 6 got no response" in printed
    assert "run the same command again to continue" in printed
    seeds = server.seeds.copy()
    server.refusals.clear()
    assert run(server, "-i", source, "-o", output)[0] == 1
    assert output.read_bytes().count(b"\n") == NUM_LINES
    assert server.seeds["text 1"] == seeds["text 1"] != server.seeds["text 2"]


def test_results_of_another_input_and_options_of_a_model_are_refused(
    server: EchoServer, tmp_path: Path
) -> None:
    source, other = write_lines(tmp_path / "in"), tmp_path / "other"
    other.write_text('{"custom_id": "12"}\n')
    for arguments, message in {
        (source, "-o", other): "has results of other requests than the input",
        (source, "-o", tmp_path / "no" / "out"): "No such file or directory",
        (tmp_path / "none", "-o", tmp_path / "out"): "No such file or directory",
        (
            source,
            "-o",
            tmp_path / "out",
            "--dtype",
            "float32",
        ): "--dtype is for a model of this command",
    }.items():
        status, printed = run(server, "-i", *arguments)
        assert (status, message in " ".join(printed.split())) == (2, True), printed


def test_killed_command_leaves_no_replica_and_continues(tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 100,
        "ignore_eos": True,
    }
    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n in range(16)]
    source.write_text(
        "".join(json.dumps(line | {"body": body | {"temperature": 1.0}}) + "\n" for line in lines)
    )
    command = [sys.executable, "-m", "argosy.cli", "batch", "run", "-i", source, "-o", output]
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
    }  # a killed command leaves its folder there
    with subprocess.Popen([*map(str, command), "--concurrency", "1"], env=environment) as process:
        wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") > 0)
        replicas = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(replicas, timeout=60)
    assert not any(each.is_running() for each in replicas)
    assert 0 < output.read_bytes().count(b"\n") < 16
    subprocess.run([*map(str, command)], check=True)
    # Nothing is left, so no model is loaded, which does not exist.
    again = [*map(str, command), "--model", "none"]
    done = subprocess.run(again, check=True, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "16 lines have results already; none is left.\n"
    results = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert [each["custom_id"] for each in results] == [str(n) for n in range(16)]
    texts = {each["response"]["body"]["choices"][0]["message"]["content"] for each in results}
    assert len(texts) > 8  # each line has a seed of its own
