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
FULL = os.strerror(errno.ENOSPC)
UNLOADABLE = "delete it to rebuild, or have XDG_CACHE_HOME name a folder that is not mounted noexec"
"""What to do about a library that was built, and does not load."""
SUM_BYTES = hashlib.sha256().digest_size


class NativeUnavailable(Exception):  # noqa: N818 - a state of the machine, with its remedy
    """Native code cannot be had here; the message says why, and what would help."""


class CompilerFailed(NativeUnavailable):
    """The compiler does not take these sources with these flags."""


def build(
    sources: Path,
    flags: tuple[str, ...],
    *,
    compiler: str | None = None,
    folder: Path | None = None,
) -> Path:
    """The shared library of all sources in that folder, built when no earlier process has.

    compiler: name or path; None takes $CXX, else c++, g++ or clang++.
    folder: where builds are kept; None takes argosy/native in the user's cache directory.
    Safe with several processes at once. Raises NativeUnavailable.
    """
    program = _find_compiler(compiler)
    kept = folder or _cache_folder()
    path = kept / _fingerprint(sources, program, flags) / f"{sources.parent.name}.so"
    if not _is_whole(path):
        _build(sources, program, flags, path)
    return path


def _find_compiler(compiler: str | None) -> str:
    """The compiler's path."""
    wanted = (compiler,) if compiler else (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    for name in wanted:
        program = shutil.which(name) if name else None
        if program:
            return program
    raise NativeUnavailable("no C++ compiler found; install g++, or set CXX to one")


def _cache_folder() -> Path:
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
    digest.update(_run(program, "--version").encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    """The model and feature lines of the first CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    first = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(x for x in first if x.startswith(("model name", "flags", "Features", "CPU")))


def _build(sources: Path, program: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile into a file of our own, then rename: other processes see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            built = Path(work) / path.name
            compile_one = partial(_compile, program, flags, Path(work))
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, sorted(sources.glob("*.cpp"))))
            _run(program, *flags, "-shared", *objects, "-o", str(built))
            _seal(built)
            built.replace(path)
    except OSError as error:
        raise NativeUnavailable(
            f"cannot write {path.parent} ({error}); make it writable"
        ) from error


def _seal(library: Path) -> None:
    """Put the sum of a library behind it, where no loader looks, and both on the disk."""
    sealed = _sum(library.read_bytes())
    with library.open("ab") as file:
        file.write(sealed)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(library: Path) -> bool:
    """Whether it is there as it was sealed: a process that loads a damaged one dies of it."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-SUM_BYTES:] == _sum(content[:-SUM_BYTES])


def _sum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _compile(program: str, flags: tuple[str, ...], folder: Path, source: Path) -> str:
    """Compile one file; the object's path."""
    compiled = str(folder / f"{source.stem}.o")
    _run(program, *flags, "-c", str(source), "-o", compiled)
    return compiled


def _run(program: str, *arguments: str) -> str:
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
        if FULL in error.stderr:
            raise NativeUnavailable(f"{FULL} for what {program} writes; make room there") from error
        raise CompilerFailed(f"{program} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{program} cannot be run: {error}") from error
    return done.stdout
