"""Native builds: compiled once, rebuilt if damaged, and kept in the user's own folder."""

from __future__ import annotations

import ctypes
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support.home_folders import remove_home

from argosy.native import (
    CompilerError,
    NativeUnavailableError,
    build_library,
    compiler_version,
    prebuild_library,
)

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

FLAGS = ("-shared", "-fPIC")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "small" / "csrc"
    folder.mkdir(parents=True)
    (folder / "small.cpp").write_text('extern "C" int answer() { return 42; }')
    return folder


@pytest.mark.parametrize("written_bytes", [0, 10, 5000])
def test_damaged_library_is_rebuilt(sources: Path, tmp_path: Path, written_bytes: int) -> None:
    first = build_library(sources, FLAGS, build_folder=tmp_path)
    content = first.read_bytes()
    first.write_bytes(content[:written_bytes].ljust(len(content), b"\0") if written_bytes else b"")
    again = build_library(sources, FLAGS, build_folder=tmp_path)
    assert again == first
    assert ctypes.CDLL(str(again)).answer() == 42


def test_complete_build_is_reused(sources: Path, tmp_path: Path) -> None:
    first = build_library(sources, FLAGS, build_folder=tmp_path)
    inode = first.stat().st_ino
    assert build_library(sources, FLAGS, build_folder=tmp_path).stat().st_ino == inode


def test_prebuilt_library_is_used_without_a_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt = prebuild_library(sources, FLAGS, tmp_path / "prebuilt")
    version = compiler_version(prebuilt)
    monkeypatch.setenv("ARGOSY_NATIVE_FOLDER", str(tmp_path / "prebuilt"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build_library(sources, FLAGS) == prebuilt
    assert compiler_version(prebuilt) == version != ""
    with pytest.raises(NativeUnavailableError, match="install g"):
        build_library(sources, (*FLAGS, "-O2"))
    prebuilt.write_bytes(prebuilt.read_bytes()[:-1])
    with pytest.raises(NativeUnavailableError, match="install g"):
        build_library(sources, FLAGS)


SYNCHRONIZED_COMPILER = """#!/bin/sh
case "$*" in *" -c "*)
    : > {marks}/$$
    until [ "$(ls {marks} | wc -l)" = 2 ]; do sleep 0.01; done
esac
exec c++ "$@"
"""
"""Compiler that starts once a second process has also reached it."""
BUILD_PROGRAM = """
import sys
from pathlib import Path
from argosy.native import build_library
sources, compiler, folder = sys.argv[1:4]
print(build_library(Path(sources), sys.argv[4:], compiler=compiler, build_folder=Path(folder)))
"""


def test_concurrent_builds_share_one_result(sources: Path, tmp_path: Path) -> None:
    marks, compiler, folder = tmp_path / "marks", tmp_path / "compiler", tmp_path / "built"
    marks.mkdir()
    compiler.write_text(SYNCHRONIZED_COMPILER.format(marks=marks))
    compiler.chmod(0o755)
    command = [sys.executable, "-c", BUILD_PROGRAM, *map(str, (sources, compiler, folder)), *FLAGS]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    (built,) = folder.rglob("*.so")
    assert paths == {str(built)}
    assert list(built.parent.iterdir()) == [built]


def test_fallback_folder_is_private_to_the_user(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no folder"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = build_library(sources, FLAGS)
    assert build_library(sources, FLAGS) == first
    fallback_folder = first.parents[1]
    assert stat.S_IMODE(fallback_folder.stat().st_mode) == 0o700
    fallback_folder.chmod(0o777)
    assert build_library(sources, FLAGS).parents[1] != fallback_folder


def test_full_disk_is_not_reported_as_compiler_error(sources: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        "#!/bin/sh\n[ $# = 1 ] || { echo x.o: No space left on device >&2; exit 1; }"
    )
    compiler.chmod(0o755)
    with pytest.raises(NativeUnavailableError, match="make room") as caught:
        build_library(sources, FLAGS, compiler=str(compiler), build_folder=tmp_path)
    assert not isinstance(caught.value, CompilerError)


def test_build_needs_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_home(monkeypatch, tmp_path)
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "nothing.cpp").touch()
    built = build_library(tmp_path / "sources", ("-fPIC",))
    assert built.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["sources"]
