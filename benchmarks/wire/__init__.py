"""Load generator and upstream of the gateway's benchmark, in C++. Both are compiled on first use and cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
COMPILE = ("g++", "-O2", "-std=c++20", "-Wall", "-Wextra")
TOKENS_PER_S = 100
"""Tokens per second of each stream. load.cpp has the same constant."""


class WireError(Exception):
    """Raised if the load generator failed. The message contains the reason."""


def build_program(name: str, folder: Path) -> Path:
    """Return the program `name`, compiled unless the same source was compiled before.

    Raises:
        FileNotFoundError: There is no g++.
    """
    sources = [HERE / "net.hpp", HERE / f"{name}.cpp"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    program = folder / f"{name}-{digest}"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f"{name}.new"
        try:
            subprocess.run([*COMPILE, "-o", temporary, sources[1]], check=True)
        except FileNotFoundError as error:
            raise FileNotFoundError("g++ is not installed: install a C++ compiler") from error
        temporary.rename(program)
    return program


@contextlib.contextmanager
def upstream(program: Path, core: int) -> Iterator[int]:
    """Run the upstream on one core, and yield its port."""
    command = ["taskset", "-c", str(core), str(program), str(TOKENS_PER_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - stdout is a pipe
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def load(
    program: Path, core: int, arguments: list[str], sample: Callable[[], float]
) -> tuple[dict[str, Any], float]:
    """Run the load generator.

    Args:
        program: Compiled load generator.
        core: CPU core to run on.
        arguments: Command-line arguments.
        sample: Counter that is read before and after the measurement.

    Returns:
        The results, and the increase of `sample`.

    Raises:
        WireError: The load generator failed.
    """
    command = ["taskset", "-c", str(core), str(program), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101 - stdout is a pipe
        try:
            process.stdout.readline()
            before = sample()
            output = process.stdout.readline()
            rise = sample() - before
        finally:
            process.terminate()
    if not output:
        raise WireError(f"the load generator ended with status {process.returncode}")
    return json.loads(output), rise
