"""Benchmark recorder: it stops its benchmark before it exits on a signal."""

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
    time.sleep(0.3)  # as long as stopping child processes takes
    sys.stderr.write("cleaned up\\n")
"""


@pytest.mark.parametrize(
    ("sent_signal", "whole_group"), [(signal.SIGINT, True), (signal.SIGTERM, False)]
)
def test_signal_stops_the_benchmark_before_the_recorder_exits(
    sent_signal: signal.Signals, whole_group: bool, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(BENCHMARK)
    setup = "from benchmarks.processes import exit_on_sigterm; exit_on_sigterm()"
    call = f"from benchmarks.record import printed; printed([{sys.executable!r}, {str(program)!r}])"
    code = f"{setup}; {call}"
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "runs\n"
        os.killpg(process.pid, sent_signal) if whole_group else process.send_signal(sent_signal)
        assert "cleaned up" in process.stderr.read()
    assert process.returncode


def test_output_of_the_benchmark_is_returned() -> None:
    from benchmarks.processes import BOUND_EXCEEDED
    from benchmarks.record import printed

    for status in (0, BOUND_EXCEEDED):
        assert printed([sys.executable, "-c", f"print(7); exit({status})"]) == "7\n"
    with pytest.raises(SystemExit):
        printed([sys.executable, "-c", "raise SystemExit(3)"])
