"""Gateway processes in a bad environment: unwritable logs, few descriptors and signals; and how connections end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import msgspec
import psutil
import pytest
from tests.support.certificates import Authority
from tests.support.fake_engine import FakeEngine, Script
from tests.support.gateway_client import serve_gateway
from tests.support.pipes import fill
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine.serving.text import Tokenizer

COMMAND = (sys.executable, "-m", "argosy.cli", "gateway", "--config")
START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
MODELS = [ModelConfig(name="big", replicas=[ReplicaConfig(url="http://127.0.0.1:1")])]


def write_config(
    folder: Path,
    settings: str = "",
    replica_url: str = "http://127.0.0.1:1",
    model: str = "big",
    *,
    kind: str = "openai",
    replica_model: str = "rough",
) -> str:
    """Write the file of a gateway on a Unix socket. Returns its path."""
    path = folder / "gateway.yaml"
    replica = f"{{url: '{replica_url}', kind: {kind}, model: {replica_model}}}"
    models = f"models: [{{name: {model}, replicas: [{replica}]}}]"
    path.write_text(f"uds: {folder}/gateway.sock\n{models}\n{settings}")
    return str(path)


@contextlib.contextmanager
def run_process(*command: str, **settings: object) -> Iterator[subprocess.Popen[str]]:
    """Run a process and kill it at the end if it still runs."""
    with subprocess.Popen(command, text=True, **settings) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def get(folder: Path, path: str) -> bytes:
    """Return the gateway's complete response. Raises OSError if no gateway listens."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "gateway.sock"))
        client.sendall(f"GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n".encode())
        return client.makefile("rb").read()


def is_healthy(folder: Path, process: subprocess.Popen[str]) -> bool:
    """Wait until the gateway responds or exits. Returns whether it is healthy."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return b" 200 " in get(folder, "/health")
        time.sleep(POLL_INTERVAL_S)
    return False


def terminate(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM, and check that the process exits without an error."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(EXIT_TIMEOUT_S) == 0


def wait_for_event(process: subprocess.Popen[str], event: str) -> str:
    """Return the next line with an event, of a log in which each line is JSON."""
    assert process.stderr is not None
    return next(line for line in process.stderr if json.loads(line)["event"] == event)


def limit_descriptors(soft: int, hard: int) -> Callable[[], None]:
    """Return a function that sets the limit on open files in a child process."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def restore_sighup() -> None:
    """Restore the default handler, because nohup ignores SIGHUP for its children."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


async def complete(folder: Path) -> int:
    """Stream a completion on a new connection and return the status."""
    transport = httpx2.AsyncHTTPTransport(uds=str(folder / "gateway.sock"))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"model": "big", "prompt": "Say", "max_tokens": 3, "stream": True}
        return (await client.post("/v1/completions", json=body, timeout=60)).status_code


# --- logs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redirection", "log_format"),
    [
        ("2>/dev/full", "console"),
        ("2>&-", "json"),
        *(
            pytest.param(redirection, log_format, marks=pytest.mark.exhaustive)
            for redirection, log_format in (
                ("2> >(exit)", "json"),
                ("<&- >&- 2>&-", "console"),
                ("2>/dev/full", "json"),
                ("2>&-", "console"),
                ("<&- >&- 2>&-", "json"),
                ("2> >(exit)", "console"),
            )
        ),
    ],
)
def test_gateway_serves_while_log_cannot_be_written(
    tmp_path: Path, redirection: str, log_format: str
) -> None:
    config = write_config(tmp_path, f"log_format: {log_format}")
    command = f"exec {' '.join(COMMAND)} '{config}' {redirection}"
    with run_process("bash", "-c", command) as process:
        assert is_healthy(tmp_path, process)
        terminate(process)


def test_full_log_pipe_does_not_block_gateway(tmp_path: Path) -> None:
    """Log lines are dropped while the pipe is full."""
    read_end, write_end = os.pipe()
    num_filled = fill(write_end)
    with os.fdopen(read_end, encoding="utf-8") as log:
        config = write_config(tmp_path, "log_format: json")
        with run_process(*COMMAND, config, stderr=write_end) as process:
            os.close(write_end)
            assert is_healthy(tmp_path, process)
            for _ in range(1000):  # more log lines than fit into a pipe
                assert get(tmp_path, "/v1/models")
            assert log.read(num_filled) == "." * num_filled
            terminate(process)
            events = [msgspec.json.decode(line)["event"] for line in log]
        assert "draining" in events
        assert "ready" not in events


async def test_request_on_kept_connection_is_served_while_gateway_drains() -> None:
    """The gateway exits right after this request."""
    config = GatewayConfig(port=0, models=MODELS, drain_deadline_s=60, drain_keepalive_s=60)
    async with serve_gateway(config) as (server, url):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEALTH_REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        server.stop()
        with contextlib.suppress(ConnectionRefusedError):
            while True:
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
        writer.write(HEALTH_REQUEST)
        response = await reader.read()  # until the connection closes
        writer.close()
    assert b"HTTP/1.1 200 " in response
    assert b"connection: close\r\n" in response


async def test_idle_connection_closes_after_configured_timeout() -> None:
    """Load balancers that keep connections for longer than the gateway lose requests."""
    config = GatewayConfig(port=0, models=MODELS, connection_idle_timeout_s=0.2)
    async with serve_gateway(config) as (_, url), asyncio.timeout(30):  # less than the default
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(HEALTH_REQUEST)
        response = await reader.read()
        writer.close()
    assert response.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" not in response


# --- SIGHUP --------------------------------------------------------------------------------------


def test_sighup_reloads_models_until_terminal_is_closed(tmp_path: Path) -> None:
    """A closed terminal sends SIGHUP to stop its processes. Reading a pipe would block the gateway."""
    terminal, process_end = pty.openpty()

    def take_terminal() -> None:
        restore_sighup()
        os.setsid()
        fcntl.ioctl(process_end, termios.TIOCSCTTY, 0)

    path = write_config(tmp_path, "log_format: json")
    with run_process(*COMMAND, path, stderr=subprocess.PIPE, preexec_fn=take_terminal) as process:
        assert is_healthy(tmp_path, process)
        Path(path).unlink()
        os.mkfifo(path)
        process.send_signal(signal.SIGHUP)
        failure = wait_for_event(process, "config_reload_failed")
        assert "is not a regular file, so it cannot be reloaded" in failure
        Path(path).unlink()
        write_config(tmp_path, "log_format: json", "http://127.0.0.1:2", "small")
        process.send_signal(signal.SIGHUP)
        wait_for_event(process, "config_reloaded")
        models = get(tmp_path, "/v1/models")
        assert b'"small"' in models
        assert b'"big"' not in models
        os.close(process_end)
        os.close(terminal)
        wait_for_event(process, "draining")
        assert process.wait(EXIT_TIMEOUT_S) == 0


def test_sighup_reloads_certificate_during_start(tmp_path: Path) -> None:
    pair = Authority(tmp_path).pair("server", "127.0.0.1")
    path = tmp_path / "gateway.yaml"
    path.write_text(
        "port: 0\nmodels: [{name: m, replicas: [{url: 'http://192.0.2.1'}]}]\n"
        f"tls: {{certificate: {pair.certificate}, key: {pair.key}}}"
    )
    with run_process(
        *COMMAND, str(path), stderr=subprocess.PIPE, preexec_fn=restore_sighup
    ) as process:
        while not handled_signals(process) & 1 << (signal.SIGHUP - 1):
            assert process.poll() is None
            time.sleep(POLL_INTERVAL_S)
        # The gateway still waits for the first probe of its replica.
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            process.send_signal(number)
        log = process.communicate(timeout=EXIT_TIMEOUT_S)[1]
        assert process.returncode == 0, log
        assert "certificate_reloaded" in log


def handled_signals(process: subprocess.Popen[str]) -> int:
    """Return a bit mask of the signals that a process handles."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("SigCgt:")[2].split()[0], 16)


# --- file descriptors ----------------------------------------------------------------------------


def test_descriptor_limit_is_raised_and_address_option_replaces_socket(tmp_path: Path) -> None:
    config, preexec_fn = write_config(tmp_path, "log_format: json"), limit_descriptors(256, 512)
    with run_process(
        *COMMAND, config, "--port", "0", preexec_fn=preexec_fn, stderr=subprocess.PIPE
    ) as process:
        assert "http://127.0.0.1:" in wait_for_event(process, "ready")
        assert not (tmp_path / "gateway.sock").exists()
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (512, 512)


async def test_fast_path_streams_succeed_with_few_descriptors(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.fake_engine.MAX_SEQS", 100)
    script = Script(list(range(100, 103)), finish="length", pause_after=1)
    engine, log_path = FakeEngine(tokenizer, lambda _: script), tmp_path / "log"
    async with serve(engine) as served:
        config = write_config(tmp_path, replica_url=served.url, kind="argosy", replica_model=MODEL)
        with (
            log_path.open("wb") as log,
            run_process(
                *COMMAND, config, preexec_fn=limit_descriptors(128, 128), stderr=log
            ) as process,
        ):
            assert await asyncio.to_thread(is_healthy, tmp_path, process)
            streams = [asyncio.create_task(complete(tmp_path)) for _ in range(19)]
            while b"fast_path_streams 19.0" not in await asyncio.to_thread(
                get, tmp_path, "/metrics"
            ):
                assert process.poll() is None
                await asyncio.sleep(POLL_INTERVAL_S)
            streams += [asyncio.create_task(complete(tmp_path)) for _ in range(40)]
            await until(lambda: "accepting_paused" in log_path.read_text())
            engine.may_continue.set()
            assert await asyncio.gather(*streams) == [200] * 59
    assert "attempt_failed" not in log_path.read_text()
