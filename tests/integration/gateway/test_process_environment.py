"""Gateway processes in a bad environment: unwritable logs, few descriptors, signals, and a shared socket."""

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
from tests.support.fake_upstream import UpstreamRequest, fake_upstream, respond_with_tokens
from tests.support.pipes import fill
from tests.support.replica_servers import MODEL, serve
from tests.support.waiting import is_listening, until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.gateway import GatewayServer

COMMAND = (sys.executable, "-m", "argosy.cli", "gateway", "--config")
START_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05
HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


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


@contextlib.contextmanager
def connected(folder: Path) -> Iterator[socket.socket]:
    """Open a connection to the gateway's socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "gateway.sock"))
        yield client


def get(folder: Path, path: str) -> bytes:
    """Return the gateway's complete response. Raises OSError if no gateway listens."""
    with connected(folder) as client:
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


def wait_until_closed(folder: Path) -> None:
    """Wait until no gateway listens on the socket."""
    while is_listening(folder / "gateway.sock"):
        time.sleep(POLL_INTERVAL_S)


def terminate(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM, and check that the process exits without an error."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(EXIT_TIMEOUT_S) == 0


def wait_for_event(process: subprocess.Popen[str], event: str) -> str:
    """Return the next line of the log that contains an event."""
    assert process.stderr is not None
    return next(line for line in process.stderr if event in line)


def limit_descriptors(soft: int, hard: int) -> Callable[[], None]:
    """Return a function that sets the limit on open files in a child process."""
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def restore_sighup() -> None:
    """Restore the default handler, because nohup ignores SIGHUP for its children."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


async def complete(folder: Path, *, stream: bool = False) -> int:
    """Send a completion on a new connection and return the status."""
    transport = httpx2.AsyncHTTPTransport(uds=str(folder / "gateway.sock"))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"model": "big", "prompt": "Say", "max_tokens": 3, "stream": stream}
        return (await client.post("/v1/completions", json=body, timeout=60)).status_code


# --- logs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redirection", "log_format"),
    [
        ("2>/dev/full", "console"),
        ("2>&-", "json"),
        ("2> >(exit)", "json"),
        *(
            pytest.param(redirection, log_format, marks=pytest.mark.exhaustive)
            for redirection, log_format in (
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


def test_json_log_has_only_json_lines(tmp_path: Path) -> None:
    config = write_config(tmp_path, "log_format: json")
    with run_process(*COMMAND, config, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if json.loads(line)["event"] == "ready":
                break
        process.terminate()
        assert [json.loads(line)["event"] for line in process.stderr][-1] == "draining"


# --- the socket ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    [("--port", "0"), pytest.param(("--host", "127.0.0.1"), marks=pytest.mark.exhaustive)],
)
def test_address_option_replaces_socket_of_file(tmp_path: Path, option: tuple[str, str]) -> None:
    config = write_config(tmp_path, "port: 0")
    with run_process(*COMMAND, config, *option, stderr=subprocess.PIPE) as process:
        assert "at http://127.0.0.1:" in wait_for_event(process, "argosy gateway is ready")
        assert not (tmp_path / "gateway.sock").exists()


def test_successor_keeps_socket_while_predecessor_drains(tmp_path: Path) -> None:
    config = write_config(tmp_path, "drain_deadline_s: 60")
    with run_process(*COMMAND, config) as first:
        assert is_healthy(tmp_path, first)
        with connected(tmp_path) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
            client.sendall(head + b"{")  # the gateway waits for the rest of the body
            first.send_signal(signal.SIGTERM)
            wait_until_closed(tmp_path)
            with run_process(*COMMAND, config) as second:
                assert is_healthy(tmp_path, second)
                client.close()
                assert first.wait(EXIT_TIMEOUT_S) == 0
                assert is_healthy(tmp_path, second)


def test_stopping_gateway_leaves_socket_of_other_gateway(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    with run_process(*COMMAND, config) as first:
        assert is_healthy(tmp_path, first)
        (tmp_path / "gateway.sock").unlink()
        with run_process(*COMMAND, config) as second:
            assert is_healthy(tmp_path, second)
            terminate(first)
            assert is_healthy(tmp_path, second)
            terminate(second)
    assert not (tmp_path / "gateway.sock").exists()


def test_request_on_kept_connection_is_served_while_gateway_drains(tmp_path: Path) -> None:
    """The gateway exits right after this request."""
    config = write_config(tmp_path, "drain_deadline_s: 60\ndrain_keepalive_s: 60")
    with run_process(*COMMAND, config) as process:
        assert is_healthy(tmp_path, process)
        with connected(tmp_path) as client:
            client.sendall(HEALTH_REQUEST)
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
            process.send_signal(signal.SIGTERM)
            wait_until_closed(tmp_path)
            client.sendall(HEALTH_REQUEST)
            response = client.makefile("rb").read()  # until the connection closes
        assert response.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close\r\n" in response
        assert process.wait(EXIT_TIMEOUT_S) == 0


def test_connections_waiting_for_accept_are_served_before_exit(tmp_path: Path) -> None:
    with (
        run_process(*COMMAND, write_config(tmp_path)) as process,
        contextlib.ExitStack() as connections,
    ):
        assert is_healthy(tmp_path, process)
        process.send_signal(signal.SIGSTOP)
        clients = [connections.enter_context(connected(tmp_path)) for _ in range(500)]
        for client in clients:
            client.sendall(HEALTH_REQUEST)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        responses = [client.makefile("rb").read() for client in clients]
        statuses = [response[:13] for response in responses]
        assert statuses == [b"HTTP/1.1 200 "] * len(clients)
        assert process.wait(EXIT_TIMEOUT_S) == 0


def test_idle_connection_closes_after_configured_timeout(tmp_path: Path) -> None:
    """Load balancers that keep connections for longer than the gateway lose requests."""
    config = write_config(tmp_path, "connection_idle_timeout_s: 0.2")
    with run_process(*COMMAND, config) as process:
        assert is_healthy(tmp_path, process)
        with connected(tmp_path) as client:
            client.settimeout(30)  # less than the default timeout
            client.sendall(HEALTH_REQUEST)
            response = client.makefile("rb").read()
        assert response.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" not in response


# --- SIGHUP --------------------------------------------------------------------------------------


def test_sighup_reloads_until_terminal_is_closed(tmp_path: Path) -> None:
    """A closed terminal sends SIGHUP to stop its processes."""
    terminal, process_end = pty.openpty()

    def take_terminal() -> None:
        restore_sighup()
        os.setsid()
        fcntl.ioctl(process_end, termios.TIOCSCTTY, 0)

    with run_process(
        *COMMAND, write_config(tmp_path), stderr=subprocess.PIPE, preexec_fn=take_terminal
    ) as process:
        assert is_healthy(tmp_path, process)
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        line = ""
        while "config_reloaded" not in line:
            line = process.stderr.readline()
            assert "draining" not in line
        os.close(process_end)
        os.close(terminal)
        assert "draining" in process.communicate(timeout=EXIT_TIMEOUT_S)[1]
        assert process.returncode == 0


def test_sighup_reloads_models_but_not_from_pipe(tmp_path: Path) -> None:
    """Reading a pipe would block the gateway."""
    path = write_config(tmp_path)
    with run_process(*COMMAND, path, stderr=subprocess.PIPE, preexec_fn=restore_sighup) as process:
        assert is_healthy(tmp_path, process)
        Path(path).unlink()
        os.mkfifo(path)
        process.send_signal(signal.SIGHUP)
        failure = wait_for_event(process, "config_reload_failed")
        assert "is not a regular file, so it cannot be reloaded" in failure
        Path(path).unlink()
        write_config(tmp_path, replica_url="http://127.0.0.1:2", model="small")
        process.send_signal(signal.SIGHUP)
        wait_for_event(process, "config_reloaded")
        models = get(tmp_path, "/v1/models")
        assert b'"small"' in models
        assert b'"big"' not in models
        terminate(process)


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


def test_descriptor_limit_is_raised_to_hard_limit(tmp_path: Path) -> None:
    preexec_fn = limit_descriptors(256, 512)
    with run_process(*COMMAND, write_config(tmp_path), preexec_fn=preexec_fn) as process:
        assert is_healthy(tmp_path, process)
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (512, 512)


async def test_all_requests_succeed_with_few_descriptors(tmp_path: Path) -> None:
    async def respond_slowly(request: UpstreamRequest) -> None:
        await asyncio.sleep(0.1)
        await respond_with_tokens(request)

    async with fake_upstream(respond_slowly) as server:
        config = write_config(tmp_path, replica_url=server.url)
        with run_process(
            *COMMAND, config, preexec_fn=limit_descriptors(64, 64), stderr=subprocess.PIPE
        ) as process:
            assert await asyncio.to_thread(is_healthy, tmp_path, process)
            statuses = await asyncio.gather(*(complete(tmp_path) for _ in range(60)))
            assert statuses == [200] * 60
            process.terminate()
            assert "attempt_failed" not in process.communicate()[1]


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
            streams = [asyncio.create_task(complete(tmp_path, stream=True)) for _ in range(19)]
            while b"fast_path_streams 19.0" not in await asyncio.to_thread(
                get, tmp_path, "/metrics"
            ):
                assert process.poll() is None
                await asyncio.sleep(POLL_INTERVAL_S)
            streams += [asyncio.create_task(complete(tmp_path, stream=True)) for _ in range(40)]
            await until(lambda: "accepting_paused" in log_path.read_text())
            engine.may_continue.set()
            assert await asyncio.gather(*streams) == [200] * 59
    assert "attempt_failed" not in log_path.read_text()


# --- replicas ------------------------------------------------------------------------------------


async def test_replica_with_invalid_documents_is_used_once_they_are_valid() -> None:
    deeply_nested = b'{"a":' + b"[" * 100_000
    documents = {"/v1/models": deeply_nested, "/info": deeply_nested, "/health": b"{}"}
    open_connections: set[asyncio.StreamWriter] = set()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
                body = documents.get(path, b"")
                writer.write(b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()
        await writer.wait_closed()
        open_connections.discard(writer)

    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        ready = asyncio.Event()
        replicas = [ReplicaConfig(url=f"http://127.0.0.1:{port}")]
        config = GatewayConfig(port=0, models=[ModelConfig(name="big", replicas=replicas)])
        gateway = GatewayServer(config, lambda _: ready.set())
        running = asyncio.create_task(gateway.run())
        await until(lambda: ready.is_set() or running.done())
        assert not running.done()
        (replica,) = gateway.replicas
        assert not replica.health.is_schedulable
        documents["/v1/models"], documents["/info"] = b'{"data": [{"id": "big"}]}', b"{}"
        await until(lambda: replica.health.is_schedulable and not replica.health.is_ejected)
        gateway.stop()
        await running
        await until(lambda: not open_connections)
