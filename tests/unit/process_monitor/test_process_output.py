"""Logs of replicas: rotation, a full disk, and the line that explains a failure."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from argosy.process_monitor import read_log_end
from argosy.process_monitor.process_output import RotatingLog


def test_rotation_keeps_one_older_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = RotatingLog(path, max_bytes=8)
    for line in (b"first 1\n", b"second\n", b"third 3\n", b"fourth 4\n"):
        log.write(line)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert read_log_end(path, 1000) == b"second\nthird 3\nfourth 4\n"
    assert read_log_end(path, 11) == b"3\nfourth 4\n"


def test_output_is_dropped_while_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = RotatingLog(path, max_bytes=1000)
    log.write(b"before\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limits[1]))
    try:
        log.write(b"lost\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
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
