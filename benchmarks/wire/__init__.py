"""The load generator and the upstream of the gateway's benchmark: C++, built on first use and kept by their source."""

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
"""Of each stream; load.cpp has it too."""


class WireError(Exception):
    """The load generator did not get on; the message says why."""


def built(name: str, folder: Path) -> Path:
    """The program `name`, compiled unless the same source was before. Raises FileNotFoundError without g++."""
    sources = [HERE / "net.hpp", HERE / f"{name}.cpp"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    program = folder / f"{name}-{digest}"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{name}.new"
        try:
            subprocess.run([*COMPILE, "-o", made, sources[1]], check=True)
        except FileNotFoundError as error:
            raise FileNotFoundError("g++ is not there: install a C++ compiler") from error
        made.rename(program)
    return program


@contextlib.contextmanager
def upstream(program: Path, core: int) -> Iterator[int]:
    """The port of a running upstream on one core."""
    command = ["taskset", "-c", str(core), str(program), str(TOKENS_PER_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None  # noqa: S101 - it was asked for
            yield int(process.stdout.readline())
        finally:
            process.terminate()


def load(
    program: Path, core: int, arguments: list[str], sample: Callable[[], float]
) -> tuple[dict[str, Any], float]:
    """What the load generator found, and how much `sample` rose while it counted. Raises WireError."""
    command = ["taskset", "-c", str(core), str(program), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        try:
            process.stdout.readline()
            before = sample()
            told = process.stdout.readline()
            rise = sample() - before
        finally:
            process.terminate()
    if not told:
        raise WireError(f"the load generator ended with status {process.returncode}")
    return json.loads(told), rise
