"""The durable side of a gateway: its store, accounts that are never older than a second or so, usage settled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog

from argosy.gateway.auth import Authenticator
from argosy.gateway.filters import LimitFilter, UsageRecorder, flush_usage_forever
from argosy.gateway.model_registry import ModelRouter
from argosy.process import run_in_daemon_thread
from argosy.store import (
    AccountSnapshot,
    Store,
    StoreConfig,
    StoreError,
    StoreUnavailableError,
    UsageLog,
    default_store_url,
    open_store,
    usage_log_folder,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

ACCOUNT_POLL_INTERVAL_S = 1.0
STORE_HANG_TIMEOUT_S = 5.0
"""A store that has not answered for so long is said to be away."""
FIRST_ROLLUP_DELAY_S = 600.0
"""A clock that is wrong when its machine starts has been put right by then; what was summed up stays summed up."""
ROLLUP_INTERVAL_S = 3600.0
DAY_S = 86_400.0
LIMIT_SEED_WAIT_S = 0.5
"""How long accounts wait for what was used of new limits."""
STORE_OPEN_TIMEOUT_S = 60.0
"""How long a database that is away at the start is waited for."""
USAGE_FLUSH_TIMEOUT_S = 10.0
"""How long the store may take for what has ended, when the gateway leaves."""


class AccountingService:
    """Opened before the gateway listens, and closed after its last answer. Belongs to one event loop."""

    def __init__(self, store: Store, usage_log: UsageLog, config: StoreConfig) -> None:
        self.store = store
        self.usage_log = usage_log
        self.snapshot = AccountSnapshot()
        self.is_fresh = True
        """Whether that is what the store has, or had a moment ago."""
        self._config = config
        self._accounts_changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._flush_task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, config: StoreConfig) -> AccountingService:
        """With the tables up to date, and usage that a dead gateway left recovered. Raises StoreError, SpoolError.

        A database that is away is waited for, as both may have been started at once.
        """
        url, until, waits = (
            config.url or default_store_url(),
            time.monotonic() + STORE_OPEN_TIMEOUT_S,
            False,
        )
        while True:
            try:
                return await cls._open_once(url, config)
            except StoreUnavailableError as error:
                if time.monotonic() > until:
                    raise
                if not waits:
                    log.warning(
                        "waiting_for_store", seconds=STORE_OPEN_TIMEOUT_S, reason=str(error)
                    )
                waits = True
            await asyncio.sleep(ACCOUNT_POLL_INTERVAL_S)

    @classmethod
    async def _open_once(cls, url: str, config: StoreConfig) -> AccountingService:
        async with contextlib.AsyncExitStack() as failing:
            store = await run_in_daemon_thread(_open_and_migrate, url)
            failing.callback(store.close)
            spool = await run_in_daemon_thread(UsageLog, usage_log_folder(url))
            failing.callback(spool.close)
            await run_in_daemon_thread(spool.recover)
            await run_in_daemon_thread(
                spool.drain, store.ledger.add_records
            )  # budgets begin with what is there
            books = cls(store, spool, config)
            books.snapshot = await run_in_daemon_thread(store.load_snapshot)
            failing.pop_all()
        settling = flush_usage_forever(books.usage_log, store.ledger.add_records, books._closing)
        books._flush_task = asyncio.create_task(settling)
        return books

    def notify_changed(self) -> None:
        """Accounts were changed here: do not wait to read them."""
        self._accounts_changed.set()

    async def poll_accounts(
        self, apply_snapshot: Callable[[AccountSnapshot], Awaitable[None]]
    ) -> None:
        """Tell `update` of all accounts each second, for as long as the gateway runs."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACCOUNT_POLL_INTERVAL_S):
                    await self._accounts_changed.wait()
            self._accounts_changed.clear()
            freshening = asyncio.create_task(self._refresh(apply_snapshot))
            try:
                if not (await asyncio.wait({freshening}, timeout=STORE_HANG_TIMEOUT_S))[0]:
                    self._mark_stale("the store does not answer")
                await freshening
            except StoreError as error:
                self._mark_stale(str(error))
            else:
                if not self.is_fresh:
                    log.info("account_sync_recovered")
                self.is_fresh = True
            finally:
                freshening.cancel()

    def _mark_stale(self, reason: str) -> None:
        if self.is_fresh:
            log.warning("account_sync_stale", reason=reason)
        self.is_fresh = False

    async def _refresh(self, apply_snapshot: Callable[[AccountSnapshot], Awaitable[None]]) -> None:
        """Raises StoreError."""
        self.snapshot = await run_in_daemon_thread(self._load_snapshot)
        await apply_snapshot(self.snapshot)

    async def roll_up_usage(self) -> None:
        """Sum up old usage, if it is not to be kept, for as long as the gateway runs."""
        days = self._config.keep_usage_days
        await asyncio.sleep(FIRST_ROLLUP_DELAY_S)
        while days is not None:
            try:
                await run_in_daemon_thread(self.store.ledger.roll_up, time.time() - days * DAY_S)
            except StoreError as error:
                log.warning("usage_rollup_failed", reason=str(error))
            await asyncio.sleep(ROLLUP_INTERVAL_S)

    async def close(self) -> None:
        """Bring what has ended to the store; what it does not take, or not soon, is kept for the next start."""
        self._closing.set()
        if self._flush_task is not None:
            await asyncio.wait({self._flush_task}, timeout=USAGE_FLUSH_TIMEOUT_S)
            if not self._flush_task.done():
                left = {
                    "waiting": self.usage_log.pending_records,
                    "lost": self.usage_log.unpersisted_records,
                }
                log.warning("usage_flush_incomplete", **left, reason="the store hangs")
                self._flush_task.cancel()
                return  # a thread waits for the store still, with rows of the journal
        await run_in_daemon_thread(self.usage_log.close)
        await run_in_daemon_thread(self.store.close)

    def _load_snapshot(self) -> AccountSnapshot:
        """The accounts: the same object for as long as they have not changed. Raises StoreError."""
        return self.snapshot if self.store.is_current(self.snapshot) else self.store.load_snapshot()


class AccountSync:
    """Tells whoever goes by the accounts what they are now, all at once. Belongs to one event loop.

    What that means is worked out in a thread: there may be many accounts, and the loop has streams to pass on.
    """

    def __init__(
        self,
        accounting: AccountingService,
        models: ModelRouter,
        authenticator: Authenticator,
        limits: LimitFilter,
        usage_recorder: UsageRecorder,
    ) -> None:
        self.accounting = accounting
        self.limits = limits
        self._models = models
        self._authenticator = authenticator
        self._usage_recorder = usage_recorder
        self._applied_snapshot: AccountSnapshot | None = None
        self._models_version = 0
        """How often there were other models."""
        self._seed_task: asyncio.Task[None] | None = None
        self._is_seeding_failing = False
        """What was used cannot be read."""

    async def start(self, snapshot: AccountSnapshot) -> None:
        """Called before the first request: limits know all that was used. Raises StoreError."""
        await self._apply(snapshot)
        await self._seed_limits()

    async def apply_snapshot(self, snapshot: AccountSnapshot) -> None:
        """Called each second.

        Of a large ledger it may take minutes to say what was used; accounts do not wait for that.
        """
        await self._apply(snapshot)
        if self._seed_task is None:
            self._seed_task = asyncio.create_task(self._try_seed_limits())
        if (await asyncio.wait({self._seed_task}, timeout=LIMIT_SEED_WAIT_S))[0]:
            seeded, self._seed_task = self._seed_task, None
            await seeded

    def close(self) -> None:
        """Nobody asks any more what was used."""
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
            meant = self._models_version
            prepared = await run_in_daemon_thread(self._prepare_updates, snapshot)
            if meant == self._models_version:  # else it was worked out for models that are gone
                before = [self._applied_snapshot, *(take() for take in prepared)]
                self._applied_snapshot = snapshot
                await run_in_daemon_thread(
                    before.clear
                )  # to free thousands of objects takes long, too

    def rebind_model_names(self) -> None:
        """There are other models and routes: what is said of names holds for those that they stand for now."""
        self._models_version += 1
        if self._applied_snapshot is not None:
            for take in self._prepare_updates(self._applied_snapshot):
                take()
            self.accounting.notify_changed()  # what new limits have used is still to be found

    def _prepare_updates(self, snapshot: AccountSnapshot) -> list[Callable[[], object]]:
        """Work out, in any thread, what these accounts mean; calling what is returned lets it hold."""
        meant = self._models.resolve_aliases(snapshot)
        return [
            self._models.prepare_snapshot(snapshot),
            self._authenticator.prepare_snapshot(meant),
            self.limits.prepare_snapshot(meant),
            self._usage_recorder.prepare_snapshot(meant),
        ]


def _open_and_migrate(url: str) -> Store:
    store = open_store(url)
    store.migrate()
    return store
