"""The gateway's connection to the store: account snapshots that are polled, and usage that is flushed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from secrets import token_hex
from typing import Any

import structlog

from argosy.blob_store import BlobNotFoundError, BlobStore, open_blob_store
from argosy.gateway.auth import Authenticator
from argosy.gateway.filters import LimitFilter, flush_usage_forever
from argosy.gateway.model_registry import ModelRouter
from argosy.process import run_in_daemon_thread
from argosy.store import (
    BLOB_PLACE_KEY,
    AccountSnapshot,
    Store,
    StoreConfig,
    StoreError,
    StoreUnavailableError,
    UsageLog,
    default_blob_folder,
    default_store_url,
    open_store,
    usage_log_folder,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

ACCOUNT_POLL_INTERVAL_S = 1.0
STORE_HANG_TIMEOUT_S = 5.0
"""If the store has not answered after this time, the accounts are reported as stale."""
FIRST_ROLLUP_DELAY_S = 600.0
"""Delay of the first rollup. Rollups cannot be undone. A clock that is wrong at boot has been corrected by then."""
ROLLUP_INTERVAL_S = 3600.0
DAY_S = 86_400.0
LIMIT_SEED_WAIT_S = 0.5
"""How long an account update waits for past usage of new limits."""
STORE_OPEN_TIMEOUT_S = 60.0
"""How long the gateway waits at startup for a database that is unreachable."""
USAGE_FLUSH_TIMEOUT_S = 10.0
"""How long the last flush of usage records may take when the gateway shuts down."""
_MARK_PREFIX = ".stores/"
"""Beginning of the keys of blobs by which gateways recognise the place of their store's blobs."""


class AccountingService:
    """The gateway's store, current account snapshot and usage log. Not thread-safe: use it from one event loop.

    Open it before the gateway listens, and close it after the last response.
    """

    def __init__(self, store: Store, usage_log: UsageLog, config: StoreConfig) -> None:
        self.store = store
        self.usage_log = usage_log
        self.snapshot = AccountSnapshot()
        self.is_fresh = True
        """Whether `snapshot` equals the store's content, or did at the last poll."""
        self._config = config
        self._accounts_changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._flush_task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, config: StoreConfig) -> AccountingService:
        """Open and migrate the store, recover usage records that a crashed gateway left, and load the accounts.

        A database that is unreachable is retried for `STORE_OPEN_TIMEOUT_S`, because both may have been started at
        once.

        Raises:
            StoreError: The store cannot be opened or migrated.
            UsageLogError: The usage log cannot be opened or recovered.
        """
        url, give_up_at, has_warned = (
            config.url or default_store_url(),
            time.monotonic() + STORE_OPEN_TIMEOUT_S,
            False,
        )
        while True:
            try:
                return await cls._open_once(url, config)
            except StoreUnavailableError as error:
                if time.monotonic() > give_up_at:
                    raise
                if not has_warned:
                    log.warning(
                        "waiting_for_store", timeout_s=STORE_OPEN_TIMEOUT_S, reason=str(error)
                    )
                has_warned = True
            await asyncio.sleep(ACCOUNT_POLL_INTERVAL_S)

    @classmethod
    async def _open_once(cls, url: str, config: StoreConfig) -> AccountingService:
        async with contextlib.AsyncExitStack() as cleanup:
            store = await run_in_daemon_thread(_open_and_migrate, url, config)
            cleanup.callback(store.close)
            usage_log = await run_in_daemon_thread(UsageLog, usage_log_folder(url))
            cleanup.callback(usage_log.close)
            await run_in_daemon_thread(usage_log.recover)
            # Before the limits are seeded, so that recovered usage counts against them.
            await run_in_daemon_thread(usage_log.drain, store.ledger.add_records)
            service = cls(store, usage_log, config)
            service.snapshot = await run_in_daemon_thread(store.load_snapshot)
            cleanup.pop_all()
        flush = flush_usage_forever(service.usage_log, store.ledger.add_records, service._closing)
        service._flush_task = asyncio.create_task(flush)
        return service

    def notify_changed(self) -> None:
        """Poll the store at once, because accounts were changed through this gateway."""
        self._accounts_changed.set()

    async def poll_accounts(
        self, apply_snapshot: Callable[[AccountSnapshot], Awaitable[None]]
    ) -> None:
        """Read the accounts every second and pass each snapshot to `apply_snapshot`. Runs until it is cancelled.

        Store errors and hangs are logged once and set `is_fresh` to False until a poll succeeds.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACCOUNT_POLL_INTERVAL_S):
                    await self._accounts_changed.wait()
            self._accounts_changed.clear()
            refresh = asyncio.create_task(self._refresh(apply_snapshot))
            try:
                if not (await asyncio.wait({refresh}, timeout=STORE_HANG_TIMEOUT_S))[0]:
                    self._mark_stale("the store does not respond")
                await refresh
            except StoreError as error:
                self._mark_stale(str(error))
            else:
                if not self.is_fresh:
                    log.info("account_sync_recovered")
                self.is_fresh = True
            finally:
                refresh.cancel()

    def _mark_stale(self, reason: str) -> None:
        if self.is_fresh:
            log.warning("account_sync_stale", reason=reason)
        self.is_fresh = False

    async def _refresh(self, apply_snapshot: Callable[[AccountSnapshot], Awaitable[None]]) -> None:
        """Load the accounts if they changed, and apply them.

        Raises:
            StoreError: The accounts cannot be read.
        """
        self.snapshot = await run_in_daemon_thread(self._load_snapshot)
        await apply_snapshot(self.snapshot)

    async def roll_up_usage(self) -> None:
        """Roll up usage records older than `keep_usage_days`, and apply the retention of projects, every hour.

        Runs until it is cancelled.
        """
        days = self._config.keep_usage_days
        await asyncio.sleep(FIRST_ROLLUP_DELAY_S)
        while True:
            try:
                if days is not None:
                    before = time.time() - days * DAY_S
                    await run_in_daemon_thread(self.store.ledger.roll_up, before)
                await run_in_daemon_thread(self.store.retention.delete_expired)
            except StoreError as error:
                log.warning("usage_rollup_failed", reason=str(error))
            await asyncio.sleep(ROLLUP_INTERVAL_S)

    async def close(self) -> None:
        """Flush the usage records of ended requests to the ledger, then close the usage log and the store.

        Records that the store does not accept within `USAGE_FLUSH_TIMEOUT_S` stay in the usage log for the next start.
        """
        self._closing.set()
        if self._flush_task is not None:
            await asyncio.wait({self._flush_task}, timeout=USAGE_FLUSH_TIMEOUT_S)
            if not self._flush_task.done():
                record_counts = {
                    "pending_records": self.usage_log.pending_records,
                    "unpersisted_records": self.usage_log.unpersisted_records,
                }
                log.warning(
                    "usage_flush_incomplete", **record_counts, reason="the store does not respond"
                )
                self._flush_task.cancel()
                return  # a thread still writes rows of the usage log to the store
        await run_in_daemon_thread(self.usage_log.close)
        await run_in_daemon_thread(self.store.close)

    def _load_snapshot(self) -> AccountSnapshot:
        """Load the accounts, or return the same object if they have not changed.

        Raises:
            StoreError: The accounts cannot be read.
        """
        return self.snapshot if self.store.is_current(self.snapshot) else self.store.load_snapshot()


class AccountSync:
    """Publishes new account snapshots to routes, authenticator and limits in one step.

    Updates are prepared in a thread, because there may be many accounts and the event loop has streams to forward. Not
    thread-safe: use it from one event loop.
    """

    def __init__(
        self,
        accounting: AccountingService,
        models: ModelRouter,
        authenticator: Authenticator,
        limits: LimitFilter,
    ) -> None:
        self.accounting = accounting
        self.limits = limits
        self._models = models
        self._authenticator = authenticator
        self._applied_snapshot: AccountSnapshot | None = None
        self._models_version = 0
        """How often the models or routes have changed."""
        self._seed_task: asyncio.Task[None] | None = None
        self._is_seeding_failing = False
        """Whether the last attempt to read past usage failed."""

    async def start(self, snapshot: AccountSnapshot) -> None:
        """Apply the first snapshot and initialise all limits with past usage. Call it before the first request.

        Raises:
            StoreError: Past usage cannot be read.
        """
        await self._apply(snapshot)
        await self._seed_limits()

    async def apply_snapshot(self, snapshot: AccountSnapshot) -> None:
        """Apply a snapshot and initialise new limits with past usage. Call it every second.

        Reading past usage from a large ledger can take minutes. The call waits for it at most `LIMIT_SEED_WAIT_S`.
        """
        await self._apply(snapshot)
        if self._seed_task is None:
            self._seed_task = asyncio.create_task(self._try_seed_limits())
        if (await asyncio.wait({self._seed_task}, timeout=LIMIT_SEED_WAIT_S))[0]:
            seed_task, self._seed_task = self._seed_task, None
            await seed_task

    def read_gauges(self) -> dict[str, Any]:
        """Return the fields of `GatewayGauges` about accounts, usage and limits."""
        usage_log = self.accounting.usage_log
        return {
            "usage_pending_records": usage_log.pending_records,
            "usage_unpersisted_records": usage_log.unpersisted_records,
            "store_up": self.accounting.is_fresh,
            "quota_backend": self.limits.read_quota_status(),
        }

    def close(self) -> None:
        """Cancel the task that reads past usage."""
        if self._seed_task is not None:
            self._seed_task.cancel()

    async def _try_seed_limits(self) -> None:
        try:
            await self._seed_limits()
        except StoreError as error:
            if not self._is_seeding_failing:
                log.warning("limit_seeding_failed", reason=str(error))
            self._is_seeding_failing = True
        else:
            self._is_seeding_failing = False

    async def _seed_limits(self) -> None:
        await self.limits.seed_usage(self.accounting.store.ledger.sum_by_owner)

    async def _apply(self, snapshot: AccountSnapshot) -> None:
        while snapshot is not self._applied_snapshot:
            version = self._models_version
            updates = await run_in_daemon_thread(self._prepare_updates, snapshot)
            if version == self._models_version:  # else prepared for models that were replaced
                previous = [self._applied_snapshot, *(apply_update() for apply_update in updates)]
                self._applied_snapshot = snapshot
                # In a thread, because freeing thousands of objects takes long too.
                await run_in_daemon_thread(previous.clear)

    def rebind_model_names(self) -> None:
        """Re-resolve model names in limits, prices and permissions after models or routes have changed."""
        self._models_version += 1
        if self._applied_snapshot is not None:
            for apply_update in self._prepare_updates(self._applied_snapshot):
                apply_update()
            self.accounting.notify_changed()  # so that new limits are seeded

    def _prepare_updates(self, snapshot: AccountSnapshot) -> list[Callable[[], object]]:
        """Prepare the updates for a snapshot, in any thread.

        Returns:
            Functions that apply the updates. Call them on the event loop.
        """
        resolved = self._models.resolve_aliases(snapshot)
        return [
            self._models.prepare_snapshot(snapshot),
            self._authenticator.prepare_snapshot(resolved),
            self.limits.prepare_snapshot(resolved),
        ]


def _open_and_migrate(url: str, config: StoreConfig) -> Store:
    place = config.blobs or default_blob_folder(url)
    blobs = None if place is None else open_blob_store(place)
    store = open_store(url, max_stored_bytes=config.max_stored_bytes_per_project, blobs=blobs)
    store.migrate()
    if config.blobs is not None and blobs is not None:
        _check_blobs_are_shared(store, blobs, config.blobs)
    return store


def _check_blobs_are_shared(store: Store, blobs: BlobStore, place: str) -> None:
    """Check that all gateways of the store use the same place: the first leaves a mark there, whose name all know.

    Raises:
        ValueError: The mark is not in this place.
    """
    own = token_hex(16)
    blobs.put(_MARK_PREFIX + own, [own.encode()])
    first = store.secrets.get_or_create(BLOB_PLACE_KEY, value=own.encode()).decode()
    if first == own:
        return
    blobs.delete(_MARK_PREFIX + own)
    try:
        list(blobs.open(_MARK_PREFIX + first))
    except BlobNotFoundError as error:
        raise ValueError(
            f"store.blobs is {place}, but other gateways of this store put contents of files somewhere else. Set it to"
            " the folder or URL that all of them share, or copy all of it there."
        ) from error
