"""C++ sources, built with the system's compiler on first use and kept for every process after that."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from argosy.folders import cache_folder

BUILD_TIMEOUT_S = 120.0
DISK_FULL_MESSAGE = os.strerror(errno.ENOSPC)
LOAD_FAILURE_REMEDY = (
    "delete it to rebuild, or have XDG_CACHE_HOME name a folder that is not mounted noexec"
)
"""What to do about a library that was built, and does not load."""
CHECKSUM_BYTES = hashlib.sha256().digest_size


class NativeUnavailableError(Exception):
    """Native code cannot be had here; the message says why, and what would help."""


class CompilerError(NativeUnavailableError):
    """The compiler does not take these sources with these flags."""


def build_library(
    sources: Path,
    flags: tuple[str, ...],
    *,
    compiler: str | None = None,
    build_folder: Path | None = None,
) -> Path:
    """The shared library of all sources in that folder, built when no earlier process has.

    compiler: name or path; None takes $CXX, else c++, g++ or clang++.
    folder: where builds are kept; None takes argosy/native in the user's cache directory.
    Safe with several processes at once. Raises NativeUnavailable.
    """
    program = _find_compiler(compiler)
    kept = build_folder or _default_build_folder()
    path = kept / _fingerprint(sources, program, flags) / f"{sources.parent.name}.so"
    if not _is_intact(path):
        _compile_library(sources, program, flags, path)
    return path


def _find_compiler(compiler: str | None) -> str:
    """The compiler's path."""
    wanted = (compiler,) if compiler else (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    for name in wanted:
        program = shutil.which(name) if name else None
        if program:
            return program
    raise NativeUnavailableError("no C++ compiler found; install g++, or set CXX to one")


def _default_build_folder() -> Path:
    """Where builds are kept: among temporary files when the cache cannot be written."""
    try:
        folder = cache_folder() / "native"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return _temporary_folder()


def _temporary_folder() -> Path:
    """This user's own, the same for every process; one of this process where somebody else could write to it."""
    folder = Path(tempfile.gettempdir()) / f"argosy-native-{os.getuid()}"
    with contextlib.suppress(OSError):  # it may be a file of somebody else's
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if private and status.st_uid == os.getuid():
            return folder
    return Path(tempfile.mkdtemp(prefix="argosy-native-"))


def _fingerprint(sources: Path, program: str, flags: tuple[str, ...]) -> str:
    """What a build depends on, hashed: sources, flags, compiler and the CPU's features."""
    digest = hashlib.sha256()
    for source in sorted(sources.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join((program, *flags, platform.machine(), _cpu_features())).encode())
    digest.update(_run_compiler(program, "--version").encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """The model and feature lines of the first CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    first = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(x for x in first if x.startswith(("model name", "flags", "Features", "CPU")))


def _compile_library(sources: Path, program: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile into a file of our own, then rename: other processes see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            built = Path(work) / path.name
            compile_one = partial(_compile_source, program, flags, Path(work))
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, sorted(sources.glob("*.cpp"))))
            _run_compiler(program, *flags, "-shared", *objects, "-o", str(built))
            _append_checksum(built)
            built.replace(path)
    except OSError as error:
        raise NativeUnavailableError(
            f"cannot write {path.parent} ({error}); make it writable"
        ) from error


def _append_checksum(library: Path) -> None:
    """Put the sum of a library behind it, where no loader looks, and both on the disk."""
    sealed = _checksum(library.read_bytes())
    with library.open("ab") as file:
        file.write(sealed)
        file.flush()
        os.fsync(file.fileno())


def _is_intact(library: Path) -> bool:
    """Whether it is there as it was sealed: a process that loads a damaged one dies of it."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-CHECKSUM_BYTES:] == _checksum(content[:-CHECKSUM_BYTES])


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _compile_source(program: str, flags: tuple[str, ...], folder: Path, source: Path) -> str:
    """Compile one file; the object's path."""
    compiled = str(folder / f"{source.stem}.o")
    _run_compiler(program, *flags, "-c", str(source), "-o", compiled)
    return compiled


def _run_compiler(program: str, *arguments: str) -> str:
    """Run the compiler and return its output. Raises CompilerFailed with the end of its errors."""
    try:
        done = subprocess.run(  # noqa: S603 - the compiler that the user has
            (program, *arguments),
            capture_output=True,
            text=True,
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        if DISK_FULL_MESSAGE in error.stderr:
            raise NativeUnavailableError(
                f"{DISK_FULL_MESSAGE} for what {program} writes; make room there"
            ) from error
        raise CompilerError(f"{program} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(f"{program} cannot be run: {error}") from error
    return done.stdout
