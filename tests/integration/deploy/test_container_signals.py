"""Signals of a command that is process 1 of a container, where the system ignores what a process does not handle."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.support.waiting import until

NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


async def test_sigterm_ends_process_one_before_a_server_handles_it() -> None:
    probe = await asyncio.create_subprocess_exec(*NAMESPACE, "true")
    if await probe.wait():
        pytest.skip("no permission for a process namespace (unshare --user --pid)")
    # The command waits for its standard input, and handles no signals itself.
    process = await asyncio.create_subprocess_exec(
        *(*NAMESPACE, sys.executable, "-m", "argosy.cli", "embed"), stdin=asyncio.subprocess.PIPE
    )

    def ends_after_sigterm() -> bool:
        if process.returncode is not None:
            return True
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
            for child in children.split():
                os.kill(int(child), signal.SIGTERM)
        return False

    try:
        await until(ends_after_sigterm)
        assert process.returncode == 128 + signal.SIGTERM
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
