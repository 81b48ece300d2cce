"""Upkeep of batches: ends those whose lines have ended, and releases the claims of gateways that have stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import structlog

from argosy.blob_store import BlobNotFoundError, BlobStoreError
from argosy.gateway.batches.batch_files import InputReader, render_lines
from argosy.gateway.batches.batch_state import MAX_MODELS, find_end_status
from argosy.process import run_in_daemon_thread
from argosy.store import (
    Batch,
    BatchError,
    HolderMonitor,
    ItemOwner,
    StorageQuotaError,
    Store,
    StoreError,
    WrittenBlob,
)
from argosy.telemetry import GatewayMetrics

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

CLAIM_INTERVAL_S = 1.0
HOLDER_INTERVAL_S = 5.0
"""Interval at which the heartbeats of gateways with claims are compared."""
DELETION_INTERVAL_S = 3600.0
RETRY_INTERVAL_S = 30.0
"""Pause after the work of a batch has failed, which other gateways may repeat meanwhile."""
MAX_ADDED_LINES = 500
MAX_ADDED_BYTES = 4 << 20
"""Bounds of the lines that one transaction adds."""


class BatchUpkeep:
    """Upkeep of batches by one gateway. Not thread-safe: use it from one event loop.

    Args:
        store: The store.
        holder: Id of this gateway, which holds its claims.
        metrics: Counts lapsed claims.
        find_model_error: Returns why the sender of a batch may not use a model; empty if it may.
    """

    def __init__(
        self,
        store: Store,
        holder: str,
        metrics: GatewayMetrics,
        find_model_error: Callable[[Batch, str], str],
    ) -> None:
        self._store = store
        self._batches = store.batches
        self._find_model_error = find_model_error
        self._holder = holder
        self._metrics = metrics
        self._monitor = HolderMonitor()
        self._retry_at: dict[str, float] = {}
        """When batches whose work has failed are claimed again, by monotonic time."""

    async def run(self) -> None:
        """Claim batches that need work, and do it. Runs until it is cancelled."""
        deleted_at = time.monotonic()
        while True:
            await asyncio.sleep(CLAIM_INTERVAL_S)
            try:
                while await self._work():
                    pass
                if time.monotonic() - deleted_at >= DELETION_INTERVAL_S:
                    deleted_at = time.monotonic()
                    while await run_in_daemon_thread(self._batches.delete_old):
                        pass
            except StoreError as error:
                log.warning("batch_store_failed", reason=str(error))
                await asyncio.sleep(CLAIM_INTERVAL_S)

    async def watch_holders(self) -> None:
        """Release the claims of gateways that have stopped. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(HOLDER_INTERVAL_S)
            try:
                await run_in_daemon_thread(self._release_stopped)
            except StoreError as error:
                log.warning("batch_store_failed", reason=str(error))

    def _release_stopped(self) -> None:
        holders = self._batches.list_holders() - {self._holder}
        if not holders:
            return
        heartbeats = {each.id: each.seen_at for each in self._store.gateways.list_known()}
        for holder in self._monitor.find_stopped(holders, heartbeats):
            lines = self._batches.release_holder(holder)
            self._metrics.batch_claims_lapsed.add((), lines)
            log.warning("batch_claims_lapsed", gateway=holder, lines=lines)

    async def _work(self) -> bool:
        """Do the work of one batch. Returns False if none needs any.

        Other batches go first for some time after the work of one has failed.

        Raises:
            StoreError: The store cannot be used.
        """
        now = time.monotonic()
        self._retry_at = {name: at for name, at in self._retry_at.items() if at > now}
        batch = await run_in_daemon_thread(
            self._batches.claim_batch, self._holder, [*self._retry_at]
        )
        if batch is None:
            return False
        try:
            if batch.status == "validating":
                await self._validate(batch)
            else:
                await run_in_daemon_thread(self._end, batch)
        except BlobNotFoundError as error:
            errors = [BatchError(code="file_not_found", message=str(error))]
            await run_in_daemon_thread(self._batches.end, batch, "failed", errors)
        except Exception as error:
            self._retry_at[batch.id] = now + RETRY_INTERVAL_S
            with suppress(StoreError):
                await run_in_daemon_thread(self._batches.release_batch, batch)
            if not isinstance(error, (BlobStoreError, StorageQuotaError)):
                raise
            log.warning("batch_store_failed", reason=str(error))
        return True

    async def _validate(self, batch: Batch) -> None:
        """Store the lines of a batch's input file, or end the batch if some are invalid."""
        owner = ItemOwner(batch.organisation, batch.owner)
        if not await run_in_daemon_thread(self._batches.clear_lines, batch):
            return
        blocks = await run_in_daemon_thread(self._store.files.open, owner, batch.details.input_file)
        reader = InputReader(batch.details.path, blocks)
        checked: set[str] = set()
        while lines := await run_in_daemon_thread(reader.read, MAX_ADDED_LINES, MAX_ADDED_BYTES):
            for model in reader.models.keys() - checked:
                checked.add(model)
                reason = self._find_model_error(batch, model)
                if reason:
                    line = reader.models[model]
                    reader.add_error("model_not_found", reason, line, "body.model")
            if len(checked) > MAX_MODELS:
                reader.add_error("too_many_models", f"Send at most {MAX_MODELS} models.", None)
            is_valid = not reader.errors  # else only the rest of the errors is of interest
            if is_valid and not await run_in_daemon_thread(self._batches.add_lines, batch, lines):
                return
        if not (reader.errors or reader.count):
            reader.add_error("empty_batch", "The file has no lines.", None)
        if reader.errors:
            await run_in_daemon_thread(self._batches.end, batch, "failed", reader.errors)
            log.info("batch_invalid", batch=batch.id, errors=len(reader.errors))
        else:
            await run_in_daemon_thread(self._batches.begin, batch, [*reader.models])

    def _end(self, batch: Batch) -> None:
        """Write the files of a batch whose lines have ended, and end it."""
        batches, files, status = self._batches, self._store.files, find_end_status(batch)
        owner = ItemOwner(batch.organisation, batch.owner)
        written: list[WrittenBlob | None] = [None, None]
        has_files = bool(batch.details.input_file)
        if has_files:
            for index, count in enumerate((batch.completed, batch.failed + batch.closed)):
                if count:
                    lines = render_lines(batch, batches.read_results, are_errors=index == 1)
                    written[index] = files.write(owner, lines)
        has_ended = False
        try:
            has_ended = batches.end(batch, status, (), *written, keeps_lines=not has_files)
        finally:
            if not has_ended:
                for each in filter(None, written):
                    files.discard(owner, each)
        counts = {"completed": batch.completed, "failed": batch.failed}
        log.info("batch_ended", batch=batch.id, status=status, **counts)
