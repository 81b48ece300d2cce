"""Backups and drills by the schedule of the settings. Of the gateways of a store, one runs each."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Callable, Sequence
from functools import partial

import structlog

from argosy.backup import BackupCommand, BackupStatus, DrillResult, change_status, read_status
from argosy.deployment import BackupConfig
from argosy.process import kill_with_parent, run_in_daemon_thread
from argosy.store import FleetStore

POLL_INTERVAL_S = 30.0

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")


class BackupScheduler:
    """Runs `argosy backup` as child processes, so that no request waits for it. Use it from one event loop.

    Args:
        store: The store of all gateways.
        store_url: Its URL.
        blobs: Place of the contents of files; None for the default of the store.
        config: The schedule. None runs nothing, and only reads what other processes have done.
        holder: Name of this gateway.
    """

    def __init__(
        self,
        store: FleetStore,
        store_url: str,
        blobs: str | None,
        config: BackupConfig | None,
        holder: str,
    ) -> None:
        self._store = store
        self._environment = {"ARGOSY_STORE": store_url}
        if blobs is not None:
            self._environment["ARGOSY_BLOBS"] = blobs
        self._config = config
        self._holder = holder
        self._status = BackupStatus()

    def read_gauges(self) -> dict[str, dict[str, float]]:
        """Return the field of `GatewayGauges` about backups."""
        status, now = self._status, time.time()
        gauges: dict[str, float] = {}
        if status.created_at is not None:
            gauges["backup_age_seconds"] = now - status.created_at
        if status.drills:
            latest = status.drills[-1]
            gauges["backup_drill_passed"] = not latest.problem
            gauges["backup_drill_age_seconds"] = now - latest.at
            gauges["backup_drill_restore_seconds"] = latest.restore_s
            gauges["backup_drill_loss_seconds"] = latest.backup_age_s
        return {"backups": gauges}

    async def run(self) -> None:
        """Poll the store, and run what is due, until cancelled."""
        problem = ""
        while True:
            try:
                self._status = await run_in_daemon_thread(read_status, self._store)
                if self._config is not None and await self._run_due(self._config):
                    continue
                problem = ""
            except (ValueError, OSError) as error:  # the store, or the start of the process
                if str(error) != problem:
                    log.warning("backup_failed", reason=str(error))
                problem = str(error)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _run_due(self, config: BackupConfig) -> bool:
        """Run what is due, after no other gateway can begin the same. Returns False if nothing is."""
        now = time.time()
        due = partial(
            BackupStatus.find_due,
            every_s=config.every_s,
            drill_every_s=config.drill_every_s,
            now=now,
        )
        if due(self._status) is None:
            return False
        claimed = await run_in_daemon_thread(
            change_status,
            self._store,
            lambda status: status.with_holder(self._holder, now) if due(status) else None,
        )
        command = None if claimed is None else due(claimed.with_holder("", now))
        if command is None:
            return False
        await self._run_command(command, config.build_command(command))
        return True

    async def _run_command(self, command: BackupCommand, arguments: Sequence[str]) -> None:
        started_at = time.time()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "argosy.cli", "backup", *arguments),
            stdout=PIPE,
            stderr=STDOUT,
            env=os.environ | self._environment,
            preexec_fn=partial(kill_with_parent, os.getpid()),
        )
        output = asyncio.create_task(process.communicate())
        try:
            while not (await asyncio.wait({output}, timeout=POLL_INTERVAL_S))[0]:
                await self._change(lambda status: status.with_holder(self._holder, time.time()))
            text = output.result()[0].decode(errors="replace").strip()
        finally:
            if process.returncode is None:
                process.kill()
        duration_s = round(time.time() - started_at, 3)
        if process.returncode == 0:
            log.info("backup_ended", command=command, duration_s=duration_s, output=text)
        else:
            log.warning("backup_failed", command=command, duration_s=duration_s, reason=text)
        failure = text if process.returncode else ""
        await self._change(lambda status: _record(status, command, failure, started_at))

    async def _change(self, change: Callable[[BackupStatus], BackupStatus]) -> None:
        changed = await run_in_daemon_thread(change_status, self._store, change)
        self._status = changed or self._status


def _record(
    status: BackupStatus, command: BackupCommand, failure: str, started_at: float
) -> BackupStatus:
    """Return the state after a command has ended. A command that passed, and a drill that failed, recorded it."""
    now = time.time()
    status = status.with_holder("", now)
    if not failure:
        return status
    if command == "create":
        return status.with_failure(failure, now)
    if status.drills and status.drills[-1].at >= started_at:
        return status
    crash = DrillResult(at=now, backup_id="", problem=failure, restore_s=0.0, backup_age_s=0.0)
    return status.with_drill(crash)
