"""Keeper of a controller: one for each fleet, which restarts the controller and ends with it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.full_disk import full_disk
from tests.support.waiting import until

from argosy.controller_keeper import LOCK_NAME, LOG_NAME, rotate_log, stop_keeper

CONTROLLER = """
import os, pathlib, sys, time
pid = pathlib.Path(sys.argv[1]) / f"pid-{os.getpid()}"
pid.touch()
time.sleep(60)
"""
"""Stands for a controller. It leaves a file that is named after its process."""

StartKeeper = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start_keeper(tmp_path: Path) -> Iterator[StartKeeper]:
    keepers: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        controller = [sys.executable, "-I", "-S", "-c", CONTROLLER, str(tmp_path)]
        command = [sys.executable, "-P", "-m", "argosy.controller_keeper", str(tmp_path)]
        keepers.append(subprocess.Popen([*command, *controller]))
        return keepers[-1]

    yield start
    for keeper in keepers:
        keeper.kill()
        keeper.wait()
    for pid in controllers(tmp_path):
        os.kill(pid, signal.SIGKILL)


def controllers(folder: Path) -> list[int]:
    """Return the process ids of the controllers that run."""
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def test_keeper_restarts_its_controller_and_ends_with_it(
    tmp_path: Path, start_keeper: StartKeeper
) -> None:
    keeper = start_keeper()
    await until(lambda: controllers(tmp_path))
    (first,) = controllers(tmp_path)
    assert stat.S_IMODE((tmp_path / LOG_NAME).stat().st_mode) == 0o600
    os.kill(first, signal.SIGKILL)
    await until(lambda: controllers(tmp_path) not in ([first], []))
    assert await asyncio.to_thread(stop_keeper, tmp_path)
    assert keeper.wait() == 0
    assert controllers(tmp_path) == []


async def test_keeper_waits_for_one_that_is_about_to_end(
    tmp_path: Path, start_keeper: StartKeeper
) -> None:
    with (tmp_path / LOCK_NAME).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        keeper = start_keeper()
        await until(lambda: has_opened(keeper.pid, tmp_path / LOCK_NAME))
        assert controllers(tmp_path) == []
    await until(lambda: controllers(tmp_path))
    keeper.terminate()
    assert keeper.wait() == 0


def has_opened(pid: int, path: Path) -> bool:
    return any(file.resolve() == path for file in Path(f"/proc/{pid}/fd").iterdir())


def test_log_is_bounded_while_the_controller_writes_it(tmp_path: Path) -> None:
    path, older = tmp_path / LOG_NAME, tmp_path / f"{LOG_NAME}.1"
    with path.open("a") as log:
        for text in ("first", "second"):
            print(text, file=log, flush=True)
            rotate_log(path, 4)
            assert (path.read_text(), older.read_text()) == ("", f"{text}\n")
        print("third", file=log, flush=True)
        with full_disk(4), pytest.raises(OSError, match="too large"):
            rotate_log(path, 4)
        assert path.read_text() == ""
