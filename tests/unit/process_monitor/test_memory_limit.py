"""Memory limits of replicas: cgroups where one can be created, else the memory that is watched."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from argosy.process_monitor.memory_limit import MemoryLimit, read_memory_bytes


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
