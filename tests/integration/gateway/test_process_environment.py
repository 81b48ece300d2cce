"""A gateway in a bad environment: its log cannot be written, its limits are low, others come and go."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec
import psutil
import pytest
from tests.support.certificates import Authority
from tests.support.fake_engine import FakeEngine, Script
from tests.support.pipes import fill
from tests.support.replica_servers import MODEL, serve
from tests.support.scripted_server import Asked, plain, rough_server
from tests.support.waiting import listens_at, until

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig

GATEWAY = (sys.executable, "-m", "argosy.cli", "gateway", "--config")
START_S = 60.0


def configured(
    folder: Path,
    more: str = "",
    behind: str = "http://127.0.0.1:1",
    model: str = "big",
    *,
    kind: str = "openai",
    serves: str = "rough",
) -> Path:
    """The file of a gateway on a Unix socket, in front of that server or of nobody."""
    path = folder / "gateway.yaml"
    replica = f"{{url: '{behind}', kind: {kind}, model: {serves}}}"
    behind = f"models: [{{name: {model}, replicas: [{replica}]}}]"
    path.write_text(f"uds: {folder}/gateway.sock\n{behind}\n{more}")
    return path


@contextlib.contextmanager
def running(*command: str, **settings: object) -> Iterator[subprocess.Popen[str]]:
    """A process, killed at the end if it is still there."""
    with subprocess.Popen(command, text=True, **settings) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def asked(folder: Path, path: str) -> bytes:
    """What the gateway on that socket answers. Raises OSError when nobody listens."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "gateway.sock"))
        client.sendall(f"GET {path} HTTP/1.0\r\nhost: localhost\r\n\r\n".encode())
        return client.makefile("rb").read()


def healthy(folder: Path, process: subprocess.Popen[str]) -> bool:
    """Whether it answers, once it does or has ended."""
    until = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError):
            return b" 200 " in asked(folder, "/health")
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("log_format", ["console", "json"])
@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-", "<&- >&- 2>&-", "2> >(exit)"])
def test_who_cannot_say_anything_serves_all_the_same(
    tmp_path: Path, stderr: str, log_format: str
) -> None:
    config = configured(tmp_path, f"log_format: {log_format}")
    command = f"exec {' '.join(GATEWAY)} '{config}' {stderr}"
    with running("bash", "-c", command) as process:
        assert healthy(tmp_path, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_log_that_nobody_reads_stops_nobody(tmp_path: Path) -> None:
    """Its pipe is full: what is said is lost, until somebody reads again."""
    reading, writing = os.pipe()
    stuffing = fill(writing)
    with os.fdopen(reading, encoding="utf-8") as log:
        config = str(configured(tmp_path, "log_format: json"))
        with running(*GATEWAY, config, stderr=writing) as process:
            os.close(writing)
            assert healthy(tmp_path, process)
            for _ in range(1000):  # a pipe more than full of lines
                assert asked(tmp_path, "/v1/models")
            assert log.read(stuffing) == "." * stuffing
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            events = [msgspec.json.decode(line)["event"] for line in log]
        assert "draining" in events
        assert "ready" not in events


@pytest.mark.parametrize("given", [("--port", "0"), ("--host", "127.0.0.1")])
def test_an_address_that_is_given_takes_the_place_of_the_files_socket(
    tmp_path: Path, given: tuple[str, str]
) -> None:
    config = str(configured(tmp_path, "port: 0"))
    with running(*GATEWAY, config, *given, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if line.startswith("argosy gateway is ready"))
        assert "at http://127.0.0.1:" in ready
        assert not (tmp_path / "gateway.sock").exists()


def test_who_comes_while_another_drains_keeps_the_socket(tmp_path: Path) -> None:
    config = str(configured(tmp_path, "drain_deadline_s: 60"))
    with running(*GATEWAY, config) as first, socket.socket(socket.AF_UNIX) as client:
        assert healthy(tmp_path, first)
        client.connect(str(tmp_path / "gateway.sock"))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
        )
        client.sendall(b"{")  # it is not all there: the gateway waits for it
        first.send_signal(signal.SIGTERM)
        while listens_at(tmp_path / "gateway.sock"):
            time.sleep(0.05)
        with running(*GATEWAY, config) as second:
            assert healthy(tmp_path, second)
            client.close()
            assert first.wait(30) == 0
            assert healthy(tmp_path, second)


def test_who_leaves_takes_no_socket_away_that_another_has_put_in_its_place(tmp_path: Path) -> None:
    config = str(configured(tmp_path))
    with running(*GATEWAY, config) as first:
        assert healthy(tmp_path, first)
        (tmp_path / "gateway.sock").unlink()
        with running(*GATEWAY, config) as second:
            assert healthy(tmp_path, second)
            first.send_signal(signal.SIGTERM)
            assert first.wait(30) == 0
            assert healthy(tmp_path, second)
            second.send_signal(signal.SIGTERM)
            assert second.wait(30) == 0
    assert not (tmp_path / "gateway.sock").exists()


def test_what_is_on_its_way_when_a_gateway_leaves_is_answered(tmp_path: Path) -> None:
    """On a connection that is kept; then nothing keeps the gateway any more."""
    config = str(configured(tmp_path, "drain_deadline_s: 60\ndrain_idle_s: 60"))
    with running(*GATEWAY, config) as process, socket.socket(socket.AF_UNIX) as client:
        assert healthy(tmp_path, process)
        client.connect(str(tmp_path / "gateway.sock"))
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        process.send_signal(signal.SIGTERM)
        while listens_at(tmp_path / "gateway.sock"):
            time.sleep(0.05)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = client.makefile("rb").read()  # to the connection's end
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close\r\n" in answer
        assert process.wait(30) == 0


def test_an_idle_connection_is_kept_for_as_long_as_the_settings_say(tmp_path: Path) -> None:
    """Load balancers that keep theirs for longer than the gateway lose requests."""
    config = str(configured(tmp_path, "connection_idle_timeout_s: 0.2"))
    with running(*GATEWAY, config) as process, socket.socket(socket.AF_UNIX) as client:
        assert healthy(tmp_path, process)
        client.settimeout(30)  # a gateway's own time is longer
        client.connect(str(tmp_path / "gateway.sock"))
        client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = client.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"connection: close" not in answer


def test_who_connected_before_a_gateway_leaves_is_answered(tmp_path: Path) -> None:
    """It had no time to accept them."""
    with running(*GATEWAY, str(configured(tmp_path))) as process, contextlib.ExitStack() as leaving:
        assert healthy(tmp_path, process)
        process.send_signal(signal.SIGSTOP)
        clients = [leaving.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(500)]
        for client in clients:
            client.connect(str(tmp_path / "gateway.sock"))
            client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        answers = [client.makefile("rb").read() for client in clients]
        assert [answer[:13] for answer in answers] == [b"HTTP/1.1 200 "] * len(clients)
        assert process.wait(30) == 0


def hears_sighup() -> None:
    """Whatever these tests run under: nohup has it ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_who_loses_the_terminal_drains_first(tmp_path: Path) -> None:
    """SIGHUP says so to who has one; while it is there, and to all others, that the settings are to be read."""
    terminal, end = pty.openpty()

    def take_terminal() -> None:
        hears_sighup()
        os.setsid()
        fcntl.ioctl(end, termios.TIOCSCTTY, 0)

    config = str(configured(tmp_path))
    with running(*GATEWAY, config, stderr=subprocess.PIPE, preexec_fn=take_terminal) as process:
        assert healthy(tmp_path, process)
        process.send_signal(signal.SIGHUP)
        assert process.stderr is not None
        said = ""
        while "config_reloaded" not in said:
            said = process.stderr.readline()
            assert "draining" not in said
        os.close(end)
        os.close(terminal)
        assert "draining" in process.communicate(timeout=30)[1]
        assert process.returncode == 0


def test_sighup_takes_in_the_models_of_the_file(tmp_path: Path) -> None:
    config = str(configured(tmp_path))
    with running(*GATEWAY, config, preexec_fn=hears_sighup) as process:
        assert healthy(tmp_path, process)
        configured(tmp_path, behind="http://127.0.0.1:2", model="small")
        process.send_signal(signal.SIGHUP)
        while b'"small"' not in asked(tmp_path, "/v1/models"):
            assert process.poll() is None
            time.sleep(0.05)
        assert b'"big"' not in asked(tmp_path, "/v1/models")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_sighup_renews_certificates_as_long_as_there_is_a_gateway(tmp_path: Path) -> None:
    pair = Authority(tmp_path).pair("server", "127.0.0.1")
    listening = f"tls: {{certificate: {pair.certificate}, key: {pair.key}}}"
    path = tmp_path / "gateway.yaml"
    path.write_text(
        f"port: 0\nmodels: [{{name: m, replicas: [{{url: 'http://192.0.2.1'}}]}}]\n{listening}"
    )
    with running(*GATEWAY, str(path), stderr=subprocess.PIPE, preexec_fn=hears_sighup) as process:
        heeds = 1 << (signal.SIGHUP - 1)
        while not heeds & caught(process):
            assert process.poll() is None
        for number in (
            signal.SIGHUP,
            signal.SIGHUP,
            signal.SIGTERM,
        ):  # it looks for its replica yet
            process.send_signal(number)
        said = process.communicate(timeout=30)[1]
        assert process.returncode == 0, said
        assert "certificate_reloaded" in said


def caught(process: subprocess.Popen[str]) -> int:
    """The signals that it has handlers for, as bits."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("SigCgt:")[2].split()[0], 16)


def test_it_takes_as_many_descriptors_as_the_system_gives(tmp_path: Path) -> None:
    def few_of_many() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))

    with running(*GATEWAY, str(configured(tmp_path)), preexec_fn=few_of_many) as process:
        assert healthy(tmp_path, process)
        assert psutil.Process(process.pid).rlimit(psutil.RLIMIT_NOFILE) == (512, 512)


async def test_who_is_let_in_with_few_descriptors_left_is_answered(tmp_path: Path) -> None:
    async def slow(asked: Asked) -> None:
        await asyncio.sleep(0.1)
        await plain(asked)

    async with rough_server(slow) as server:
        config = configured(tmp_path, behind=server.url)

        def few() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

        with running(*GATEWAY, str(config), preexec_fn=few, stderr=subprocess.PIPE) as process:
            assert await asyncio.to_thread(healthy, tmp_path, process)
            statuses = await asyncio.gather(*(completed(tmp_path) for _ in range(60)))
            assert statuses == [200] * 60
            process.terminate()
            assert "attempt_failed" not in process.communicate()[1]


async def test_streams_on_the_fast_path_have_the_descriptors_that_they_take(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    monkeypatch.setattr("tests.support.fake_engine.SEATS", 100)
    script = Script(list(range(100, 103)), finish="length", pause_after=1)
    engine, log = FakeEngine(tokenizer, lambda _: script), tmp_path / "log"
    async with serve(engine) as served:
        config = configured(tmp_path, behind=served.url, kind="argosy", serves=MODEL)
        with (
            log.open("wb") as lines,
            running(*GATEWAY, str(config), preexec_fn=few, stderr=lines) as process,
        ):
            assert await asyncio.to_thread(healthy, tmp_path, process)
            streams = [asyncio.create_task(completed(tmp_path, stream=True)) for _ in range(19)]
            while b"fast_path_streams 19.0" not in await asyncio.to_thread(
                asked, tmp_path, "/metrics"
            ):
                assert process.poll() is None
                await asyncio.sleep(0.05)
            streams += [asyncio.create_task(completed(tmp_path, stream=True)) for _ in range(40)]
            await until(lambda: "connections cannot be accepted" in log.read_text())
            engine.go_on.set()
            assert await asyncio.gather(*streams) == [200] * 59
    assert "attempt_failed" not in log.read_text()


async def test_a_server_that_answers_rubbish_is_met_once_it_makes_sense() -> None:
    deep = b'{"a":' + b"[" * 100_000
    told = {"/v1/models": deep, "/info": deep, "/health": b"{}"}
    open_to: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_to.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
                body = told.get(path, b"")
                writer.write(b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.close()
        await writer.wait_closed()
        open_to.discard(writer)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        ready = asyncio.Event()
        behind = [ReplicaConfig(url=f"http://127.0.0.1:{port}")]
        config = GatewayConfig(port=0, models=[ModelConfig(name="big", replicas=behind)])
        gateway = GatewayServer(config, lambda _: ready.set())
        running = asyncio.create_task(gateway.run())
        await until(lambda: ready.is_set() or running.done())
        assert not running.done()
        (replica,) = gateway.replicas
        assert not replica.is_accepting
        told["/v1/models"], told["/info"] = b'{"data": [{"id": "big"}]}', b"{}"
        await until(lambda: replica.is_accepting and replica.breaker.is_closed)
        gateway.stop()
        await running
        await until(lambda: not open_to)


async def completed(folder: Path, *, stream: bool = False) -> int:
    """The status of a completion by a client of its own."""
    transport = httpx2.AsyncHTTPTransport(uds=str(folder / "gateway.sock"))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"model": "big", "prompt": "Say", "max_tokens": 3, "stream": stream}
        return (await client.post("/v1/completions", json=body, timeout=60)).status_code


def test_settings_that_are_a_pipe_by_now_are_not_waited_for(tmp_path: Path) -> None:
    path = configured(tmp_path)
    with running(*GATEWAY, str(path), stderr=subprocess.PIPE) as process:
        assert healthy(tmp_path, process)
        path.unlink()
        os.mkfifo(path)
        process.send_signal(signal.SIGHUP)
        assert "is not a regular file, so it cannot be reloaded" in logged(process, "config_reload_failed")
        path.unlink()
        configured(tmp_path)
        process.send_signal(signal.SIGHUP)
        logged(process, "config_reloaded")


def logged(process: subprocess.Popen[str], event: str) -> str:
    """The next line of its log that tells of this."""
    assert process.stderr is not None
    return next(line for line in process.stderr if event in line)
