"""The engine core dies, hangs and fails to load; every request is answered once, and exactly."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import zmq
from tests.chaos.conftest import Serve
from tests.support.request_deltas import all_deltas, next_delta
from tests.support.scripted_core import (
    Command,
    expected,
    loads,
    open_gate,
    plan_loads,
    prompt,
    stopped,
)
from tests.support.waiting import until

from argosy.engine.serving.core_messages import Delta, EngineRequest
from argosy.engine.serving.engine_core.delta_stream import MAX_CRASHES, DeltaStream
from argosy.engine.serving.engine_core.engine_client import EngineClient, EngineFailedError
from argosy.engine.serving.engine_core.heartbeat_monitor import CoreRestartPolicy
from argosy.protocol import ApiError, SamplingParams

LENGTH = 40


def request(
    tokens: list[int], *, name: str = "r", output: list[int] | None = None
) -> EngineRequest:
    params = SamplingParams(max_tokens=LENGTH)
    return EngineRequest(id=name, prompt=tokens, resumed_tokens=output or [], params=params)


async def read(stream: DeltaStream) -> tuple[list[int], Delta]:
    """All tokens, and the last delta. Checks that the end came once."""
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


def assert_prefix(tokens: list[int], whole: list[int]) -> None:
    """What a dying core had not yet sent is lost, and made again if there is a next time."""
    assert tokens == whole[: len(tokens)]


async def until_state(client: EngineClient, state: str) -> None:
    await until(lambda: client.state == state)


@pytest.mark.parametrize("at", [0, 1, 20, LENGTH - 1])
@pytest.mark.parametrize("command", [Command.EXIT, Command.KILL, Command.RAISE])
async def test_crash_is_only_a_pause(serve: Serve, command: Command, at: int) -> None:
    async with serve() as client:
        tokens, last = await read(client.generate(request(prompt(command, at))))
        assert tokens == expected(prompt(command, at), LENGTH)
        assert last.finish_reason == "length"
        assert client.restarts_total == 1
        assert client.state == "ready"


async def test_crash_of_a_request_that_was_resumed_already(serve: Serve) -> None:
    tokens = prompt(Command.EXIT, 20)
    before = expected(tokens, 15)
    async with serve() as client:
        after, _ = await read(client.generate(request(tokens, output=before)))
        assert before + after == expected(tokens, LENGTH)


async def test_killed_from_outside_while_many_run(serve: Serve, tmp_path: Path) -> None:
    async with serve() as client:
        prompts = [prompt(Command.GATE, at=10 + i, salt=i) for i in range(12)]
        streams = [client.generate(request(p, name=f"r{i}")) for i, p in enumerate(prompts)]
        heads = await asyncio.gather(*(read_some(s, 10 + i) for i, s in enumerate(streams)))
        assert client.core_pid is not None
        os.kill(client.core_pid, signal.SIGKILL)
        open_gate(tmp_path)
        tails = await asyncio.gather(*(read(stream) for stream in streams))
        for tokens, head, (tail, last) in zip(prompts, heads, tails, strict=True):
            assert head + tail == expected(tokens, LENGTH)
            assert last.finish_reason == "length"
        assert client.in_flight == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_told_to_leave_with_all_others_it_stays_until_its_parent_says_so(
    serve: Serve, tmp_path: Path, number: signal.Signals
) -> None:
    """A system that goes down, and systemd, tell every process at once, and running requests have their time."""
    async with serve() as client:
        tokens = prompt(Command.GATE, at=10)
        stream = client.generate(request(tokens))
        head = await read_some(stream, 10)
        assert client.core_pid is not None
        os.kill(client.core_pid, number)
        open_gate(tmp_path)
        tail, last = await read(stream)
        assert head + tail == expected(tokens, LENGTH)
        assert last.finish_reason == "length"
        assert client.restarts_total == 0


async def test_a_request_between_death_and_its_discovery(serve: Serve) -> None:
    """The channel to a dead core takes nothing; the request belongs to the next core."""
    async with serve() as client:
        handle = client._core  # noqa: SLF001 - the window is inside
        assert handle is not None
        os.kill(handle.pid, signal.SIGKILL)
        channel = handle._message_socket  # noqa: SLF001 - as above
        while channel.poll(0, zmq.POLLOUT):
            pass  # the event loop must not get to hear of the death
        stream = client.generate(request(prompt()))
        tokens, last = await read(stream)
        assert tokens == expected(prompt(), LENGTH)
        assert last.finish_reason == "length"


async def test_a_core_that_finishes_requests_is_restarted_for_ever(serve: Serve) -> None:
    async with serve(restarts=CoreRestartPolicy(max_restarts=2, backoff_s=0.01)) as client:
        for salt in range(6):
            crash = prompt(Command.KILL, at=5, salt=salt)
            tokens, _ = await read(client.generate(request(crash)))
            assert tokens == expected(crash, LENGTH)
        assert client.restarts_total == 6


async def test_a_request_never_goes_on_with_other_weights(serve: Serve, tmp_path: Path) -> None:
    async with serve() as client:
        stream = client.generate(request(prompt(Command.GATE, at=5)))
        await read_some(stream, 5)
        (tmp_path / "weights").write_text("others")
        assert client.core_pid is not None
        os.kill(client.core_pid, signal.SIGKILL)
        _, last = await read(stream)
        assert last.finish_reason == "error"
        assert "replaced" in (last.error or "")
        fresh, _ = await read(client.generate(request(prompt())))
        assert fresh == expected(prompt(), LENGTH)


async def test_hanging_step_is_noticed(serve: Serve) -> None:
    async with serve(stall_timeout_s=0.4) as client:
        tokens, _ = await read(client.generate(request(prompt(Command.HANG, 7))))
        assert tokens == expected(prompt(Command.HANG, 7), LENGTH)
        assert client.restarts_total >= 1


async def test_stopped_process_is_noticed_and_replaced(serve: Serve, tmp_path: Path) -> None:
    tokens = prompt(Command.GATE, at=5)
    async with serve(stall_timeout_s=0.4) as client:
        stream = client.generate(request(tokens))
        head = await read_some(stream, 5)
        first = client.core_pid
        assert first is not None
        with stopped(first):
            open_gate(tmp_path)
            tail, _ = await read(stream)
        assert head + tail == expected(tokens, LENGTH)
        assert client.core_pid != first


async def test_idle_core_is_left_alone(serve: Serve) -> None:
    async with serve(stall_timeout_s=0.2) as client:
        pid = client.core_pid
        await asyncio.sleep(1.0)  # five times the limit: an idle core makes no steps
        assert client.core_pid == pid


async def test_poison_is_given_up_and_spares_its_neighbours(serve: Serve, tmp_path: Path) -> None:
    poison = prompt(Command.EXIT, at=8, times=1000)
    async with serve() as client:
        innocent = [prompt(Command.GATE, at=20, salt=i) for i in range(6)]
        streams = [client.generate(request(p, name=f"r{i}")) for i, p in enumerate(innocent)]
        heads = await asyncio.gather(*(read_some(stream, 20) for stream in streams))
        doomed = client.generate(request(poison, name="poison"))
        await until_state(client, "restarting")
        open_gate(tmp_path, width=5)  # so that each shows that it is not the culprit
        tokens, last = await read(doomed)
        assert_prefix(tokens, expected(poison, 8))
        assert last.finish_reason == "error"
        assert last.error is not None
        assert "each time it ran this request" in last.error
        open_gate(tmp_path)
        for head, stream, p in zip(heads, streams, innocent, strict=True):
            tail, last = await read(stream)
            assert head + tail == expected(p, LENGTH)
            assert last.finish_reason == "length"
        assert 2 <= client.restarts_total <= MAX_CRASHES


async def test_refusal_by_the_core_ends_that_request_only(serve: Serve) -> None:
    async with serve() as client:
        good = client.generate(request(prompt(salt=1), name="good"))
        bad = client.generate(request(prompt(Command.REFUSE), name="bad"))
        assert (await read(bad))[1].finish_reason == "error"
        assert (await read(good))[0] == expected(prompt(salt=1), LENGTH)
        assert client.restarts_total == 0


async def test_restarts_run_out(serve: Serve) -> None:
    async with serve(restarts=CoreRestartPolicy(max_restarts=0)) as client:
        tokens, last = await read(client.generate(request(prompt(Command.KILL, 3))))
        assert_prefix(tokens, expected(prompt(Command.KILL, 3), 3))
        assert last.finish_reason == "error"
        await until_state(client, "failed")
        with pytest.raises(ApiError) as refusal:
            client.generate(request(prompt()))
        assert refusal.value.status == 503
        assert refusal.value.code == "engine_unavailable"


async def test_no_new_requests_while_restarting(serve: Serve, tmp_path: Path) -> None:
    async with serve(restarts=CoreRestartPolicy(backoff_s=60.0, max_backoff_s=60.0)) as client:
        stream = client.generate(request(prompt(Command.EXIT, 3)))
        await until_state(client, "restarting")
        with pytest.raises(ApiError) as refusal:
            client.generate(request(prompt()))
        assert refusal.value.retry_after_s is not None
        await client.close()
        tokens, last = await read(stream)
        assert_prefix(tokens, expected(prompt(Command.EXIT, 3), 3))
        assert last.finish_reason == "error"


async def test_closed_stream_is_not_resumed(serve: Serve, tmp_path: Path) -> None:
    async with serve() as client:
        gone = client.generate(request(prompt(Command.EXIT, at=3, times=1000), name="gone"))
        other = client.generate(request(prompt(Command.GATE, at=1), name="other"))
        await until_state(client, "restarting")
        gone.close()
        open_gate(tmp_path)
        assert (await read(other))[0] == expected(prompt(Command.GATE, at=1), LENGTH)
        assert client.restarts_total == 1


async def test_time_runs_while_the_core_is_down(serve: Serve) -> None:
    async with serve(restarts=CoreRestartPolicy(backoff_s=0.1)) as client:
        params = SamplingParams(max_tokens=LENGTH)
        tokens = prompt(Command.EXIT, 4)
        stream = client.generate(EngineRequest(id="r", prompt=tokens, params=params, timeout_s=0.1))
        output, last = await read(stream)
        assert_prefix(output, expected(tokens, 4))
        assert last.finish_reason == "timeout"


async def test_load_is_tried_again(serve: Serve, tmp_path: Path) -> None:
    plan_loads(tmp_path, failing=1)
    async with serve() as client:
        assert client.state == "ready"
        assert loads(tmp_path) == 2


@pytest.mark.parametrize(
    ("error", "attempts", "said"),
    [
        ("RuntimeError", 3, "scripted load"),
        ("ValueError", 1, "scripted load"),
        ("OSError", 3, "Cannot allocate memory.*--kv-memory"),
    ],
)
async def test_load_fails_for_good(
    serve: Serve, tmp_path: Path, error: str, attempts: int, said: str
) -> None:
    plan_loads(tmp_path, failing=1000, error=error)
    with pytest.raises(EngineFailedError, match=said):
        async with serve():
            pytest.fail("started")
    assert loads(tmp_path) == attempts


async def test_process_that_cannot_import_its_core(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    with pytest.raises(EngineFailedError, match="tests"):
        async with serve():
            pytest.fail("started")
