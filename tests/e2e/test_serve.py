"""`argosy serve` as a person starts it: the bundled model, the OpenAI SDK, `argosy chat`, Ctrl-C."""

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
from tests.support.serve_process import ARGOSY, Server, argosy, serving
from tests.support.waiting import listens_at

from argosy.models import BUNDLED_MODEL

KEY = re.compile(r"sk-argosy-[\w-]+")
HELLO: ChatCompletionUserMessageParam = {"role": "user", "content": "Hello! How are you?"}


def listens(server: Server) -> bool:
    """Whether new connections are taken."""
    try:
        httpx2.get(f"{server.url}/health")
    except httpx2.ConnectError:
        return False
    return True


def story(server: Server, pieces: SimpleQueue[str]) -> str:
    """A long sampled answer; its pieces appear in `pieces` as they come."""
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
            piece = chunk.choices[0].delta.content or ""
            text += piece
            pieces.put(piece)
    return text


def test_openai_sdk_chats_and_streams(server: Server) -> None:
    with server.client() as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(
            model=model, messages=[HELLO], temperature=0, max_tokens=40
        )
        stream = client.chat.completions.create(
            model=model, messages=[HELLO], temperature=0, max_tokens=40, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert whole.choices[0].message.content == streamed
    assert streamed
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0


def test_argosy_chat_answers_one_question(server: Server) -> None:
    arguments = ("chat", "--url", server.url, "--temperature", "0")
    done = argosy(*arguments, "--max-tokens", "30", "Hello! How are you?")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert argosy(*arguments, "--max-tokens", "30", "Hello! How are you?").stdout == done.stdout


def test_argosy_chat_converses(server: Server) -> None:
    typed = "Hello!\n/what\n/clear\nHello!\n/quit\n"
    done = argosy("chat", "--url", server.url, "--temperature", "0", typed=typed)
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.replace("> ", "").splitlines() if line]
    assert len(answers) == 2
    assert answers[0] == answers[1]  # the second was asked with no memory of the first
    assert "/quit exits" in done.stderr


def test_argosy_chat_reports_a_refusal(server: Server) -> None:
    done = argosy("chat", "--url", server.url, "--model", "no-such-model", "Hello")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_folder_that_it_was_started_in_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where each version of a service has one; torch's libraries do not load there."""
    monkeypatch.chdir(tmp_path)
    with serving() as server, server.client() as client:
        tmp_path.rmdir()
        server.core().kill()
        model = client.models.list().data[0].id
        answer = client.chat.completions.create(model=model, messages=[HELLO], max_tokens=5)
        assert answer.choices[0].message.content


def test_port_in_use_is_one_sentence(server: Server) -> None:
    done = argosy("serve", "--port", server.url.rsplit(":", 1)[1])
    assert done.returncode == 2
    assert "(Address already in use); choose another --port" in done.stderr
    assert "Traceback" not in done.stderr


def test_killed_core_is_only_a_pause_for_the_client(server: Server) -> None:
    undisturbed = story(server, SimpleQueue())
    pieces: SimpleQueue[str] = SimpleQueue()
    first = server.core()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(story, server, pieces)
        for _ in range(20):
            pieces.get()
        first.kill()
        assert answer.result() == undisturbed
    assert server.core().pid != first.pid


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_leave_drains_and_leaves_nothing(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        with heard(number):
            drain(number)
        assert not list(Path(folder).glob("argosy*"))


@contextlib.contextmanager
def heard(number: signal.Signals) -> Iterator[None]:
    """Whatever these tests run under (nohup ignores SIGHUP, and so do its children): its default."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        yield
        return
    signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_IGN)


def drain(number: signal.Signals) -> None:
    with serving() as server:
        story_before = story(server, SimpleQueue())
        processes = server.processes()
        assert len(processes) == 3  # the gateway, its replica, the replica's engine core
        with ThreadPoolExecutor(1) as pool:
            pieces: SimpleQueue[str] = SimpleQueue()
            answer = pool.submit(story, server, pieces)
            pieces.get()
            server.process.send_signal(number)
            assert answer.result() == story_before  # it was allowed to finish
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{server.url}/health")


def test_a_second_interrupt_leaves_at_once() -> None:
    with serving("--drain-deadline", "600") as server:
        processes = server.processes()
        with ThreadPoolExecutor(1) as pool:
            pieces: SimpleQueue[str] = SimpleQueue()
            answer = pool.submit(story, server, pieces)
            pieces.get()
            server.core().suspend()  # it cannot finish
            server.process.send_signal(signal.SIGINT)
            while "Press Ctrl-C again to stop at once" not in next(server.said):
                pass
            while listens(server):
                pass
            server.process.send_signal(signal.SIGINT)
            with pytest.raises((openai.OpenAIError, httpx2.TransportError)):
                answer.result()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive


def test_the_first_key_is_made_where_others_can_connect(tmp_path: Path) -> None:
    store = ("--store", f"sqlite:///{tmp_path / 'argosy.db'}")
    with serving("--host", "0.0.0.0", *store) as server:  # noqa: S104 - that is what is tested
        key = KEY.search("".join(next(server.said) for _ in range(6)))
        assert key is not None
        asked = ("chat", "--url", server.url, "--max-tokens", "5", "Hello")
        refused = argosy(*asked)
        assert refused.returncode != 0
        assert "Send an API key" in refused.stderr
        assert argosy(*asked, "--api-key", key.group()).returncode == 0
        used = argosy("usage", "--json", *store)
        assert '"requests": 1' in used.stdout, used.stdout
    with serving(*store) as server:
        assert argosy("chat", "--url", server.url, "Hello").returncode != 0  # once there are keys


def test_nobody_is_asked_when_that_is_said_by_name(tmp_path: Path) -> None:
    store = ("--store", f"sqlite:///{tmp_path / 'argosy.db'}")
    with serving("--host", "0.0.0.0", "--auth", "disabled", *store) as server:  # noqa: S104 - as above
        assert argosy("chat", "--url", server.url, "--max-tokens", "5", "Hello").returncode == 0
    refused = argosy("serve", "--port", "0", "--store", "mysql://nowhere")
    assert refused.returncode == 2
    assert "The database URL is not valid" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A model whose download was cut off."""
    model = tmp_path / "broken"
    shutil.copytree(BUNDLED_MODEL, model)
    os.truncate(model / "model.safetensors", 100_000)
    return model


def test_the_first_key_is_shown_though_the_model_cannot_be_loaded(
    broken: Path, tmp_path: Path
) -> None:
    store = ("--store", f"sqlite:///{tmp_path / 'argosy.db'}")
    refused = argosy("serve", str(broken), "--host", "0.0.0.0", "--port", "0", *store)  # noqa: S104 - as above
    assert refused.returncode == 2
    key = KEY.search(refused.stderr)
    assert key is not None
    assert key.group().rsplit("-", 1)[0][:18] in argosy("keys", "list", *store).stdout


def test_what_is_wrong_with_the_store_is_said_before_the_model_is_loaded(broken: Path) -> None:
    refused = argosy("serve", str(broken), "--port", "0", "--store", f"sqlite:///{broken}")
    assert refused.returncode == 2
    assert "cannot be opened" in refused.stderr
    assert "model" not in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("name", ["ü %41 b", "deep" * 20])
def test_wherever_temporary_files_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        monkeypatch.context() as patch,
        contextlib.ExitStack() as stack,
    ):
        (Path(folder) / name).mkdir()
        patch.setenv("TMPDIR", str(Path(folder) / name))
        server = stack.enter_context(serving())
        client = stack.enter_context(server.client())
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt="Say", max_tokens=3, timeout=30)
        assert answer.usage is not None
        assert answer.usage.completion_tokens


def test_a_log_that_nobody_reads_stops_neither_gateway_nor_replica(tmp_path: Path) -> None:
    socket = str(tmp_path / "argosy.sock")
    reading, writing = os.pipe()
    fill(writing)
    options = ("--threads", "1", "--kv-memory", "64MiB", "--log-level", "info", "--uds", socket)
    with subprocess.Popen([ARGOSY, "serve", *options], stderr=writing) as process:
        os.close(writing)
        try:
            while not listens_at(Path(socket)):
                assert process.poll() is None
            with httpx2.Client(
                transport=httpx2.HTTPTransport(uds=socket), base_url="http://localhost", timeout=60
            ) as client:
                asked = {"model": "argosy-mini", "prompt": "Say", "max_tokens": 3}
                for _ in range(3):
                    assert client.post("/v1/completions", json=asked).status_code == 200
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(reading)


def test_it_gives_up_loudly_when_no_replica_can_be_started_any_more(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, model)
    with serving(str(model)) as server:
        model.rename(tmp_path / "elsewhere")
        (replica,) = server.replicas()
        replica.kill()
        said = "".join(server.said)
        assert f"there is no directory {model}" in said.splitlines()[-1]
        assert said.count("replica_restarting") > 2
        assert "Traceback" not in said
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{server.url}/health")


def test_it_listens_over_tls_when_told_to(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair = authority.pair("server", "127.0.0.1")
    refused = argosy("serve", "--port", "0", "--tls-cert", pair.certificate)
    assert refused.returncode == 2
    assert "--tls-key" in refused.stderr
    with serving("--tls-cert", pair.certificate, "--tls-key", pair.key) as server:
        assert server.url.startswith("https")
        trust = ssl.create_default_context(cafile=authority.ca)
        assert httpx2.get(f"{server.url}/ready", verify=trust).status_code == 200
        where = "127.0.0.1", int(server.url.rsplit(":", 1)[1])
        before = ssl.get_server_certificate(where)
        authority.pair("server", "127.0.0.1")
        server.process.send_signal(signal.SIGHUP)
        while ssl.get_server_certificate(where) == before:
            pass
        assert httpx2.get(f"{server.url}/ready", verify=trust).status_code == 200


def test_more_replicas_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    refused = argosy("serve", "--port", "0", "--device", "cuda", "--replicas", "2")
    assert refused.returncode == 2
    assert "--gpus shared" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_killed_server_leaves_nothing_behind() -> None:
    with serving() as server:
        processes = server.processes()
        server.process.kill()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive


def test_two_replicas_share_the_work_and_one_may_die() -> None:
    with serving("--replicas", "2", "--served-model-name", "mini") as server:
        while len(server.replicas()) < 2:
            pass
        with server.client() as client:
            assert [card.id for card in client.models.list()] == ["mini"]
        for number in range(2):
            metrics = httpx2.get(f"{server.url}/replicas/replica-{number}/metrics")
            assert "argosy_step_seconds_total" in metrics.text
        assert httpx2.get(f"{server.url}/replicas/replica-2/metrics").status_code == 404
        undisturbed = story(server, SimpleQueue())
        victim, _ = server.replicas()
        pieces: SimpleQueue[str] = SimpleQueue()
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(story, server, pieces) for _ in range(4)]
            for _ in range(80):
                pieces.get()
            victim.kill()
            assert {answer.result() for answer in answers} == {undisturbed}
        while len(server.replicas()) < 2:
            pass
        assert victim.pid not in {replica.pid for replica in server.replicas()}
