"""Measure the own engine on a GPU in a few minutes, in stages that cannot stop each other.

    python -m benchmarks.gpu_session [--toy] [--stage NAME]... [--output FILE] [--limit 480]
    python -m benchmarks.gpu_session --prepare FOLDER   (downloads wheels for a machine without a network)

Each stage of `benchmarks.gpu_stages` runs in a process of its own, which is killed with its process group at its limit.
Each row is a line of JSON in the output file, which is flushed after every line. With --toy, all stages run at small
sizes on the CPU and in Triton's interpreter. Clocks and temperature are read before and after, and never set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.processes import BOUND_EXCEEDED, exit_on_sigterm
from benchmarks.record import machine

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
LIMITS_S = {
    "environment": 25.0,
    "tests": 75.0,
    "correctness": 90.0,
    "kernels": 90.0,
    "model": 90.0,
    "load": 60.0,
    "peers": 40.0,
}
"""Limit of each stage, in the order of the session. They sum to less than eight minutes."""
NVIDIA_SMI = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used",
    "--format=csv,noheader",
)
WHEELS = (
    *("aiohappyeyeballs", "cffi", "cryptography", "gguf", "google-re2", "httpcore2", "httptools"),
    *("httpx2", "hypothesis", "jsonschema_rs", "llguidance", "msgspec", "prometheus_client"),
    *("pytest", "pytest-asyncio", "pytest-timeout", "pyzmq", "structlog", "truststore", "uvloop"),
    "websockets",
)
"""Packages that the engine and its tests import, beyond torch, Triton, transformers and what these bring."""
LAST_LINES = 30
"""Lines of standard error that the row of a failed stage has."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Command that prints rows as lines of JSON, and its limit."""

    command: Sequence[str]
    limit_s: float


def run_session(stages: Mapping[str, Stage], output: Path, limit_s: float) -> list[Row]:
    """Run the stages one after the other, and write each row to `output` at once.

    A stage that fails, exits or exceeds its limit does not stop the next. No stage runs beyond `limit_s` in all.
    """
    rows: list[Row] = []
    lock = threading.Lock()
    end = time.monotonic() + limit_s
    with output.open("w") as file:

        def write(row: Row) -> None:
            with lock:
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()

        write({"stage": "session", "machine": machine(), "nvidia_smi": _read_clocks()})
        for name, stage in stages.items():
            seconds = min(stage.limit_s, end - time.monotonic())
            if seconds <= 0:
                write({"stage": name, "status": "skipped", "reason": "the session's limit is over"})
                continue
            write(_run_stage(name, stage.command, seconds, write))
        write({"stage": "session", "nvidia_smi": _read_clocks()})
    return rows


def _run_stage(
    name: str, command: Sequence[str], limit_s: float, write: Callable[[Row], None]
) -> Row:
    """Run one stage, and return the row of its end."""
    started_at, status = time.monotonic(), "done"
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        # A daemon, because a process that left the group could keep the pipe open.
        reader = threading.Thread(
            target=_copy_rows, args=(name, process.stdout, write), daemon=True
        )
        reader.start()
        try:
            if process.wait(limit_s):
                status = "failed"
        except subprocess.TimeoutExpired:
            status = "timed out"
        finally:
            _kill_group(process)
        reader.join(5)
        row = {"stage": name, "status": status, "seconds": round(time.monotonic() - started_at, 2)}
        if status == "done":
            return row
        errors.seek(0)
        lines = errors.read().splitlines()[-LAST_LINES:]
        return row | {"exit": process.returncode, "stderr": lines}


def _copy_rows(name: str, pipe: IO[bytes], write: Callable[[Row], None]) -> None:
    with pipe:
        for line in pipe:
            if line.startswith(b"{"):
                try:
                    row = json.loads(line)
                except ValueError:  # the stage was killed in the middle of a line
                    row = {"unreadable": line.decode(errors="replace")[:200]}
                write({"stage": name, **row})


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_clocks() -> str | None:
    """Return the line of nvidia-smi, or None without it."""
    try:
        return subprocess.run(
            NVIDIA_SMI, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def format_summary(rows: Sequence[Row]) -> str:
    """Return a line for each stage with its status and last failure, and one for each row with a verdict."""
    lines = []
    for row in rows:
        if "status" in row:
            reason = row.get("reason") or next(reversed(row.get("stderr", ())), "")
            lines.append(
                f"{row['stage']:12} {row['status']:10} {row.get('seconds', 0):7.1f} s  {reason}"
            )
        elif "correct" in row:
            verdict = "right" if row["correct"] else "WRONG"
            lines.append(f"{row['stage']:12} {verdict:10} {row.get('case')}")
    return "\n".join(lines)


def prepare(folder: Path, python: str = "3.12") -> None:
    """Download the wheels that the machine of a session lacks, in the versions of constraints.txt."""
    folder = folder.resolve()
    pins = dict(
        line.split("==", 1)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    names = {name.lower().replace("_", "-"): (name, version) for name, version in pins.items()}
    wanted = ["==".join(names[name.lower().replace("_", "-")]) for name in WHEELS]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *platforms]
    command += ["--platform=manylinux2014_x86_64", "--dest", str(folder), *wanted]
    subprocess.run(command, check=True)
    own = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "."]
    subprocess.run([*own, "--wheel-dir", str(folder)], check=True, cwd=ROOT)  # for its metadata
    print(
        "There: python3 -m pip install --no-index --no-deps --target /tmp/site "
        f"{folder}/*.whl && PYTHONPATH=src:/tmp/site python3 -m benchmarks.gpu_session"
    )


def main() -> None:
    """Run the chosen stages, and print the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="small sizes, without a GPU")
    parser.add_argument("--stage", action="append", choices=tuple(LIMITS_S), help="default: all")
    parser.add_argument("--output", type=Path, default=Path("gpu-session.jsonl"))
    parser.add_argument("--limit", type=float, default=480.0, help="seconds in all")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.prepare:
        prepare(options.prepare)
        return
    exit_on_sigterm()
    stages = {
        name: Stage(
            [sys.executable, "-m", "benchmarks.gpu_stages", name, *["--toy"] * options.toy], limit_s
        )
        for name, limit_s in LIMITS_S.items()
        if name in (options.stage or LIMITS_S)
    }
    rows = run_session(stages, options.output, options.limit)
    print(format_summary(rows))
    print(options.output)
    if any(row.get("status", "done") != "done" or row.get("correct") is False for row in rows):
        sys.exit(BOUND_EXCEEDED)


if __name__ == "__main__":
    main()
