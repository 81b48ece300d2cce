"""Build of C++ sources with the system's compiler, in advance or on first use, and a cache of the built libraries."""

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
from functools import cache, partial
from pathlib import Path

from argosy.folders import cache_folder

BUILD_TIMEOUT_S = 300.0
DISK_FULL_MESSAGE = os.strerror(errno.ENOSPC)
LOAD_FAILURE_REMEDY = (
    "delete it to rebuild, or have XDG_CACHE_HOME name a folder that is not mounted noexec"
)
"""Remedy for the error message of a built library that does not load."""
CHECKSUM_BYTES = hashlib.sha256().digest_size
PREBUILT_VARIABLE = "ARGOSY_NATIVE_FOLDER"
"""Environment variable with the folder of `prebuild_library`, for machines without a compiler."""


class NativeUnavailableError(Exception):
    """Native code is not available. The message contains the reason and the remedy."""


class CompilerError(NativeUnavailableError):
    """The compiler rejects the sources or flags."""


def build_library(
    sources: Path,
    flags: tuple[str, ...],
    *,
    compiler: str | None = None,
    build_folder: Path | None = None,
) -> Path:
    """Return the shared library of all sources in a folder, building it unless an earlier process did.

    Several processes may call this at the same time. Builds are cached in argosy/native of the user's cache folder,
    unless `build_folder` names another one.

    Args:
        sources: Folder of the C++ sources.
        flags: Compiler flags.
        compiler: Name or path; None for the library that was built in advance, or else $CXX, c++, g++ or clang++.
        build_folder: Folder of the cached builds.

    Raises:
        NativeUnavailableError: The library cannot be built.
    """
    prebuilt_folder = os.environ.get(PREBUILT_VARIABLE)
    if prebuilt_folder and compiler is None:
        prebuilt = _prebuilt_path(Path(prebuilt_folder), sources, flags)
        if _is_intact(prebuilt):
            return prebuilt
    program = _find_compiler(compiler)
    folder = build_folder or _default_build_folder()
    path = folder / _fingerprint(sources, program, flags) / f"{sources.parent.name}.so"
    if not _is_intact(path):
        _compile_library(sources, program, flags, path)
    return path


def prebuild_library(sources: Path, flags: tuple[str, ...], folder: Path) -> Path:
    """Build a library for machines without a compiler, which find it by `$ARGOSY_NATIVE_FOLDER`.

    The flags must select a CPU, not `native`: the library is loaded on any machine of the same architecture.

    Raises:
        NativeUnavailableError: The library cannot be built.
    """
    program = _find_compiler(None)
    path = _prebuilt_path(folder, sources, flags)
    _compile_library(sources, program, flags, path)
    _version_path(path).write_text(_compiler_version(program), encoding="utf-8")
    return path


def _prebuilt_path(folder: Path, sources: Path, flags: tuple[str, ...]) -> Path:
    return folder / _digest_inputs(sources, flags).hexdigest()[:24] / f"{sources.parent.name}.so"


def _version_path(library: Path) -> Path:
    """Return the path of the version of the compiler that built a library in advance."""
    return library.with_suffix(".compiler")


def _find_compiler(compiler: str | None) -> str:
    """Return the path of the compiler."""
    names = (compiler,) if compiler else (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    for name in names:
        program = shutil.which(name) if name else None
        if program:
            return program
    raise NativeUnavailableError("no C++ compiler found; install g++, or set CXX to one")


def _default_build_folder() -> Path:
    """Return the folder of the cached builds; a temporary folder if the user's cache is not writable."""
    try:
        folder = cache_folder() / "native"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return _temporary_folder()


def _temporary_folder() -> Path:
    """Return a private folder of this user that all processes share.

    If another user could write to that folder, a new one for this process is returned.
    """
    folder = Path(tempfile.gettempdir()) / f"argosy-native-{os.getuid()}"
    with contextlib.suppress(OSError):  # the path may belong to another user
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if private and status.st_uid == os.getuid():
            return folder
    return Path(tempfile.mkdtemp(prefix="argosy-native-"))


def _fingerprint(sources: Path, program: str, flags: tuple[str, ...]) -> str:
    """Return a hash of the inputs of a build, which are sources, flags, compiler version and CPU features."""
    digest = _digest_inputs(sources, flags)
    digest.update("\0".join((program, _cpu_features(), _compiler_version(program))).encode())
    return digest.hexdigest()[:24]


def _digest_inputs(sources: Path, flags: tuple[str, ...]) -> hashlib._Hash:
    """Return a hash of the inputs of a build that do not depend on the machine's compiler and CPU."""
    digest = hashlib.sha256()
    for source in sorted(sources.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join((*flags, platform.machine(), "")).encode())
    return digest


def _cpu_features() -> str:
    """Return the model and feature lines of the first CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    lines = text.split("\n\n", 1)[0].splitlines()
    return "\n".join(
        line for line in lines if line.startswith(("model name", "flags", "Features", "CPU"))
    )


def compiler_version(library: Path) -> str:
    """Return the first line of the version of a library's compiler, such as `c++ (Debian 12.2.0) 12.2.0`.

    Raises:
        NativeUnavailableError: The compiler is not found any more, or cannot be run.
    """
    try:
        version = _version_path(library).read_text(encoding="utf-8")
    except (
        FileNotFoundError
    ):  # built on this machine, or a new compiler would have built another library
        version = _compiler_version(_find_compiler(None))
    return version.partition("\n")[0]


@cache
def _compiler_version(program: str) -> str:
    return _run_compiler(program, "--version")


def _compile_library(sources: Path, program: str, flags: tuple[str, ...], path: Path) -> None:
    """Compile into a temporary file and rename it, so that other processes see a complete library or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work_folder:
            library = Path(work_folder) / path.name
            compile_source = partial(_compile_source, program, flags, Path(work_folder))
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_source, sorted(sources.glob("*.cpp"))))
            _run_compiler(program, *flags, "-shared", *objects, "-o", str(library))
            _append_checksum(library)
            library.replace(path)
    except OSError as error:
        raise NativeUnavailableError(
            f"cannot write {path.parent} ({error}); make it writable"
        ) from error


def _append_checksum(library: Path) -> None:
    """Append the checksum of a library to its file, which loaders ignore, and sync the file to disk."""
    checksum = _checksum(library.read_bytes())
    with library.open("ab") as file:
        file.write(checksum)
        file.flush()
        os.fsync(file.fileno())


def _is_intact(library: Path) -> bool:
    """Return whether a library exists and matches its checksum, because loading a damaged one crashes the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-CHECKSUM_BYTES:] == _checksum(content[:-CHECKSUM_BYTES])


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def _compile_source(program: str, flags: tuple[str, ...], folder: Path, source: Path) -> str:
    """Compile one source file and return the path of the object file."""
    object_file = str(folder / f"{source.stem}.o")
    _run_compiler(program, *flags, "-c", str(source), "-o", object_file)
    return object_file


def _run_compiler(program: str, *arguments: str) -> str:
    """Run the compiler and return its output.

    Raises:
        CompilerError: The compiler failed. The message contains the end of its error output.
        NativeUnavailableError: The compiler could not be run, or the disk is full.
    """
    try:
        result = subprocess.run(  # noqa: S603 - the user's own compiler
            (program, *arguments),
            capture_output=True,
            text=True,
            check=True,
            timeout=BUILD_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        if DISK_FULL_MESSAGE in error.stderr:
            raise NativeUnavailableError(
                f"{DISK_FULL_MESSAGE} for the output of {program}; make room on the disk"
            ) from error
        raise CompilerError(f"{program} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailableError(
            f"{program} cannot be run ({error}); install a working compiler or set CXX to one"
        ) from error
    return result.stdout
