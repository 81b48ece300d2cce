"""Runs a benchmark and keeps its rows as data, with machine, versions and command.

python -m benchmarks.record scheduler
python -m benchmarks.record engine:int8 --engines argosy-int8   (kept apart as DATE-engine-int8.json)
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from benchmarks.processes import heed_sigterm

HERE = Path(__file__).resolve().parent
PACKAGES = ("argosy", "torch", "numpy")


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = [line.split(":", 1) for line in lines if ":" in line]
    fields = {name.strip(): value.strip() for name, value in reversed(found)}
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpus": sum(name.strip() == "processor" for name, _ in found),
        "units": " ".join(
            flag for flag in flags if flag.startswith(("amx", "avx512_bf16", "avx512_vnni"))
        ),
        "memory_gib": round(int(memory_kib()) / 2**20),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def memory_kib() -> str:
    """Memory of the machine."""
    return Path("/proc/meminfo").read_text().split()[1]


def printed(command: list[str]) -> str:
    """What `command` prints. Whatever ends this waits for it: what it started is its own to end."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = _said(process)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # Ctrl-C is told to both
                process.terminate()
            process.wait()
            raise
    if process.returncode:
        raise SystemExit(process.returncode)
    return said


def _said(process: subprocess.Popen[str]) -> str:
    """All that it prints. A signal that comes just before a wait does not end it: so none is long."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=0.5)[0]


def main() -> None:
    """Run `benchmarks.NAME`, with any further arguments, and write benchmarks/results/DATE-NAME[-LABEL].json."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        sys.exit(__doc__)
    told, *arguments = sys.argv[1:]
    name, _, label = told.partition(":")
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    heed_sigterm()
    said = printed(command)
    result = {
        "benchmark": name,
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *arguments]),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {package: version(package) for package in PACKAGES},
        "rows": [json.loads(line) for line in said.splitlines() if line.startswith("{")],
    }
    print("".join(line for line in said.splitlines(keepends=True) if not line.startswith("{")))
    path = HERE / "results" / f"{result['date']}-{'-'.join(filter(None, (name, label)))}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
