"""What keeps the rows of a benchmark ends when it is told to, and the benchmark before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    print("{}", flush=True)
    sys.stderr.write("runs\\n")
    sys.stderr.flush()
    signal.pause()
finally:
    time.sleep(1.0)  # as long as it takes to end what it started
    sys.stderr.write("ended all\\n")
"""


@pytest.mark.parametrize(
    ("number", "whole_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)]
)
def test_a_benchmark_ends_what_it_started(
    number: signal.Signals, whole_group: bool, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(BENCHMARK)
    keep = "from benchmarks.record import heed_sigterm, printed; heed_sigterm(); printed"
    code = f"{keep}([{sys.executable!r}, {str(program)!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "runs\n"
        os.killpg(process.pid, number) if whole_group else process.send_signal(number)
        assert "ended all" in process.stderr.read()
    assert process.returncode


def test_what_a_benchmark_prints_is_had() -> None:
    from benchmarks.record import printed

    assert printed([sys.executable, "-c", "print(7)"]) == "7\n"
    with pytest.raises(SystemExit):
        printed([sys.executable, "-c", "raise SystemExit(3)"])
