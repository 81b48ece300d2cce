"""The engine core process and its client: streams, aborts, shutdown, and cores that crash, hang or fail to load.

Every request gets one exact output.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from tests.support.request_deltas import all_deltas, next_delta
from tests.support.scripted_core import (
    CORE,
    Command,
    count_loads,
    expected_tokens,
    open_gate,
    plan_loads,
    prompt,
    suspended,
)
from tests.support.waiting import until

from argosy.engine import EngineConfig, EngineFailedError, EngineRequest, PrestartedCore
from argosy.engine.serving.core_messages import Delta
from argosy.engine.serving.engine_core.engine_client import EngineClient
from argosy.engine.serving.engine_core.heartbeat_monitor import CoreRestartPolicy
from argosy.engine.serving.engine_core.in_flight_requests import MAX_CRASHES, DeltaStream
from argosy.protocol import ApiError, SamplingParams

ROOT = Path(__file__).parents[2]
QUICK = CoreRestartPolicy(backoff_s=0.01)
LENGTH = 40
DEFAULT_CRASHES = {(Command.EXIT, 0), (Command.KILL, 20), (Command.RAISE, LENGTH - 1)}


StartClient = Callable[..., AbstractAsyncContextManager[EngineClient]]


@pytest.fixture
def start_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartClient:
    """Return an asynchronous context manager that starts a client, whose core follows a fault script."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)

    @asynccontextmanager
    async def run_client(
        restarts: CoreRestartPolicy = QUICK,
        prestarted_core: PrestartedCore | None = None,
        on_load_progress: Callable[[str, float], None] | None = None,
        **options: Any,  # noqa: ANN401 - fields of `EngineConfig`
    ) -> AsyncIterator[EngineClient]:
        client = EngineClient(
            EngineConfig(model=str(tmp_path), **options),
            core_factory=CORE,
            restart_policy=restarts,
            prestarted_core=prestarted_core,
            on_load_progress=on_load_progress,
        )
        try:
            await client.start()
            yield client
        finally:
            await client.close()

    return run_client


def request(
    tokens: list[int],
    *,
    name: str = "r",
    output: list[int] | None = None,
    max_tokens: int = LENGTH,
    prompt_logprobs: int | None = None,
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return EngineRequest(id=name, prompt=tokens, resumed_tokens=output or [], params=params)


async def read(stream: DeltaStream) -> tuple[list[int], Delta]:
    """Return all tokens and the last delta. Check that only the last one has a finish reason."""
    deltas = await all_deltas(stream)
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    return [token for delta in deltas for token in delta.tokens], deltas[-1]


async def read_some(stream: DeltaStream, count: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < count:
        delta = await next_delta(stream)
        assert delta is not None
        tokens += delta.tokens
    return tokens


def assert_prefix(tokens: list[int], expected: list[int]) -> None:
    """Check that the tokens begin the expected output. A dying core loses tokens that it did not send."""
    assert tokens == expected[: len(tokens)]


CRASHES = [
    pytest.param(
        command, at, marks=() if (command, at) in DEFAULT_CRASHES else pytest.mark.exhaustive
    )
    for command in (Command.EXIT, Command.KILL, Command.RAISE)
    for at in (0, 1, 20, LENGTH - 1)
]


@pytest.mark.parametrize(("command", "at"), CRASHES)
async def test_crash_at_any_token_resumes_exactly(
    start_client: StartClient, command: Command, at: int
) -> None:
    async with start_client() as client:
        expected = expected_tokens(prompt(command, at), LENGTH)
        resumed = expected[: at // 2]
        stream = client.generate(request(prompt(command, at), output=resumed))
        tokens, last = await read(stream)
        assert resumed + tokens == expected
        assert last.finish_reason == "length"
        assert client.restarts_total == 1
        assert client.state == "ready"


async def test_output_of_inexact_model_is_not_resumed(
    start_client: StartClient, tmp_path: Path
) -> None:
    (tmp_path / "inexact").touch()
    async with start_client() as client:
        started, waiting = prompt(Command.EXIT, 20), prompt(Command.GATE, 0)
        unstarted = client.generate(request(waiting, name="waiting"))
        tokens, last = await read(client.generate(request(started)))
        assert_prefix(tokens, expected_tokens(started, 20))
        assert last.finish_reason == "error"
        assert "not exact" in (last.error or "")
        open_gate(tmp_path)
        tokens, last = await read(unstarted)
        assert tokens == expected_tokens(waiting, LENGTH)


@pytest.mark.parametrize(("is_exact", "crashes"), [(True, False), (False, False), (False, True)])
async def test_core_above_its_memory_bound_is_replaced_without_losing_a_request(
    start_client: StartClient, tmp_path: Path, *, is_exact: bool, crashes: bool
) -> None:
    """The core first sheds memory twice. A model that is not exact finishes its requests before, unless it crashes."""
    if not is_exact:
        (tmp_path / "inexact").touch()
    async with start_client(stall_timeout_s=1.0) as client:
        prompts = [prompt(Command.GATE, at=10 + i, salt=i) for i in range(8)]
        streams = [client.generate(request(p, name=f"r{i}")) for i, p in enumerate(prompts)]
        heads = await asyncio.gather(*(read_some(s, 10 + i) for i, s in enumerate(streams)))
        first, leak = client.core_pid, prompt(Command.LEAK, at=5)
        assert (await read(client.generate(request(leak))))[0] == expected_tokens(leak, LENGTH)
        if not is_exact:
            await until(lambda: client.state == "restarting")
            with pytest.raises(ApiError, match="try again shortly"):
                client.generate(request(prompt()))
            assert client.core_pid == first
            assert client.load_progress is not None
            assert "its memory of" in client.load_progress.activity
            if crashes:
                assert first is not None
                os.kill(first, signal.SIGKILL)
                await until(lambda: client.core_exits == 1)
                assert "SIGKILL" in client.last_core_exit
                return
            open_gate(tmp_path)
        await until(lambda: client.restarts_total == 1 and client.state == "ready")
        assert (client.core_pid != first, client.core_exits) == (True, 0)
        assert (tmp_path / "shed").read_text() == "01"
        open_gate(tmp_path)
        tails = await asyncio.gather(*(read(stream) for stream in streams))
        for tokens, head, (tail, last) in zip(prompts, heads, tails, strict=True):
            assert head + tail == expected_tokens(tokens, LENGTH)
            assert last.finish_reason == "length"


async def test_sigkill_resumes_all_running_requests(
    start_client: StartClient, tmp_path: Path
) -> None:
    async with start_client() as client:
        prompts = [prompt(Command.GATE, at=10 + i, salt=i) for i in range(12)]
        streams = [client.generate(request(p, name=f"r{i}")) for i, p in enumerate(prompts)]
        heads = await asyncio.gather(*(read_some(s, 10 + i) for i, s in enumerate(streams)))
        assert client.core_pid is not None
        os.kill(client.core_pid, signal.SIGKILL)
        open_gate(tmp_path)
        tails = await asyncio.gather(*(read(stream) for stream in streams))
        for tokens, head, (tail, last) in zip(prompts, heads, tails, strict=True):
            assert head + tail == expected_tokens(tokens, LENGTH)
            assert last.finish_reason == "length"
        assert client.in_flight == 0


async def test_sleep_waits_for_requests_and_survives_a_crash(
    start_client: StartClient, tmp_path: Path
) -> None:
    async with start_client() as client:
        stream = client.generate(request(prompt(Command.GATE)))
        first = asyncio.create_task(client.set_sleep_level(1))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="sleeps"):
            client.generate(request(prompt()))
        assert await client.set_sleep_level(0), "the running request has kept it awake"
        assert not await first
        assert client.state == "ready"
        second = asyncio.create_task(client.set_sleep_level(2))
        await asyncio.sleep(0)
        open_gate(tmp_path)
        assert (await read(stream))[0] == expected_tokens(prompt(Command.GATE), LENGTH)
        assert await second
        assert (client.state, client.sleep_level) == ("sleeping", 2)
        assert client.core_pid is not None
        os.kill(client.core_pid, signal.SIGKILL)
        await until(lambda: client.restarts_total == 1 and client.sleep_level == 2)
        sleep, wake = client.set_sleep_level(1), client.set_sleep_level(0)
        assert list(await asyncio.gather(sleep, wake)) == [False, True]
        assert (client.state, client.wake_s) == ("ready", 0.5)
        assert (tmp_path / "slept").read_text().startswith("22")
        assert (await read(client.generate(request(prompt()))))[1].finish_reason == "length"


async def test_core_ignores_termination_signals(start_client: StartClient, tmp_path: Path) -> None:
    """A system shutdown and systemd signal all processes at once, but running requests may still finish."""
    async with start_client() as client:
        tokens = prompt(Command.GATE, at=10)
        stream = client.generate(request(tokens))
        head = await read_some(stream, 10)
        assert client.core_pid is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(client.core_pid, number)
        open_gate(tmp_path)
        tail, last = await read(stream)
        assert head + tail == expected_tokens(tokens, LENGTH)
        assert last.finish_reason == "length"
        assert client.restarts_total == 0


async def test_request_sent_before_exit_is_noticed_runs_on_next_core(
    start_client: StartClient,
) -> None:
    """The socket of a dead core accepts no messages, so the next core runs the request."""
    async with start_client() as client:
        handle = client._core  # noqa: SLF001 - no public API reaches this moment
        assert handle is not None
        os.kill(handle.pid, signal.SIGKILL)
        channel = handle._message_socket  # noqa: SLF001 - as above
        while channel.poll(0, zmq.POLLOUT):
            pass  # busy-wait, because the event loop must not notice the exit
        stream = client.generate(request(prompt()))
        tokens, last = await read(stream)
        assert tokens == expected_tokens(prompt(), LENGTH)
        assert last.finish_reason == "length"


async def test_restart_count_resets_after_progress(start_client: StartClient) -> None:
    async with start_client(restarts=CoreRestartPolicy(max_restarts=2, backoff_s=0.01)) as client:
        for salt in range(3):
            crash = prompt(Command.KILL, at=5, salt=salt)
            tokens, _ = await read(client.generate(request(crash)))
            assert tokens == expected_tokens(crash, LENGTH)
        assert client.restarts_total == 3


async def test_changed_weights_end_running_request_with_error(
    start_client: StartClient, tmp_path: Path
) -> None:
    async with start_client() as client:
        stream = client.generate(request(prompt(Command.GATE, at=5)))
        await read_some(stream, 5)
        (tmp_path / "weights").write_text("others")
        assert client.core_pid is not None
        os.kill(client.core_pid, signal.SIGKILL)
        _, last = await read(stream)
        assert last.finish_reason == "error"
        assert "replaced" in (last.error or "")
        fresh, _ = await read(client.generate(request(prompt())))
        assert fresh == expected_tokens(prompt(), LENGTH)


async def test_hanging_step_restarts_core(start_client: StartClient) -> None:
    async with start_client(stall_timeout_s=0.4) as client:
        tokens, _ = await read(client.generate(request(prompt(Command.HANG, 7))))
        assert tokens == expected_tokens(prompt(Command.HANG, 7), LENGTH)
        assert client.restarts_total >= 1


async def test_stopped_process_is_replaced(start_client: StartClient, tmp_path: Path) -> None:
    tokens = prompt(Command.GATE, at=5)
    async with start_client(stall_timeout_s=0.4) as client:
        stream = client.generate(request(tokens))
        head = await read_some(stream, 5)
        first = client.core_pid
        assert first is not None
        with suspended(first):
            open_gate(tmp_path)
            tail, _ = await read(stream)
        assert head + tail == expected_tokens(tokens, LENGTH)
        assert client.core_pid != first


async def test_poison_request_fails_and_others_complete(
    start_client: StartClient, tmp_path: Path
) -> None:
    poison = prompt(Command.EXIT, at=8, times=1000)
    async with start_client() as client:
        other_prompts = [prompt(Command.GATE, at=20, salt=i) for i in range(6)]
        streams = [client.generate(request(p, name=f"r{i}")) for i, p in enumerate(other_prompts)]
        heads = await asyncio.gather(*(read_some(stream, 20) for stream in streams))
        poison_stream = client.generate(request(poison, name="poison"))
        await until(lambda: client.state == "restarting")
        open_gate(
            tmp_path, width=5
        )  # each of them generates tokens alone, so it is not the poison request
        tokens, last = await read(poison_stream)
        assert_prefix(tokens, expected_tokens(poison, 8))
        assert last.finish_reason == "error"
        assert last.error is not None
        assert "each time it ran this request" in last.error
        open_gate(tmp_path)
        for head, stream, p in zip(heads, streams, other_prompts, strict=True):
            tail, last = await read(stream)
            assert head + tail == expected_tokens(p, LENGTH)
            assert last.finish_reason == "length"
        assert 2 <= client.restarts_total <= MAX_CRASHES


async def test_rejection_by_core_ends_that_request_only(start_client: StartClient) -> None:
    async with start_client() as client:
        good = client.generate(request(prompt(salt=1), name="good"))
        bad = client.generate(request(prompt(Command.REFUSE), name="bad"))
        assert (await read(bad))[1].finish_reason == "error"
        assert (await read(good))[0] == expected_tokens(prompt(salt=1), LENGTH)
        assert client.restarts_total == 0


async def test_exhausted_restarts_fail_engine(start_client: StartClient) -> None:
    async with start_client(restarts=CoreRestartPolicy(max_restarts=0)) as client:
        tokens, last = await read(client.generate(request(prompt(Command.KILL, 3))))
        assert_prefix(tokens, expected_tokens(prompt(Command.KILL, 3), 3))
        assert last.finish_reason == "error"
        await until(lambda: client.state == "failed")
        with pytest.raises(ApiError) as refusal:
            client.generate(request(prompt()))
        assert refusal.value.status == 503
        assert refusal.value.code == "engine_unavailable"


async def test_restarting_engine_rejects_new_requests(
    start_client: StartClient, tmp_path: Path
) -> None:
    async with start_client(
        restarts=CoreRestartPolicy(backoff_s=60.0, max_backoff_s=60.0)
    ) as client:
        stream = client.generate(request(prompt(Command.EXIT, 3)))
        await until(lambda: client.state == "restarting")
        with pytest.raises(ApiError) as refusal:
            client.generate(request(prompt()))
        assert refusal.value.retry_after_s is not None
        await client.close()
        tokens, last = await read(stream)
        assert_prefix(tokens, expected_tokens(prompt(Command.EXIT, 3), 3))
        assert last.finish_reason == "error"


async def test_closed_stream_is_not_resumed(start_client: StartClient, tmp_path: Path) -> None:
    async with start_client() as client:
        closed_stream = client.generate(
            request(prompt(Command.EXIT, at=3, times=1000), name="gone")
        )
        other = client.generate(request(prompt(Command.GATE, at=1), name="other"))
        await until(lambda: client.state == "restarting")
        closed_stream.close()
        open_gate(tmp_path)
        assert (await read(other))[0] == expected_tokens(prompt(Command.GATE, at=1), LENGTH)
        assert client.restarts_total == 1


async def test_timeout_counts_while_core_is_down(start_client: StartClient) -> None:
    async with start_client(restarts=CoreRestartPolicy(backoff_s=0.1)) as client:
        params = SamplingParams(max_tokens=LENGTH)
        tokens = prompt(Command.EXIT, 4)
        stream = client.generate(EngineRequest(id="r", prompt=tokens, params=params, timeout_s=0.1))
        output, last = await read(stream)
        assert_prefix(output, expected_tokens(tokens, 4))
        assert last.finish_reason == "timeout"


async def test_failed_load_is_retried(start_client: StartClient, tmp_path: Path) -> None:
    plan_loads(tmp_path, failing=1)
    async with start_client() as client:
        assert client.state == "ready"
        assert count_loads(tmp_path) == 2


@pytest.mark.parametrize(
    ("error", "attempts", "message"),
    [
        ("ValueError", 1, "scripted load"),
        ("OSError", 2, "Cannot allocate memory.*--kv-memory"),
    ],
)
async def test_repeated_load_failure_fails_engine(
    start_client: StartClient, tmp_path: Path, error: str, attempts: int, message: str
) -> None:
    plan_loads(tmp_path, failing=1000, error=error)
    with pytest.raises(EngineFailedError, match=message):
        async with start_client(max_load_attempts=2):
            pytest.fail("started")
    assert count_loads(tmp_path) == attempts


# --- without faults ------------------------------------------------------------------------------


async def test_equal_request_ids_stay_separate_and_slow_reader_gets_one_merged_delta(
    start_client: StartClient,
) -> None:
    async with start_client() as client:
        first = client.generate(request(prompt(salt=1), max_tokens=200, prompt_logprobs=0))
        second = client.generate(request(prompt(salt=2)))
        await until(lambda: first.is_ended)
        (delta,) = await all_deltas(first)
        assert delta.tokens == expected_tokens(prompt(salt=1), 200)
        assert [entry.token for entry in delta.prompt_logprobs] == prompt(salt=1)[1:]
        assert (delta.queue_s, delta.cached_tokens) == (0.5, 3)
        assert (await read(second))[0] == expected_tokens(prompt(salt=2), LENGTH)


async def test_closed_stream_aborts_request(start_client: StartClient, tmp_path: Path) -> None:
    async with start_client() as client:
        stream = client.generate(request(prompt(Command.GATE, at=2)))
        assert await next_delta(stream) is not None
        stream.close()
        assert client.in_flight == 0
        await until((tmp_path / "aborted").exists)
        assert (await read(client.generate(request(prompt()))))[0]


async def test_prompt_logprobs_are_not_repeated_after_crash(start_client: StartClient) -> None:
    crashing = prompt(Command.KILL, at=1)
    async with start_client() as client:
        deltas = await all_deltas(client.generate(request(crashing, prompt_logprobs=0)))
        assert client.restarts_total == 1
    scored = [entry.token for delta in deltas for entry in delta.prompt_logprobs]
    assert scored == crashing[1:]
    tokens = [token for delta in deltas for token in delta.tokens]
    assert tokens == expected_tokens(crashing, LENGTH)
    assert [d.queue_s for d in deltas if d.queue_s is not None] == [0.5]


async def test_close_ends_process_running_request_and_socket_files(
    start_client: StartClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with start_client() as client:
        # The client unlinks the sockets once the first heartbeat has arrived.
        await until(lambda: not list(tmp_path.glob("argosy-*")))
        stream = client.generate(request(prompt(Command.GATE, at=3)))
        pid = client.core_pid
        assert pid is not None
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


def has_exited(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_prestarted_process_becomes_core_and_reports_its_load(
    start_client: StartClient,
) -> None:
    reports: list[tuple[str, float]] = []
    others = set(psutil.Process().children())
    with PrestartedCore(CORE) as prestarted:
        (process,) = set(psutil.Process().children()) - others
        async with start_client(
            prestarted_core=prestarted,
            on_load_progress=lambda what, done: reports.append((what, done)),
        ) as client:
            assert client.core_pid == process.pid
            assert reports == [("weights", 0.5), ("weights", 1.0)]
            crashing = prompt(Command.KILL, at=1)
            tokens, _ = await read(client.generate(request(crashing)))
            assert tokens == expected_tokens(crashing, LENGTH)
            assert client.core_pid != process.pid


async def test_prestarted_process_that_cannot_import_its_core_exits_and_is_reported_at_start(
    tmp_path: Path,
) -> None:
    others = set(psutil.Process().children())
    with PrestartedCore("there.is.no:such_core"):
        (process,) = set(psutil.Process().children()) - others
    assert has_exited(process.pid)
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
    command = [sys.executable, "-c", PARENT, str(tmp_path), CORE]
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
