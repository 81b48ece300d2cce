"""Accounts as they change, told to all who go by them: all at once, and by little work on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.support.account_fixtures import bearer
from tests.support.database_work import fill

from argosy.gateway.accounting import AccountingService, AccountSync
from argosy.gateway.auth import AuthConfig, Authenticator
from argosy.gateway.filters import LimitFilter, UsageRecorder
from argosy.gateway.model_registry import ModelRouter
from argosy.gateway.model_routes import RouteConfig
from argosy.gateway.pool import Pool
from argosy.protocol import ApiError
from argosy.store import AccountSnapshot, LocalQuotaBackend, StoreConfig

ME = "test"
BIG, SMALL = (Pool(name, [], "round-robin") for name in ("big", "small"))


class SlowModels(ModelRouter):
    """The thread that asks what accounts mean waits, once it has looked, until it is let go on."""

    def __init__(self, named: Mapping[str, Pool], routes: tuple[RouteConfig, ...] = ()) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        super().__init__(named, routes)

    def resolve_aliases(self, directory: AccountSnapshot) -> AccountSnapshot:
        found = super().resolve_aliases(directory)
        self.asked.set()
        assert self.go_on.wait(30)
        return found


@dataclass(frozen=True)
class Kept:
    """Who goes by the accounts of a store."""

    books: AccountingService
    models: SlowModels
    identity: Authenticator
    limits: LimitFilter
    keeping: AccountSync

    def lets_in(self, plain: str) -> bool:
        """Whether a key is one."""
        try:
            self.identity.authenticate(bearer(plain))
        except ApiError:
            return False
        return True

    async def update(self) -> None:
        """Tell them what the store has now."""
        await self.keeping.apply_snapshot(await asyncio.to_thread(self.books.store.load_snapshot))


@contextlib.asynccontextmanager
async def kept(folder: Path, accounts: int = 0) -> AsyncIterator[Kept]:
    """With so many keys and limits."""
    url = f"sqlite:///{folder}/store.db"
    books = await AccountingService.open(StoreConfig(url=url))
    if accounts:
        await asyncio.to_thread(fill, url, accounts)
    models = SlowModels({"big": BIG, "small": SMALL, "alias": SMALL})
    identity, limits = (
        Authenticator(AccountSnapshot(), AuthConfig()),
        LimitFilter(LocalQuotaBackend()),
    )
    keeping = AccountSync(books, models, identity, limits, UsageRecorder(books.usage_log))
    await keeping.apply_snapshot(books.snapshot)
    yield Kept(books, models, identity, limits, keeping)
    await books.close()


async def test_one_changed_key_among_thousands_is_little_work_on_the_loop(tmp_path: Path) -> None:
    few, many = [await work_of_a_change(tmp_path, accounts) for accounts in (10, 4000)]
    assert many < few + 500


async def work_of_a_change(folder: Path, accounts: int) -> int:
    """How many lines the event loop's thread goes through while one of so many keys is revoked."""
    async with kept(folder / str(accounts), accounts) as here:
        made, plain = here.books.store.accounts.create_key("proj_000001", "new", actor=ME)
        await here.update()
        assert here.lets_in(plain)
        here.books.store.accounts.revoke_key(made.id, actor=ME)
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 - as Python has it
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            await here.update()
        finally:
            sys.settrace(before)
        assert not here.lets_in(plain)
    return lines


async def test_models_that_change_while_accounts_are_taken_over_are_those_that_hold(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path) as here:
        store, models = here.books.store, here.models
        home = store.accounts.create_organisation("acme", actor=ME)
        project = store.accounts.create_project(home.id, "web", actor=ME).id
        one: dict[str, Any] = {"window": "day", "model": "alias", "actor": ME}
        store.limits_and_prices.set_limit("project", project, "requests", 1, **one)
        _, plain = store.accounts.create_key(project, "k", actor=ME)
        models.go_on.clear()
        models.asked.clear()
        updating = asyncio.create_task(here.update())
        await asyncio.to_thread(models.asked.wait)
        models.replace_models({"big": BIG, "small": SMALL, "alias": BIG}, ())
        models.go_on.set()
        here.keeping.rebind_model_names()
        await updating
        principal = here.identity.authenticate(bearer(plain))
        for model in ("small", "small", "big"):
            async with here.limits.reserve_request(principal, model, []):
                pass
        with pytest.raises(ApiError, match="1 request per day for 'big'"):
            await here.limits.reserve_request(principal, "big", []).__aenter__()
