"""`argosy serve` with the bundled model: OpenAI SDK, `argosy chat`, signals, faults, TLS."""

import json
import os
import re
import shutil
import signal
import ssl
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import httpx2
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from tests.support.certificates import Authority
from tests.support.serve_process import ServeProcess, run_argosy, run_serve
from tests.support.waiting import wait_for
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.models import BUNDLED_MODEL
from argosy.store import GatewayRecord, open_store

KEY = re.compile(r"sk-argosy-[\w-]+")
HELLO: ChatCompletionUserMessageParam = {"role": "user", "content": "Hello! How are you?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the bundled model, which the last test of its server removes."""
    return Path(
        shutil.copytree(BUNDLED_MODEL, tmp_path_factory.mktemp("model") / BUNDLED_MODEL.name)
    )


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """Server of a file, whose working directory was deleted, and whose temporary folder has a long path.

    A deployment may delete the folder of the previous version. Relative library paths of torch then fail. The paths of
    sockets in the temporary folder would be too long.
    """
    folder = tmp_path_factory.mktemp("server")
    working_directory, temporary_folder = folder / "old", folder / ("deep" * 20)
    working_directory.mkdir()
    temporary_folder.mkdir()
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.chdir(working_directory)
            monkeypatch.setenv("TMPDIR", str(temporary_folder))
            server = stack.enter_context(run_serve(str(model)))
        working_directory.rmdir()
        yield server


def accepts_connections(server: ServeProcess) -> bool:
    """Return whether the server accepts new connections."""
    try:
        httpx2.get(f"{server.url}/health")
    except httpx2.ConnectError:
        return False
    return True


def stream_text(server: ServeProcess, chunks: SimpleQueue[str], key: str = "none") -> str:
    """Stream a long seeded response and return its text. Put each chunk into `chunks` as it arrives."""
    text = ""
    with (
        server.client(key) as client,
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[HELLO],
            stream=True,
            seed=11,
            max_tokens=300,
            extra_body={"ignore_eos": True},
        ) as stream,
    ):
        for chunk in stream:
            text_delta = chunk.choices[0].delta.content or ""
            text += text_delta
            chunks.put(text_delta)
    return text


def test_chat_command_clears_conversation_and_reports_error(server: ServeProcess) -> None:
    stdin = "Hello!\n/what\n/clear\nHello!\n/quit\n"
    result = run_argosy("chat", "--url", server.url, "--temperature", "0", stdin=stdin)
    assert result.returncode == 0, result.stderr
    answers = [line for line in result.stdout.replace("> ", "").splitlines() if line]
    assert len(answers) == 2
    assert answers[0] == answers[1]  # `/clear` removed the first turn
    assert "/quit exits" in result.stderr
    unknown = run_argosy("chat", "--url", server.url, "--model", "no-such-model", "Hello")
    assert unknown.returncode == 2
    assert "no-such-model" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_status_events_and_logs_come_from_the_running_gateway(
    server: ServeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a fleet in the store, the commands read that of the gateway that uses the store."""
    url = f"sqlite:///{tmp_path / 'argosy.db'}"
    monkeypatch.setenv("ARGOSY_STORE", url)
    with closing(open_store(url)) as store:
        store.migrate()
        store.gateways.record_heartbeat(GatewayRecord(id="a", url=server.url, secret="s"))
    server.core()  # waits until it is ready
    status = run_argosy("status", "--exit-code")
    assert status.returncode == 0, status.stderr
    assert f"Fleet serve, revision 1, led by process {server.process.pid}" in status.stdout
    assert "replica of argosy-mini: 1 of 1 replica serves" in status.stdout
    events = CliRunner().invoke(app, ["events", "--replica", "replica-1-0"]).stdout
    assert "replica_phase  replica-1-0  ready: every gateway routes to it" in events
    logs = CliRunner().invoke(app, ["logs", "argosy-mini", "--url", server.url])
    assert logs.exit_code == 0, logs.output
    assert "replica-1-0" in logs.output
    settings = httpx2.get(f"{server.url}/admin/settings").json()["data"]
    assert {each["value"] for each in settings if each["path"] == "port"} == {0}
    change = {"pool": "replica", "replicas": 2}
    refused = httpx2.post(f"{server.url}/admin/fleet/scale", json=change)
    assert refused.status_code == 409
    assert "Start it again with other options" in refused.text


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    """Copy the bundled model with truncated weights."""
    model = tmp_path / "broken"
    shutil.copytree(BUNDLED_MODEL, model)
    os.truncate(model / "model.safetensors", 100_000)
    return model


def error_line(*arguments: str) -> str:
    """Run a command that must fail within this process, and return its output without line breaks."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_commands_that_cannot_run_end_with_one_error_line(
    server: ServeProcess, broken_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = server.url.rsplit(":", 1)[1]
    taken = error_line("serve", "--port", port)
    assert "(Address already in use); choose another --port" in taken
    monkeypatch.setenv("ARGOSY_URL", f"unix:{tmp_path}/none")
    store = f"sqlite:///{tmp_path / 'argosy.db'}"
    no_fleet = run_argosy("status", "--store", store)
    assert no_fleet.returncode == 2
    assert "Start one with `argosy serve` or `argosy up FILE`" in no_fleet.stderr
    assert "`argosy up FILE`" in error_line("scale", "chat", "2", "--store", store)
    # The error of the store precedes the load of the model.
    failed = error_line(
        "serve", str(broken_model), "--port", "0", "--store", f"sqlite:///{broken_model}"
    )
    assert "cannot be opened" in failed
    assert "model" not in failed
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    gpus = error_line("serve", "--port", "0", "--device", "cuda", "--replicas", "2")
    assert "--gpus shared" in gpus


def test_stream_survives_killed_core(server: ServeProcess) -> None:
    expected = stream_text(server, SimpleQueue())
    chunks: SimpleQueue[str] = SimpleQueue()
    first = server.core()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream_text, server, chunks)
        for _ in range(20):
            chunks.get()
        first.kill()
        assert answer.result() == expected
    assert server.core().pid != first.pid


def test_unstartable_replica_ends_server_with_error(
    server: ServeProcess, model: Path, tmp_path: Path
) -> None:
    """The last test of the shared server."""
    model.rename(tmp_path / "elsewhere")
    (replica,) = server.replicas()
    replica.kill()
    stderr = "".join(server.stderr_lines)
    assert f"there is no directory {model}" in stderr.splitlines()[-1]
    assert stderr.count("replica_restarting") > 2
    assert "Traceback" not in stderr
    assert not accepts_connections(server)


@dataclass(frozen=True)
class KeyedServer:
    """Server of a stored model, with a store that has a key."""

    server: ServeProcess
    store: tuple[str, str]
    digest: str
    key: str


@pytest.fixture(scope="module")
def keyed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedServer]:
    """Server of a model that was damaged in the model store when it was first to be served."""
    folder = tmp_path_factory.mktemp("stored")
    store = ("--store", f"sqlite:///{folder / 'argosy.db'}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("ARGOSY_MODELS", str(folder / "models"))
        pull = ["models", "pull", str(BUNDLED_MODEL), "--name", "mini", "--json"]
        digest = json.loads(CliRunner().invoke(app, pull).stdout)["digest"]
        (weights,) = (folder / "models").rglob("model.safetensors")
        weights.chmod(0o600)
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        failed = run_argosy("serve", "store:mini", "--host", "0.0.0.0", "--port", "0", *store)  # noqa: S104 - the test needs a public address
        assert failed.returncode == 2
        assert "model.safetensors" in failed.stderr.splitlines()[-1]
        assert "Traceback" not in failed.stderr
        key = KEY.search(failed.stderr)
        assert key is not None, (
            "a public address needs a key, which is shown before the model loads"
        )
        weights.write_bytes(whole)
        with run_serve("store:mini", "--drain-deadline", "600", *store) as server:
            yield KeyedServer(server, store, digest, key.group())


def test_stored_model_serves_with_the_first_key_and_its_digest_is_listed_and_used(
    keyed_server: KeyedServer,
) -> None:
    """Every request needs a key once one exists."""
    url, key = keyed_server.server.url, keyed_server.key
    arguments = ("chat", "--url", url, "--max-tokens", "5", "Hello")
    keyless = run_argosy(*arguments)
    assert keyless.returncode != 0
    assert "Send an API key" in keyless.stderr
    unknown = error_line("status", "--url", url)
    assert "Give it by --api-key or ARGOSY_API_KEY" in unknown
    assert run_argosy(*arguments, "--api-key", key).returncode == 0
    headers = {"Authorization": f"Bearer {key}"}
    (card,) = httpx2.get(f"{url}/v1/models", headers=headers).json()["data"]
    assert (card["id"], card["digest"]) == ("mini", keyed_server.digest)
    usage = ["usage", "--csv", "-", *keyed_server.store]
    wait_for(lambda: CliRunner().invoke(app, usage).output.count(keyed_server.digest) == 1)


@pytest.mark.exhaustive
def test_backup_under_load_is_restored_and_answers(
    keyed_server: KeyedServer, tmp_path: Path
) -> None:
    backups, has_ended = str(tmp_path / "backups"), threading.Event()

    def request() -> str | None:
        answer = client.chat.completions.create(
            model="mini", messages=[HELLO], max_tokens=16, temperature=0
        )
        return answer.choices[0].message.content

    def request_until_the_end() -> int:
        return sum(bool(request()) for _ in iter(has_ended.is_set, True))

    with keyed_server.server.client(keyed_server.key) as client, ThreadPoolExecutor(4) as pool:
        assert request()
        usage = ["usage", "--json", *keyed_server.store]
        wait_for(lambda: CliRunner().invoke(app, usage).output.strip() != "[]")
        load = [pool.submit(request_until_the_end) for _ in range(4)]
        created = run_argosy("backup", "create", backups, "--json", *keyed_server.store)
        has_ended.set()
        assert all(each.result() for each in load)
        answer = request()
    assert answer
    assert json.loads(created.stdout)["requests"] > 0
    content = str(HELLO["content"])
    pinned = ("backup", "verify", backups, "--prompt", content, "--answer")
    verified = run_argosy(*pinned, answer)
    assert (verified.returncode, "is whole" in verified.stdout) == (0, True), verified.stderr
    assert "The answer to the prompt is" in run_argosy(*pinned, "another").stderr


def test_second_sigint_exits_at_once(keyed_server: KeyedServer) -> None:
    """The last test of its server."""
    server = keyed_server.server
    processes = server.processes()
    with ThreadPoolExecutor(1) as pool:
        chunks: SimpleQueue[str] = SimpleQueue()
        answer = pool.submit(stream_text, server, chunks, keyed_server.key)
        chunks.get()
        server.core().suspend()  # the stream cannot finish
        server.process.send_signal(signal.SIGINT)
        while "Press Ctrl-C again to stop at once" not in next(server.stderr_lines):
            pass
        wait_for(lambda: not accepts_connections(server))
        server.process.send_signal(signal.SIGINT)
        with pytest.raises((openai.OpenAIError, httpx2.TransportError)):
            answer.result()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert not alive


def test_tls_server_reloads_on_sighup_drains_on_sigterm_and_leaves_no_process_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder has an unusual name, which is part of the replicas' URLs."""
    authority = Authority(tmp_path)
    pair = authority.pair("server", "127.0.0.1")
    assert "--tls-key" in error_line("serve", "--port", "0", "--tls-cert", pair.certificate)
    public = ("--host", "0.0.0.0", "--auth", "disabled")  # noqa: S104 - only there a key would be required
    store = ("--store", f"sqlite:///{tmp_path / 'argosy.db'}")
    tls = ("--tls-cert", pair.certificate, "--tls-key", pair.key)
    # Shorter than tmp_path, so that sockets are in it.
    with tempfile.TemporaryDirectory(suffix="ü %41 b") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setenv("SSL_CERT_FILE", authority.ca)
        with run_serve(*public, *store, *tls) as server:
            assert server.url.startswith("https")
            assert list(Path(folder).glob("argosy*"))
            address = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
            before = ssl.get_server_certificate(address)
            authority.pair("server", "127.0.0.1")
            server.process.send_signal(signal.SIGHUP)
            while ssl.get_server_certificate(address) == before:
                pass
            expected = stream_text(server, SimpleQueue())
            processes = server.processes()
            assert (
                len(processes) >= 3
            )  # the gateway, its replica, the engine core, render processes
            with ThreadPoolExecutor(1) as pool:
                chunks: SimpleQueue[str] = SimpleQueue()
                answer = pool.submit(stream_text, server, chunks)
                chunks.get()
                server.process.terminate()
                assert answer.result() == expected  # the running stream may finish
            _, alive = psutil.wait_procs(processes, timeout=60)
            assert not alive
            assert not accepts_connections(server)
        assert not list(Path(folder).glob("argosy*"))
