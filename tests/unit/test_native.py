"""C++ that is built once and kept: whole, or built again; in this user's own folder."""

from __future__ import annotations

import ctypes
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from argosy.native import CompilerError, NativeUnavailableError, build_library

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

FLAGS = ("-shared", "-fPIC")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "small" / "csrc"
    folder.mkdir(parents=True)
    (folder / "small.cpp").write_text('extern "C" int answer() { return 42; }')
    return folder


@pytest.mark.parametrize("left", [0, 10, 5000])
def test_what_a_power_failure_left_of_a_build_is_built_again(
    sources: Path, tmp_path: Path, left: int
) -> None:
    first = build_library(sources, FLAGS, build_folder=tmp_path)
    whole = first.read_bytes()
    first.write_bytes(whole[:left].ljust(len(whole), b"\0") if left else b"")
    again = build_library(sources, FLAGS, build_folder=tmp_path)
    assert again == first
    assert ctypes.CDLL(str(again)).answer() == 42


def test_a_whole_build_is_kept(sources: Path, tmp_path: Path) -> None:
    first = build_library(sources, FLAGS, build_folder=tmp_path)
    made = first.stat().st_ino
    assert build_library(sources, FLAGS, build_folder=tmp_path).stat().st_ino == made


MEETING = """#!/bin/sh
case "$*" in *" -c "*)
    : > {there}/$$
    until [ "$(ls {there} | wc -l)" = 2 ]; do sleep 0.01; done
esac
exec c++ "$@"
"""
"""A compiler that begins once another process has come as far."""
BUILDS = """
import sys
from pathlib import Path
from argosy.native import build_library
sources, compiler, folder = sys.argv[1:4]
print(build_library(Path(sources), sys.argv[4:], compiler=compiler, build_folder=Path(folder)))
"""


def test_processes_that_build_at_once_share_one_result(sources: Path, tmp_path: Path) -> None:
    there, compiler, folder = tmp_path / "there", tmp_path / "meeting", tmp_path / "built"
    there.mkdir()
    compiler.write_text(MEETING.format(there=there))
    compiler.chmod(0o755)
    command = [sys.executable, "-c", BUILDS, *map(str, (sources, compiler, folder)), *FLAGS]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    (built,) = folder.rglob("*.so")
    assert printed == {str(built)}
    assert list(built.parent.iterdir()) == [built]


def test_without_a_cache_there_is_one_folder_of_the_user(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = build_library(sources, FLAGS)
    assert build_library(sources, FLAGS) == first
    kept = first.parents[1]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    kept.chmod(0o777)
    assert build_library(sources, FLAGS).parents[1] != kept


def test_a_full_disk_is_not_taken_for_flags_that_are_unknown(sources: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n[ $# = 1 ] || { echo x.o: No space left on device >&2; exit 1; }"
    )
    compiler.chmod(0o755)
    with pytest.raises(NativeUnavailableError, match="make room") as refused:
        build_library(sources, FLAGS, compiler=str(compiler), build_folder=tmp_path)
    assert not isinstance(refused.value, CompilerError)
