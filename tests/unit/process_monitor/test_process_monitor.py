"""Monitor of a process: its log with the line that explains a failure, and its memory limit."""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.full_disk import full_disk

from argosy.process_monitor import read_log_end
from argosy.process_monitor.memory_limit import MemoryLimit, read_memory_bytes
from argosy.process_monitor.process_output import RotatingLog


def test_rotation_keeps_one_older_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.touch(0o644)
    log = RotatingLog(path, max_bytes=8)
    for line in (b"first 1\n", b"second\n", b"third 3\n", b"fourth 4\n"):
        log.write(line)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert read_log_end(path, 1000) == b"second\nthird 3\nfourth 4\n"
    assert read_log_end(path, 11) == b"3\nfourth 4\n"


def test_output_is_dropped_while_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = RotatingLog(path, max_bytes=1000)
    log.write(b"before\n")
    with full_disk(path.stat().st_size):
        log.write(b"lost\n")
    assert log.last_line == "lost"
    log.write(b"after\n")
    assert path.read_text() == "before\n[5 bytes of output could not be written]\nafter\n"


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", ""),
        ("one\ntwo\n\n  \n", "two"),
        ("╭─ Error ─╮\n│ No such option: --x │\n╰─────────╯\n", "No such option: --x"),
        ("x" * 5000, "x" * 300),
    ],
)
def test_last_line_has_words(tmp_path: Path, output: str, line: str) -> None:
    log = RotatingLog(tmp_path / "a.log", max_bytes=1 << 20)
    log.write(output.encode())
    assert log.last_line == line


@pytest.mark.parametrize("controllers", ["cpu", "cpu memory"])
def test_cgroup_enforces_limit_where_one_can_be_created(tmp_path: Path, controllers: str) -> None:
    """The files are those of cgroup v2, in an ordinary folder."""
    (tmp_path / "cgroup.subtree_control").write_text(controllers)
    limit = MemoryLimit("replica", 1 << 30, (tmp_path / "of another user", tmp_path))
    limit.add(123)
    cgroup = tmp_path / "replica"
    assert not limit.is_watched
    assert (cgroup / "memory.max").read_text() == str(1 << 30)
    assert (cgroup / "memory.oom.group").read_text() == "1"
    assert (cgroup / "cgroup.procs").read_text() == "123"
    if controllers == "cpu":
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    assert not limit.is_exceeded(os.getpid())
    (cgroup / "memory.events").write_text("oom 1\noom_kill 1\n")
    assert limit.is_exceeded(os.getpid())
    assert limit.reason == "it exceeded its memory limit of 1 GiB"


def test_memory_is_watched_without_cgroup(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    limit = MemoryLimit("replica", 1, (tmp_path / "missing", tmp_path / "file"))
    assert limit.is_watched
    assert limit.is_exceeded(os.getpid())


def test_memory_of_descendants_counts_without_mapped_files(tmp_path: Path) -> None:
    size = 40 << 20
    before = read_memory_bytes(os.getpid())
    program = f"memory = b'x' * {size}; print(flush=True); input()"
    command = [sys.executable, "-I", "-S", "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with (tmp_path / "weights").open("wb+") as file:
            file.truncate(size)
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as weights:
                assert weights.find(b"x") == -1
                used = read_memory_bytes(os.getpid()) - before
        process.communicate()
    assert size <= used < 1.5 * size
