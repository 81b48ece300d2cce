"""The durable side of a gateway: its store, accounts that are never older than a second or so, usage settled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog

from argosy.gateway.auth import Identity
from argosy.gateway.filters import Ledger, Limits, settle_forever
from argosy.gateway.model_registry import Models
from argosy.process import aside
from argosy.store import (
    Directory,
    Spool,
    Store,
    StoreAwayError,
    StoreConfig,
    StoreError,
    default_url,
    open_store,
    usage_folder,
)

log: structlog.typing.FilteringBoundLogger = structlog.get_logger("argosy.gateway")

FRESH_EACH_S = 1.0
HANGS_AFTER_S = 5.0
"""A store that has not answered for so long is said to be away."""
FORGET_AFTER_S = 600.0
"""A clock that is wrong when its machine starts has been put right by then; what was summed up stays summed up."""
FORGET_EACH_S = 3600.0
DAY_S = 86_400.0
SEEDED_WITHIN_S = 0.5
"""How long accounts wait for what was used of new limits."""
OPEN_S = 60.0
"""How long a database that is away at the start is waited for."""
LAST_S = 10.0
"""How long the store may take for what has ended, when the gateway leaves."""


class Books:
    """Opened before the gateway listens, and closed after its last answer. Belongs to one event loop."""

    def __init__(self, store: Store, spool: Spool, config: StoreConfig) -> None:
        self.store = store
        self.spool = spool
        self.directory = Directory()
        self.fresh = True
        """Whether that is what the store has, or had a moment ago."""
        self._config = config
        self._changed = asyncio.Event()
        self._ending = asyncio.Event()
        self._settling: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, config: StoreConfig) -> Books:
        """With the tables up to date, and usage that a dead gateway left recovered. Raises StoreError, SpoolError.

        A database that is away is waited for, as both may have been started at once.
        """
        url, until, waits = config.url or default_url(), time.monotonic() + OPEN_S, False
        while True:
            try:
                return await cls._open(url, config)
            except StoreAwayError as error:
                if time.monotonic() > until:
                    raise
                if not waits:
                    log.warning("store_awaited", seconds=OPEN_S, reason=str(error))
                waits = True
            await asyncio.sleep(FRESH_EACH_S)

    @classmethod
    async def _open(cls, url: str, config: StoreConfig) -> Books:
        async with contextlib.AsyncExitStack() as failing:
            store = await aside(_open, url)
            failing.callback(store.close)
            spool = await aside(Spool, usage_folder(url))
            failing.callback(spool.close)
            await aside(spool.recover)
            await aside(spool.drain, store.usage.add)  # budgets begin with what is there
            books = cls(store, spool, config)
            books.directory = await aside(store.directory)
            failing.pop_all()
        settling = settle_forever(books.spool, store.usage.add, books._ending)
        books._settling = asyncio.create_task(settling)
        return books

    def changed(self) -> None:
        """Accounts were changed here: do not wait to read them."""
        self._changed.set()

    async def keep_fresh(self, update: Callable[[Directory], Awaitable[None]]) -> None:
        """Tell `update` of all accounts each second, for as long as the gateway runs."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FRESH_EACH_S):
                    await self._changed.wait()
            self._changed.clear()
            freshening = asyncio.create_task(self._freshen(update))
            try:
                if not (await asyncio.wait({freshening}, timeout=HANGS_AFTER_S))[0]:
                    self._stale("the store does not answer")
                await freshening
            except StoreError as error:
                self._stale(str(error))
            else:
                if not self.fresh:
                    log.info("accounts_fresh_again")
                self.fresh = True
            finally:
                freshening.cancel()

    def _stale(self, reason: str) -> None:
        if self.fresh:
            log.warning("accounts_not_fresh", reason=reason)
        self.fresh = False

    async def _freshen(self, update: Callable[[Directory], Awaitable[None]]) -> None:
        """Raises StoreError."""
        self.directory = await aside(self._read)
        await update(self.directory)

    async def forget(self) -> None:
        """Sum up old usage, if it is not to be kept, for as long as the gateway runs."""
        days = self._config.keep_usage_days
        await asyncio.sleep(FORGET_AFTER_S)
        while days is not None:
            try:
                await aside(self.store.usage.forget, time.time() - days * DAY_S)
            except StoreError as error:
                log.warning("usage_not_forgotten", reason=str(error))
            await asyncio.sleep(FORGET_EACH_S)

    async def close(self) -> None:
        """Bring what has ended to the store; what it does not take, or not soon, is kept for the next start."""
        self._ending.set()
        if self._settling is not None:
            await asyncio.wait({self._settling}, timeout=LAST_S)
            if not self._settling.done():
                left = {"waiting": self.spool.waiting, "lost": self.spool.in_memory}
                log.warning("usage_left", **left, reason="the store hangs")
                self._settling.cancel()
                return  # a thread waits for the store still, with rows of the journal
        await aside(self.spool.close)
        await aside(self.store.close)

    def _read(self) -> Directory:
        """The accounts: the same object for as long as they have not changed. Raises StoreError."""
        return self.directory if self.store.is_current(self.directory) else self.store.directory()


class Keeping:
    """Tells whoever goes by the accounts what they are now, all at once. Belongs to one event loop.

    What that means is worked out in a thread: there may be many accounts, and the loop has streams to pass on.
    """

    def __init__(
        self, books: Books, models: Models, identity: Identity, limits: Limits, ledger: Ledger
    ) -> None:
        self.books = books
        self.limits = limits
        self._models = models
        self._identity = identity
        self._ledger = ledger
        self._known: Directory | None = None
        self._meant = 0
        """How often there were other models."""
        self._seeding: asyncio.Task[None] | None = None
        self._failing = False
        """What was used cannot be read."""

    async def begin(self, directory: Directory) -> None:
        """Called before the first request: limits know all that was used. Raises StoreError."""
        await self._take(directory)
        await self._seed()

    async def update(self, directory: Directory) -> None:
        """Called each second.

        Of a large ledger it may take minutes to say what was used; accounts do not wait for that.
        """
        await self._take(directory)
        if self._seeding is None:
            self._seeding = asyncio.create_task(self._try_to_seed())
        if (await asyncio.wait({self._seeding}, timeout=SEEDED_WITHIN_S))[0]:
            seeded, self._seeding = self._seeding, None
            await seeded

    def close(self) -> None:
        """Nobody asks any more what was used."""
        if self._seeding is not None:
            self._seeding.cancel()

    async def _try_to_seed(self) -> None:
        try:
            await self._seed()
        except StoreError as error:
            if not self._failing:
                log.warning("limits_not_seeded", reason=str(error))
            self._failing = True
        else:
            self._failing = False

    async def _seed(self) -> None:
        await self.limits.seed(self.books.store.usage.spent)

    async def _take(self, directory: Directory) -> None:
        while directory is not self._known:
            meant = self._meant
            prepared = await aside(self._prepare, directory)
            if meant == self._meant:  # else it was worked out for models that are gone
                before = [self._known, *(take() for take in prepared)]
                self._known = directory
                await aside(before.clear)  # to free thousands of objects takes long, too

    def mean(self) -> None:
        """There are other models and routes: what is said of names holds for those that they stand for now."""
        self._meant += 1
        if self._known is not None:
            for take in self._prepare(self._known):
                take()
            self.books.changed()  # what new limits have used is still to be found

    def _prepare(self, directory: Directory) -> list[Callable[[], object]]:
        """Work out, in any thread, what these accounts mean; calling what is returned lets it hold."""
        meant = self._models.meant(directory)
        return [
            self._models.prepare(directory),
            self._identity.prepare(meant),
            self.limits.prepare(meant),
            self._ledger.prepare(meant),
        ]


def _open(url: str) -> Store:
    store = open_store(url)
    store.migrate()
    return store
