"""The engine core process and its client without faults: streams, aborts, shutdown, clean-up."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from tests.support.request_deltas import all_deltas, next_delta
from tests.support.scripted_core import CORE, Command, expected_tokens, prompt
from tests.support.waiting import until

from argosy.engine import EngineConfig, EngineFailedError, EngineRequest, PrestartedCore
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.protocol import ApiError, SamplingParams

ROOT = Path(__file__).parents[2]


@pytest.fixture
async def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EngineClient]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    client = EngineClient(EngineConfig(model=str(tmp_path)), core_factory=CORE)
    await client.start()
    yield client
    await client.close()


def request(
    tokens: list[int], *, name: str = "r", max_tokens: int = 30, prompt_logprobs: int | None = None
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return EngineRequest(id=name, prompt=tokens, params=params)


async def collect(client: EngineClient, wanted: EngineRequest) -> list[Delta]:
    return await all_deltas(client.generate(wanted))


def tokens_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def has_exited(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_concurrent_requests_get_their_own_tokens(client: EngineClient) -> None:
    wanted = [request(prompt(salt=i), name=f"r{i}", max_tokens=5 + i) for i in range(30)]
    answers = await asyncio.gather(*(collect(client, r) for r in wanted))
    for r, deltas in zip(wanted, answers, strict=True):
        assert {delta.id for delta in deltas} == {r.id}
        assert tokens_of(deltas) == expected_tokens(r.prompt, r.max_tokens)
        assert [d.finish_reason for d in deltas if d.finish_reason] == ["length"]
        assert deltas[-1].finish_reason == "length"
    assert client.in_flight == 0


async def test_equal_request_ids_stay_separate(client: EngineClient) -> None:
    first, second = await asyncio.gather(
        collect(client, request(prompt(salt=1))), collect(client, request(prompt(salt=2)))
    )
    assert tokens_of(first) == expected_tokens(prompt(salt=1), 30)
    assert tokens_of(second) == expected_tokens(prompt(salt=2), 30)


async def test_slow_reader_gets_one_merged_delta(client: EngineClient) -> None:
    slow = client.generate(request(prompt(salt=1), max_tokens=200, prompt_logprobs=0))
    await until(lambda: slow.is_ended)
    deltas = await all_deltas(slow)
    assert len(deltas) == 1
    assert deltas[0].tokens == expected_tokens(prompt(salt=1), 200)
    assert [entry.token for entry in deltas[0].prompt_logprobs] == prompt(salt=1)[1:]
    assert (deltas[0].queue_s, deltas[0].cached_tokens) == (0.5, 3)


async def test_closed_stream_aborts_request(client: EngineClient, tmp_path: Path) -> None:
    stream = client.generate(request(prompt(Command.GATE, at=2)))
    assert await next_delta(stream) is not None
    stream.close()
    assert client.in_flight == 0
    await until((tmp_path / "aborted").exists)
    assert tokens_of(await collect(client, request(prompt()))) == expected_tokens(prompt(), 30)


async def test_prompt_logprobs_are_not_repeated_after_crash(client: EngineClient) -> None:
    crashing = prompt(Command.KILL, at=1)
    deltas = await collect(client, request(crashing, prompt_logprobs=0))
    assert client.restarts_total == 1
    scored = [entry.token for delta in deltas for entry in delta.prompt_logprobs]
    assert scored == crashing[1:]
    assert tokens_of(deltas) == expected_tokens(crashing, 30)
    assert [d.queue_s for d in deltas if d.queue_s is not None] == [0.5]


async def test_socket_files_are_removed_after_start(client: EngineClient, tmp_path: Path) -> None:
    await collect(client, request(prompt()))
    # The client unlinks the sockets once the first heartbeat has arrived.
    await until(lambda: not list(tmp_path.glob("argosy-*")))
    assert tokens_of(await collect(client, request(prompt()))) == expected_tokens(prompt(), 30)


async def test_core_ignores_sigint(client: EngineClient) -> None:
    pid = client.core_pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    await collect(client, request(prompt()))
    assert client.core_pid == pid


async def test_close_ends_process_and_running_request(client: EngineClient) -> None:
    stream = client.generate(request(prompt(Command.GATE, at=3)))
    pid = client.core_pid
    assert pid is not None
    await client.close()
    await client.close()
    assert not psutil.pid_exists(pid)
    assert (await all_deltas(stream))[-1].finish_reason == "error"
    assert client.state == "stopped"
    with pytest.raises(ApiError, match="stopping"):
        client.generate(request(prompt()))


async def test_close_during_start_fails_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    client = EngineClient(EngineConfig(model=str(tmp_path)), core_factory=CORE)
    start = asyncio.create_task(client.start())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="not ready"):
        client.info  # noqa: B018 - that reading it raises is the point
    await client.close()
    with pytest.raises(EngineFailedError):
        await start


async def test_load_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    reports: list[tuple[str, float]] = []
    client = EngineClient(
        EngineConfig(model=str(tmp_path)),
        core_factory=CORE,
        on_load_progress=lambda what, done: reports.append((what, done)),
    )
    ready = await client.start()
    await client.close()
    assert ready.backend.startswith("scripted")
    assert reports == [("weights", 0.5), ("weights", 1.0)]


async def test_prestarted_process_becomes_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    others = set(psutil.Process().children())
    with PrestartedCore(CORE) as prestarted:
        (process,) = set(psutil.Process().children()) - others
        client = EngineClient(
            EngineConfig(model=str(tmp_path)), core_factory=CORE, prestarted_core=prestarted
        )
        await client.start()
    assert client.core_pid == process.pid
    crashing = prompt(Command.KILL, at=1)
    assert tokens_of(await collect(client, request(crashing))) == expected_tokens(crashing, 30)
    assert client.core_pid != process.pid
    await client.close()


@pytest.mark.parametrize("core", [CORE, "there.is.no:such_core"])
def test_unused_prestarted_process_exits(core: str) -> None:
    others = set(psutil.Process().children())
    with PrestartedCore(core):
        (process,) = set(psutil.Process().children()) - others
    assert has_exited(process.pid)


async def test_failed_import_of_prestarted_core_is_reported_at_start(
    tmp_path: Path,
) -> None:
    with PrestartedCore("there.is.no:such_core") as prestarted:
        client = EngineClient(
            EngineConfig(model=str(tmp_path)), core_factory="no.core:x", prestarted_core=prestarted
        )
        with pytest.raises(EngineFailedError, match="No module named 'no'"):
            await client.start()


PARENT = """
import asyncio, sys
from argosy.engine.engine_config import EngineConfig
from argosy.engine.serving.engine_core.engine_client import EngineClient

async def main():
    client = EngineClient(EngineConfig(model=sys.argv[1]), core_factory=sys.argv[2])
    await client.start()
    print(client.core_pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_core_exits_after_parent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path), CORE]
    with subprocess.Popen(  # noqa: ASYNC220 - only reading blocks, and a thread does it
        command, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        line = ""
        while not line.strip().isdigit():  # log lines may come first
            line = await asyncio.to_thread(parent.stdout.readline)
            assert line
        pid = int(line)
        parent.kill()
    await until(lambda: has_exited(pid))
