"""Python blocks of the documentation, run in one process, because its imports take longer than the blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

END_OF_BLOCK = "end-of-block"
RUN_BLOCKS = f"""
import json, sys
for number, code in enumerate(json.load(sys.stdin)):
    exec(compile(code, f"block {{number}}", "exec"), {{"__name__": "__main__"}})
    print("{END_OF_BLOCK}", flush=True)
"""


def run_python_blocks(blocks: Sequence[str]) -> list[str]:
    """Run each block without the names of the others. Returns what each prints."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_BLOCKS],
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(END_OF_BLOCK)[: len(blocks)]
