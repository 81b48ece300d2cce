"""`argosy serve` with the bundled model: OpenAI SDK, `argosy chat`, signals, faults, TLS."""

import contextlib
import os
import re
import shutil
import signal
import ssl
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import httpx2
import openai
import psutil
import pytest
from openai.types.chat import ChatCompletionUserMessageParam
from tests.support.certificates import Authority
from tests.support.pipes import fill
from tests.support.serve_process import ARGOSY, ServeProcess, run_argosy, run_serve
from tests.support.waiting import is_listening, wait_for

from argosy.models import BUNDLED_MODEL

KEY = re.compile(r"sk-argosy-[\w-]+")
HELLO: ChatCompletionUserMessageParam = {"role": "user", "content": "Hello! How are you?"}


def accepts_connections(server: ServeProcess) -> bool:
    """Return whether the server accepts new connections."""
    try:
        httpx2.get(f"{server.url}/health")
    except httpx2.ConnectError:
        return False
    return True


def stream_text(server: ServeProcess, chunks: SimpleQueue[str]) -> str:
    """Stream a long seeded response and return its text. Put each chunk into `chunks` as it arrives."""
    text = ""
    with (
        server.client() as client,
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


def test_openai_sdk_stream_equals_response(server: ServeProcess) -> None:
    with server.client() as client:
        model = client.models.list().data[0].id
        response = client.chat.completions.create(
            model=model, messages=[HELLO], temperature=0, max_tokens=40
        )
        stream = client.chat.completions.create(
            model=model, messages=[HELLO], temperature=0, max_tokens=40, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert response.choices[0].message.content == streamed
    assert streamed
    assert response.usage is not None
    assert response.usage.completion_tokens > 0


def test_chat_command_answers_one_question(server: ServeProcess) -> None:
    result = run_argosy("chat", "--url", server.url, "--max-tokens", "30", "Hello! How are you?")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_chat_command_clears_conversation(server: ServeProcess) -> None:
    stdin = "Hello!\n/what\n/clear\nHello!\n/quit\n"
    result = run_argosy("chat", "--url", server.url, "--temperature", "0", stdin=stdin)
    assert result.returncode == 0, result.stderr
    answers = [line for line in result.stdout.replace("> ", "").splitlines() if line]
    assert len(answers) == 2
    assert answers[0] == answers[1]  # `/clear` removed the first turn
    assert "/quit exits" in result.stderr


def test_chat_command_reports_error(server: ServeProcess) -> None:
    result = run_argosy("chat", "--url", server.url, "--model", "no-such-model", "Hello")
    assert result.returncode == 2
    assert "no-such-model" in result.stderr
    assert "Traceback" not in result.stderr


def test_status_events_and_logs_come_from_the_running_gateway(
    server: ServeProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a fleet in the store, the commands read that of the gateway."""
    monkeypatch.setenv("ARGOSY_STORE", f"sqlite:///{tmp_path / 'argosy.db'}")
    monkeypatch.setenv("ARGOSY_URL", server.url)
    server.core()  # waits until it is ready
    status = run_argosy("status", "--exit-code")
    assert status.returncode == 0, status.stderr
    assert f"Fleet serve, revision 1, led by process {server.process.pid}" in status.stdout
    assert "replica: 1 of 1 replicas of argosy-mini are ready" in status.stdout
    events = run_argosy("events", "--replica", "replica-1-0").stdout
    assert "replica_phase  replica-1-0  ready: every gateway routes to it" in events
    logs = run_argosy("logs", "argosy-mini", "--url", server.url)
    assert logs.returncode == 0, logs.stderr
    assert "replica-1-0" in logs.stdout + logs.stderr
    settings = httpx2.get(f"{server.url}/admin/settings").json()["data"]
    assert {each["value"] for each in settings if each["path"] == "port"} == {0}
    change = {"pool": "replica", "replicas": 2}
    refused = httpx2.post(f"{server.url}/admin/fleet/scale", json=change)
    assert refused.status_code == 409
    assert "Start it again with other options" in refused.text


def test_status_without_fleet_and_gateway_says_what_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARGOSY_URL", f"unix:{tmp_path}/none")
    store = f"sqlite:///{tmp_path / 'argosy.db'}"
    failed = run_argosy("status", "--store", store)
    assert failed.returncode == 2
    assert "Start one with `argosy serve` or `argosy up FILE`" in failed.stderr
    assert "`argosy up FILE`" in run_argosy("scale", "chat", "2", "--store", store).stderr


def test_port_in_use_is_one_error_line(server: ServeProcess) -> None:
    result = run_argosy("serve", "--port", server.url.rsplit(":", 1)[1])
    assert result.returncode == 2
    assert "(Address already in use); choose another --port" in result.stderr
    assert "Traceback" not in result.stderr


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


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        # tests/integration/gateway/test_process_environment.py closes a gateway's terminal on every change.
        *(
            pytest.param(number, marks=pytest.mark.exhaustive)
            for number in (signal.SIGINT, signal.SIGHUP)
        ),
    ],
)
def test_signal_drains_and_leaves_no_process_or_file(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder has an unusual name, which is part of the replicas' URLs."""
    # Shorter than tmp_path, so that sockets are in it.
    with tempfile.TemporaryDirectory(suffix="ü %41 b") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        with default_action(number):
            assert_drains(number, Path(folder))
        assert not list(Path(folder).glob("argosy*"))


@contextlib.contextmanager
def default_action(number: signal.Signals) -> Iterator[None]:
    """Restore a signal's default action. Under nohup, for example, child processes inherit an ignored SIGHUP."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        yield
        return
    signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_IGN)


def assert_drains(number: signal.Signals, folder: Path) -> None:
    with run_serve() as server:
        assert list(folder.glob("argosy*"))
        expected = stream_text(server, SimpleQueue())
        processes = server.processes()
        assert len(processes) >= 3  # the gateway, its replica, the engine core, render processes
        with ThreadPoolExecutor(1) as pool:
            chunks: SimpleQueue[str] = SimpleQueue()
            answer = pool.submit(stream_text, server, chunks)
            chunks.get()
            server.process.send_signal(number)
            assert answer.result() == expected  # the running stream may finish
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{server.url}/health")


def test_second_sigint_exits_at_once() -> None:
    with run_serve("--drain-deadline", "600") as server:
        processes = server.processes()
        with ThreadPoolExecutor(1) as pool:
            chunks: SimpleQueue[str] = SimpleQueue()
            answer = pool.submit(stream_text, server, chunks)
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


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    """Copy the bundled model with truncated weights."""
    model = tmp_path / "broken"
    shutil.copytree(BUNDLED_MODEL, model)
    os.truncate(model / "model.safetensors", 100_000)
    return model


def test_first_key_of_public_address_is_shown_before_model_loads(
    broken_model: Path, tmp_path: Path
) -> None:
    store = ("--store", f"sqlite:///{tmp_path / 'argosy.db'}")
    failed = run_argosy("serve", str(broken_model), "--host", "0.0.0.0", "--port", "0", *store)  # noqa: S104 - the test needs a public address
    assert failed.returncode == 2
    key = KEY.search(failed.stderr)
    assert key is not None
    assert key.group().rsplit("-", 1)[0][:18] in run_argosy("keys", "list", *store).stdout
    with run_serve(*store) as server:  # every request needs a key once one exists
        arguments = ("chat", "--url", server.url, "--max-tokens", "5", "Hello")
        keyless = run_argosy(*arguments)
        assert keyless.returncode != 0
        assert "Send an API key" in keyless.stderr
        unknown = run_argosy("status", "--url", server.url)
        assert "Give it by --api-key or ARGOSY_API_KEY" in unknown.stderr
        assert run_argosy(*arguments, "--api-key", key.group()).returncode == 0
        usage = run_argosy("usage", "--json", *store)
        assert '"requests": 1' in usage.stdout, usage.stdout


def test_store_error_precedes_model_load(broken_model: Path) -> None:
    failed = run_argosy(
        "serve", str(broken_model), "--port", "0", "--store", f"sqlite:///{broken_model}"
    )
    assert failed.returncode == 2
    assert "cannot be opened" in failed.stderr
    assert "model" not in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.exhaustive  # test_process_environment.py fills the log pipe of a gateway on every change
def test_full_log_pipe_blocks_no_request(tmp_path: Path) -> None:
    socket = str(tmp_path / "argosy.sock")
    read_fd, write_fd = os.pipe()
    fill(write_fd)
    options = ("--threads", "1", "--kv-memory", "64MiB", "--log-level", "info", "--uds", socket)
    with subprocess.Popen([ARGOSY, "serve", *options], stderr=write_fd) as process:
        os.close(write_fd)
        try:
            wait_for(lambda: is_listening(Path(socket)) or process.poll() is not None)
            with httpx2.Client(
                transport=httpx2.HTTPTransport(uds=socket), base_url="http://localhost", timeout=60
            ) as client:
                request = {"model": "argosy-mini", "prompt": "Say", "max_tokens": 3}
                for _ in range(3):
                    assert client.post("/v1/completions", json=request).status_code == 200
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(read_fd)


def test_unstartable_replica_ends_server_with_error(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, model)
    with run_serve(str(model)) as server:
        model.rename(tmp_path / "elsewhere")
        (replica,) = server.replicas()
        replica.kill()
        stderr = "".join(server.stderr_lines)
        assert f"there is no directory {model}" in stderr.splitlines()[-1]
        assert stderr.count("replica_restarting") > 2
        assert "Traceback" not in stderr
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{server.url}/health")


def test_tls_server_without_auth_answers_and_reloads_on_sighup(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("server", "127.0.0.1")
    failed = run_argosy("serve", "--port", "0", "--tls-cert", pair.certificate)
    assert failed.returncode == 2
    assert "--tls-key" in failed.stderr
    public = ("--host", "0.0.0.0", "--auth", "disabled")  # noqa: S104 - only there a key would be required
    store = ("--store", f"sqlite:///{tmp_path / 'argosy.db'}")
    tls = ("--tls-cert", pair.certificate, "--tls-key", pair.key)
    with run_serve(*public, *store, *tls) as server:
        assert server.url.startswith("https")
        trust = ssl.create_default_context(cafile=authority.ca)
        request = {"model": "argosy-mini", "prompt": "Say", "max_tokens": 3}
        with httpx2.Client(base_url=server.url, verify=trust, timeout=60) as client:
            assert client.post("/v1/completions", json=request).status_code == 200
        address = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
        before = ssl.get_server_certificate(address)
        authority.pair("server", "127.0.0.1")
        server.process.send_signal(signal.SIGHUP)
        while ssl.get_server_certificate(address) == before:
            pass
        assert httpx2.get(f"{server.url}/ready", verify=trust).status_code == 200


def test_more_replicas_than_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    failed = run_argosy("serve", "--port", "0", "--device", "cuda", "--replicas", "2")
    assert failed.returncode == 2
    assert "--gpus shared" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.exhaustive  # tests/chaos kills replicas of `argosy serve` on every change
@pytest.mark.parametrize("model_impl", ["argosy", "transformers"])
def test_streams_survive_killed_replica_of_two(model_impl: str) -> None:
    with run_serve(
        "--replicas", "2", "--served-model-name", "mini", "--model-impl", model_impl
    ) as server:
        while len(server.replicas()) < 2:
            pass
        with server.client() as client:
            assert [card.id for card in client.models.list()] == ["mini"]
        for number in range(2):
            metrics = httpx2.get(f"{server.url}/replicas/replica-1-{number}/metrics")
            assert "argosy_step_seconds_total" in metrics.text
        assert httpx2.get(f"{server.url}/replicas/replica-1-2/metrics").status_code == 404
        expected = stream_text(server, SimpleQueue())
        victim, _ = server.replicas()
        chunks: SimpleQueue[str] = SimpleQueue()
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(stream_text, server, chunks) for _ in range(4)]
            for _ in range(80):
                chunks.get()
            victim.kill()
            assert {answer.result() for answer in answers} == {expected}
        while len(server.replicas()) < 2:
            pass
        assert victim.pid not in {replica.pid for replica in server.replicas()}
        ended = [
            run
            for number in range(2)
            for run in httpx2.get(
                f"{server.url}/admin/replicas/log", params={"replica": f"replica-1-{number}"}
            ).json()["runs"]
            if run["exited_at"]
        ]
        assert [run["exit_status"] for run in ended] == [-signal.SIGKILL]
