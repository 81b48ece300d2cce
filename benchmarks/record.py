"""Run a benchmark, and save its rows as data with machine, versions and command.

python -m benchmarks.record scheduler
python -m benchmarks.record engine:int8 --engines argosy-int8   (saved separately as DATE-engine-int8.json)
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

from benchmarks.processes import BOUND_EXCEEDED, exit_on_sigterm

HERE = Path(__file__).resolve().parent
PACKAGES = ("argosy", "torch", "numpy")


def machine() -> dict[str, str | int]:
    """Return the properties of the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    entries = [line.split(":", 1) for line in lines if ":" in line]
    fields = {name.strip(): value.strip() for name, value in reversed(entries)}
    flags = fields.get("flags", "").split()
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cpus": sum(name.strip() == "processor" for name, _ in entries),
        "units": " ".join(
            flag for flag in flags if flag.startswith(("amx", "avx512_bf16", "avx512_vnni"))
        ),
        "memory_gib": round(int(memory_kib()) / 2**20),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def memory_kib() -> str:
    """Return the memory of the machine in KiB."""
    return Path("/proc/meminfo").read_text().split()[1]


def printed(command: list[str]) -> str:
    """Return the standard output of `command`.

    If this process is interrupted it waits for the command, which cleans up its own processes.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            output = _read_output(process)
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):  # Ctrl-C reaches both processes
                process.terminate()
            process.wait()
            raise
    if process.returncode not in (0, BOUND_EXCEEDED):
        raise SystemExit(process.returncode)
    return output


def _read_output(process: subprocess.Popen[str]) -> str:
    """Read the whole output, with short waits, because a signal just before a wait does not interrupt it."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=0.5)[0]


def main() -> None:
    """Run `benchmarks.NAME` with further arguments, and write benchmarks/results/DATE-NAME[-LABEL].json."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        sys.exit(__doc__)
    target, *arguments = sys.argv[1:]
    name, _, label = target.partition(":")
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    exit_on_sigterm()
    output = printed(command)
    result = {
        "benchmark": name,
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *arguments]),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "machine": machine(),
        "versions": {package: version(package) for package in PACKAGES},
        "rows": [json.loads(line) for line in output.splitlines() if line.startswith("{")],
    }
    print("".join(line for line in output.splitlines(keepends=True) if not line.startswith("{")))
    path = HERE / "results" / f"{result['date']}-{'-'.join(filter(None, (name, label)))}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
