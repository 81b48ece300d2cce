"""`LocalProcessLauncher`: the contract of launchers, and what concerns processes of one machine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.fleet.launcher_suite import (
    LauncherSuite,
    end,
    has_exited,
    read_pid,
    spec,
    start,
    wait_for,
)
from tests.support.full_disk import full_disk
from tests.support.waiting import until

from argosy.deployment import LaunchResources
from argosy.fleet.launchers import LaunchError, LaunchState, LocalProcessLauncher
from argosy.fleet.launchers.gpu_reservations import GpuReservations


class LocalEnvironment:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_launcher(self, **options: object) -> LocalProcessLauncher:
        return LocalProcessLauncher(self.folder, **options)  # type: ignore[arg-type]


@pytest.fixture
def environment(tmp_path: Path) -> LocalEnvironment:
    return LocalEnvironment(tmp_path / "fleet")


class TestContract(LauncherSuite):
    """The shared contract."""


@pytest.fixture
async def launcher(environment: LocalEnvironment) -> AsyncIterator[LocalProcessLauncher]:
    launcher = environment.create_launcher(shutdown_grace_s=0.0)
    yield launcher
    await end(launcher)


@pytest.fixture
def gpus(tmp_path: Path) -> GpuReservations:
    """Two GPUs of this machine that no other test uses."""
    return GpuReservations(tmp_path / "gpus", lambda: ["GPU-zero-1", "GPU-one-2"])


def replica_processes(folder: Path) -> list[psutil.Process]:
    """Return all processes of replicas of the folder, without their monitors."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_of_folder = process.environ().get("ARGOSY_REPLICA", "").startswith(f"{folder}:")
            if is_of_folder and "argosy.process_monitor" not in process.cmdline():
                found.append(process)
    return found


def monitor_of(pid: int) -> psutil.Process:
    parent = psutil.Process(pid).parent()
    assert parent is not None
    assert "argosy.process_monitor" in parent.cmdline()
    return parent


async def test_stop_and_crash_leave_no_descendant(
    launcher: LocalProcessLauncher, environment: LocalEnvironment
) -> None:
    pid = await start(launcher, spec("fork"))
    assert len(replica_processes(environment.folder)) == 2
    os.kill(pid, signal.SIGSEGV)
    crashed = await wait_for(launcher, has_exited)
    assert crashed.reason == "it crashed with SIGSEGV"
    assert replica_processes(environment.folder) == []
    pid = await start(launcher, spec("fork"))
    os.kill(pid, signal.SIGSTOP)
    await launcher.stop("a-1-0", 1)
    assert replica_processes(environment.folder) == []


async def test_replica_whose_folder_was_removed_starts_anew(
    launcher: LocalProcessLauncher, environment: LocalEnvironment
) -> None:
    pid = await start(launcher, spec())
    shutil.rmtree(environment.folder / "replicas")
    (environment.folder / "replicas").mkdir()
    assert await launcher.list_replicas() == {}
    assert await start(launcher, spec()) != pid
    await until(lambda: not psutil.pid_exists(pid))
    assert len(replica_processes(environment.folder)) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_killed_or_stopped_monitor_leaves_no_process(
    launcher: LocalProcessLauncher,
    environment: LocalEnvironment,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("argosy.fleet.launchers.monitor_processes.RESPONSE_TIMEOUT_S", 0.1)
    pid = await start(launcher, spec("fork"))
    monitor_of(pid).send_signal(number)
    if number == signal.SIGSTOP:
        await launcher.stop("a-1-0", 1)
    exited = await wait_for(launcher, has_exited)
    assert exited.reason == "its monitor was killed, or the machine restarted"
    assert exited.exited_at is not None
    assert replica_processes(environment.folder) == []
    await launcher.start(spec(), 1)
    assert (await launcher.list_replicas())["a-1-0"].attempt == 2


async def test_damaged_status_is_replaced(
    launcher: LocalProcessLauncher, environment: LocalEnvironment
) -> None:
    """A machine that loses its power may leave an empty file."""
    await launcher.start(spec(), 1)
    await launcher.stop("a-1-0", 1)
    status = environment.folder / "replicas" / "a-1-0" / "status.json"
    status.write_bytes(b"")
    assert (await wait_for(launcher, has_exited)).attempt == 1
    assert status.read_bytes()


async def test_drain_deadline_holds_without_launcher(
    launcher: LocalProcessLauncher, environment: LocalEnvironment
) -> None:
    monitor = monitor_of(await start(launcher, spec("ignore-sigterm", drain_deadline_s=0.2)))
    await launcher.drain("a-1-0", 1)
    assert (await launcher.list_replicas())["a-1-0"].state == LaunchState.DRAINING
    await launcher.close()
    adopter = environment.create_launcher()
    killed = await wait_for(adopter, has_exited)
    assert killed.reason == "it did not exit within 0.2 s of the drain and was killed"
    await until(lambda: not monitor.is_running())  # reaped, although its launcher is closed
    await adopter.close()


async def test_port_is_reserved_and_replaced_if_taken(launcher: LocalProcessLauncher) -> None:
    specs = [spec(name=f"a-1-{number}", address="{port}") for number in range(3)]
    await asyncio.gather(*(launcher.start(each, 1) for each in specs))
    replicas = await launcher.list_replicas()
    assert len({replica.url for replica in replicas.values()}) == 3
    await asyncio.gather(*map(read_pid, replicas.values()))
    url = replicas["a-1-0"].url
    assert url is not None
    port = int(url.rpartition(":")[2])
    await launcher.stop("a-1-0", 1)
    await launcher.start(specs[0], 1)
    again = (await launcher.list_replicas())["a-1-0"]
    assert again.url == url
    await read_pid(again)
    await launcher.stop("a-1-0", 1)
    with socket.create_server(("127.0.0.1", port)):
        await launcher.start(specs[0], 1)
        moved = (await launcher.list_replicas())["a-1-0"]
        assert moved.url not in {replica.url for replica in replicas.values()}
        await read_pid(moved)


SECRETS = ("ARGOSY_STORE", "DB_PASSWORD", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN")


@pytest.mark.parametrize(
    ("options", "fields", "known"),
    [
        ({}, {}, set()),
        ({}, {"environment": {"HF_TOKEN": "secret"}}, {"HF_TOKEN"}),  # as its pool declares
        ({"has_credentials": True}, {}, {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN"}),
        ({}, {"inherits_environment": True}, set(SECRETS)),
    ],
)
async def test_process_gets_the_variables_of_its_kind(
    environment: LocalEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, bool],
    fields: dict[str, object],
    known: set[str],
) -> None:
    public = ("HF_HOME", "HTTPS_PROXY", "VLLM_LOGGING_LEVEL")
    for name in (*SECRETS, *public):
        monkeypatch.setenv(name, "secret")
    launcher = environment.create_launcher(**options)
    names = (*SECRETS, *public)
    behaviours = [f"printenv={name}" for name in names]
    await launcher.start(spec(*behaviours, **fields), 1)  # type: ignore[arg-type] # as `spec` takes them
    await read_pid((await launcher.list_replicas())["a-1-0"])
    log = ""
    while "listening" not in log:  # its monitor writes what it prints a moment later
        log = (await launcher.read_log("a-1-0", 1000)).decode()
    await end(launcher)
    seen = {name for name in names if f"{name}=secret" in log}
    assert seen == known.union(public)


async def test_replica_waits_for_a_gpu_until_another_exits(
    environment: LocalEnvironment, gpus: GpuReservations
) -> None:
    launcher = environment.create_launcher(count_gpus=lambda: 2, gpu_reservations=gpus)
    names = ["a-1-0", "a-1-1", "a-1-2"]
    resources = LaunchResources(accelerators=1)
    for name in names:
        await launcher.start(
            spec("printenv=CUDA_VISIBLE_DEVICES", name=name, resources=resources), 1
        )
    await launcher.start(spec("printenv=CUDA_VISIBLE_DEVICES", name="cpu-1-0"), 1)
    replicas = dict(await launcher.list_replicas())
    waiting = replicas.pop("a-1-2")
    assert (waiting.state, waiting.reason) == (
        LaunchState.PROVISIONING,
        "waiting for a GPU of this machine",
    )
    await asyncio.gather(*map(read_pid, replicas.values()))
    await launcher.stop("a-1-1", 1)
    started = await wait_for(
        launcher, lambda replica: replica.state == LaunchState.RUNNING, "a-1-2"
    )
    await read_pid(started)
    logs = [await launcher.read_log(name, 100) for name in (*names, "cpu-1-0")]
    assert [log.splitlines()[0].partition(b"=")[2] for log in logs] == [b"0", b"1", b"1", b""]
    await launcher.start(spec(name="a-1-1", resources=resources), 1)
    await launcher.stop("a-1-1", 1)  # while it waits
    assert (await launcher.list_replicas())["a-1-1"].state == LaunchState.EXITED
    with pytest.raises(LaunchError, match="3 GPUs, but this machine has 2"):
        await launcher.start(spec(name="b-1-0", resources=LaunchResources(accelerators=3)), 1)
    await end(launcher)


async def test_fleets_of_one_machine_share_its_gpus(
    tmp_path: Path, gpus: GpuReservations, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = LaunchResources(accelerators=1)
    launchers = []
    for fleet, visible in (("a", "0"), ("b", "GPU-zero"), ("c", "1,GPU-zero")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        launchers.append(
            LocalProcessLauncher(tmp_path / fleet, count_gpus=lambda: 2, gpu_reservations=gpus)
        )
        await launchers[-1].start(spec(name=f"{fleet}-1-0", resources=resources), 1)
    first, second, third = launchers
    (waiting,) = (await second.list_replicas()).values()
    assert waiting.reason == "waiting for a GPU of this machine"
    await read_pid((await third.list_replicas())["c-1-0"])
    monitor_of(await read_pid((await first.list_replicas())["a-1-0"])).kill()
    await first.close()  # its replica keeps the GPU
    assert (await second.list_replicas())["b-1-0"].state == LaunchState.PROVISIONING
    adopter = LocalProcessLauncher(tmp_path / "a", count_gpus=lambda: 2, gpu_reservations=gpus)
    await wait_for(adopter, has_exited)  # it ends what the killed monitor left
    await wait_for(second, lambda replica: replica.state == LaunchState.RUNNING, "b-1-0")
    await end(adopter, second, third)


async def test_limits_cpus_and_memory(
    launcher: LocalProcessLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = LaunchResources(cpus=0.5, memory_bytes=64 << 20)
    pid = await start(launcher, spec(resources=resources))
    assert len(os.sched_getaffinity(pid)) == 1
    await launcher.start(spec(f"allocate={100 << 20}", name="b-1-0", resources=resources), 1)
    killed = await wait_for(launcher, has_exited, "b-1-0")
    assert killed.ran_out_of_memory
    assert killed.reason == "it exceeded its memory limit of 64 MiB"
    assert (await launcher.list_replicas())["a-1-0"].state == LaunchState.RUNNING


async def test_reports_reach_the_launcher(launcher: LocalProcessLauncher) -> None:
    reports = [
        '{"activity": "loading weights", "progress": 0.5}',
        "no report",
        '{"error": "the model has no tokenizer"}',
    ]
    await launcher.start(spec(*(f"report={report}" for report in reports)), 1)
    loading = await wait_for(launcher, lambda replica: bool(replica.start_error))
    assert (loading.activity, loading.progress) == ("loading weights", 0.5)
    assert not loading.has_reported_ready
    os.kill(await read_pid(loading), signal.SIGTERM)
    assert (await wait_for(launcher, has_exited)).reason == (
        "it could not start: the model has no tokenizer"
    )
    await launcher.start(spec('report={"is_serving": true}'), 1)
    await wait_for(launcher, lambda replica: replica.has_reported_ready)


async def test_native_replica_reports_its_start(launcher: LocalProcessLauncher) -> None:
    command = (sys.executable, "-P", "-m", "argosy.cli", "replica", "--uds", "{socket}")
    options = ("--threads", "1", "--kv-memory", "64MiB")
    await launcher.start(spec(command=(*command, *options), drain_deadline_s=60.0), 1)
    await launcher.start(spec(name="b-1-0", command=(*command, "/no-such-model")), 1)
    ready = await wait_for(launcher, lambda replica: replica.has_reported_ready)
    assert ready.activity
    assert ready.progress == 1.0
    refused = await wait_for(launcher, has_exited, "b-1-0")
    assert "/no-such-model" in refused.start_error
    assert refused.reason == f"it could not start: {refused.start_error}"
    await launcher.drain("a-1-0", 1)
    drained = await wait_for(launcher, has_exited)
    assert (drained.reason, drained.exit_status) == ("it was drained", 0)


@pytest.mark.parametrize("epoch_is_stored", [False, True])
async def test_full_disk_starts_nothing(
    launcher: LocalProcessLauncher, environment: LocalEnvironment, epoch_is_stored: bool
) -> None:
    if epoch_is_stored:
        await launcher.stop("unknown-1-0", 1)
    with full_disk(), pytest.raises(LaunchError, match="File too large"):
        await launcher.start(spec(), 1)
    assert await launcher.list_replicas() == {}
    assert replica_processes(environment.folder) == []
    await launcher.start(spec(), 1)


def test_unusable_locks_of_gpus_are_refused(tmp_path: Path) -> None:
    (tmp_path / "gpus").symlink_to(tmp_path)
    (tmp_path / "0.lock").symlink_to(tmp_path / "other")
    for folder in (tmp_path / "gpus", tmp_path):
        with (
            pytest.raises(LaunchError, match="let this user write to"),
            GpuReservations(folder).reserve(1, ["0"]),
        ):
            pass
    assert not (tmp_path / "other").exists()


def test_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="Not a directory"):
        LocalProcessLauncher(tmp_path / "file/fleet")


async def test_launcher_that_holds_the_lock_is_named(
    launcher: LocalProcessLauncher, environment: LocalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.fleet.launchers.replica_folder.LOCK_TIMEOUT_S", 0.0)
    await launcher.stop("unknown-1-0", 1)
    with (environment.folder / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match="lslocks"):
            await launcher.start(spec(), 1)


async def test_replicas_die_with_closed_or_killed_launcher(environment: LocalEnvironment) -> None:
    launcher = environment.create_launcher(die_with_launcher=True)
    await start(launcher, spec("fork"))
    await launcher.close()
    assert replica_processes(environment.folder) == []
    with run_killed_launcher(environment.folder) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        processes = replica_processes(environment.folder)
        assert len(processes) == 2
        process.kill()
    assert psutil.wait_procs(processes, timeout=20)[1] == []


@pytest.mark.parametrize(
    "step", [53, pytest.param(1, marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)])]
)
async def test_start_of_killed_launcher_neither_loses_nor_doubles_the_replica(
    environment: LocalEnvironment, step: int
) -> None:
    launcher = environment.create_launcher()
    states = set()
    with run_killed_launcher(environment.folder, str(step)) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        for _line in process.stdout:
            before = (await launcher.list_replicas()).get("a-1-0")
            states.add(None if before is None else before.state)
            pid = await wait_for_answer_or_exit(launcher)
            await launcher.start(spec("fork"), 1)
            running_pid = await wait_for_answer_or_exit(launcher)
            assert running_pid is not None
            assert pid in {None, running_pid}
            assert len(replica_processes(environment.folder)) == 2
            await launcher.stop("a-1-0", 1)
            await launcher.remove("a-1-0", 1)
            process.stdin.write("\n")
            process.stdin.flush()
    assert {None, LaunchState.RUNNING} <= states
    await launcher.close()


async def wait_for_answer_or_exit(launcher: LocalProcessLauncher) -> int | None:
    """Return the pid of the replica, or None if it does not run, as after a start that was not completed."""
    replica = (await launcher.list_replicas()).get("a-1-0")
    if replica is None:
        return None
    answer = asyncio.create_task(read_pid(replica))
    exit_ = asyncio.create_task(wait_for(launcher, has_exited))
    await asyncio.wait({answer, exit_}, return_when=asyncio.FIRST_COMPLETED)
    answer.cancel()
    exit_.cancel()
    return answer.result() if answer.done() else None


@contextlib.contextmanager
def run_killed_launcher(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run `tests.support.killed_launcher`."""
    command = [sys.executable, "-m", "tests.support.killed_launcher", *map(str, arguments)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
