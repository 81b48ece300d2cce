"""Account snapshots applied to authenticator and limits in one step, with little work on the loop."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.support.account_fixtures import bearer
from tests.support.database_work import fill

from argosy.deployment import AuthConfig, RouteConfig
from argosy.gateway.accounting import AccountingService, AccountSync
from argosy.gateway.auth import Authenticator
from argosy.gateway.filters import LimitFilter
from argosy.gateway.model_registry import ModelRouter, ReplicaAdmin, ReplicaChange
from argosy.gateway.pool import Pool, ReplicaEndpoint
from argosy.gateway.upstream import Upstream
from argosy.protocol import ApiError, parse_endpoint
from argosy.store import AccountSnapshot, LocalQuotaBackend, StoreConfig

ACTOR = "test"
BIG, SMALL = (Pool(name, [], "round-robin") for name in ("big", "small"))


class PausingRouter(ModelRouter):
    """Router whose `resolve_aliases` pauses before it returns while `resume` is not set."""

    def __init__(self, named: Mapping[str, Pool], routes: tuple[RouteConfig, ...] = ()) -> None:
        self.resolved, self.resume = threading.Event(), threading.Event()
        self.resume.set()
        super().__init__(named, routes)

    def resolve_aliases(self, directory: AccountSnapshot) -> AccountSnapshot:
        snapshot = super().resolve_aliases(directory)
        self.resolved.set()
        assert self.resume.wait(30)
        return snapshot


@dataclass(frozen=True)
class SyncedParts:
    """Parts of a gateway that follow the accounts in a store."""

    accounting: AccountingService
    router: PausingRouter
    authenticator: Authenticator
    limits: LimitFilter
    sync: AccountSync

    def is_valid(self, key: str) -> bool:
        """Return whether the authenticator accepts a plaintext key."""
        try:
            self.authenticator.authenticate(bearer(key))
        except ApiError:
            return False
        return True

    async def update(self) -> None:
        """Apply the current accounts of the store."""
        snapshot = await asyncio.to_thread(self.accounting.store.load_snapshot)
        await self.sync.apply_snapshot(snapshot)


@contextlib.asynccontextmanager
async def synced_parts(folder: Path, num_accounts: int = 0) -> AsyncIterator[SyncedParts]:
    """Open the parts with a store of `num_accounts` keys and limits."""
    url = f"sqlite:///{folder}/store.db"
    accounting = await AccountingService.open(StoreConfig(url=url))
    if num_accounts:
        await asyncio.to_thread(fill, url, num_accounts)
    router = PausingRouter({"big": BIG, "small": SMALL, "alias": SMALL})
    authenticator = Authenticator(AccountSnapshot(), AuthConfig())
    limits = LimitFilter(LocalQuotaBackend())
    sync = AccountSync(accounting, router, authenticator, limits)
    await sync.apply_snapshot(accounting.snapshot)
    yield SyncedParts(accounting, router, authenticator, limits, sync)
    await accounting.close()


async def test_work_of_one_changed_key_does_not_grow_with_number_of_keys(tmp_path: Path) -> None:
    few, many = [await count_lines_of_change(tmp_path, accounts) for accounts in (10, 1500)]
    assert many < few + 500


async def count_lines_of_change(folder: Path, num_accounts: int) -> int:
    """Count the lines that the event loop's thread executes to revoke one key."""
    async with synced_parts(folder / str(num_accounts), num_accounts) as parts:
        accounts = parts.accounting.store.accounts
        created, key = accounts.create_key("proj_000001", "new", actor=ACTOR)
        await parts.update()
        assert parts.is_valid(key)
        accounts.revoke_key(created.id, actor=ACTOR)
        lines = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 - type of a trace function
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            await parts.update()
        finally:
            sys.settrace(before)
        assert not parts.is_valid(key)
    return lines


async def test_alias_that_moves_during_account_update_moves_its_limit(tmp_path: Path) -> None:
    async with synced_parts(tmp_path) as parts:
        store, router = parts.accounting.store, parts.router
        organisation = store.accounts.create_organisation("acme", actor=ACTOR)
        project = store.accounts.create_project(organisation.id, "web", actor=ACTOR).id
        store.limits_and_prices.set_limit(
            "project", project, "requests", 1, window="day", model="alias", actor=ACTOR
        )
        _, key = store.accounts.create_key(project, "k", actor=ACTOR)
        router.resume.clear()
        router.resolved.clear()
        updating = asyncio.create_task(parts.update())
        await asyncio.to_thread(router.resolved.wait)
        router.replace_models({"big": BIG, "small": SMALL, "alias": BIG}, ())
        router.resume.set()
        parts.sync.rebind_model_names()
        await updating
        principal = parts.authenticator.authenticate(bearer(key))
        for model in ("small", "small", "big"):
            async with parts.limits.reserve_request(principal, model, []):
                pass
        with pytest.raises(ApiError, match="1 request per day for 'big'"):
            await parts.limits.reserve_request(principal, "big", []).__aenter__()


async def test_snapshot_that_was_read_before_a_decision_does_not_undo_it(tmp_path: Path) -> None:
    async with synced_parts(tmp_path) as parts:
        store, router = parts.accounting.store, parts.router
        replica = ReplicaEndpoint(
            "r", "argosy", "m", Upstream(parse_endpoint("http://localhost:1"))
        )
        router.replace_models({"big": Pool("big", [replica])}, ())

        def state() -> str:
            return replica.admin.state

        store.accounts.create_organisation("acme", actor=ACTOR)
        router.resume.clear()
        router.resolved.clear()
        updating = asyncio.create_task(parts.update())
        await asyncio.to_thread(router.resolved.wait)
        admin = ReplicaAdmin(router, store)
        cordon = ReplicaChange(action="cordon", state="cordoned")
        before = time.monotonic()
        await admin.change("r", None, cordon, ACTOR)
        cordoned = replica.admin.setting
        assert cordoned is not None
        router.resume.set()
        await updating
        assert state() == "cordoned"
        parts.sync.rebind_model_names()
        assert state() == "cordoned"
        store.replica_settings.change_setting("big", "r", "undrain", state="active", actor="other")
        await parts.update()
        assert state() == "active"
        router.apply_decision(cordoned, before)  # arrives after the other gateway's decision
        assert state() == "active"


async def test_gateway_with_another_place_for_files_does_not_start(tmp_path: Path) -> None:
    async def start(folder: str) -> None:
        store = StoreConfig(url=f"sqlite:///{tmp_path}/argosy.db", blobs=str(tmp_path / folder))
        await (await AccountingService.open(store)).close()

    await start("one")
    await start("one")
    with pytest.raises(ValueError, match=r"store\.blobs is .*/two, but other gateways"):
        await start("two")
    await start("one")
