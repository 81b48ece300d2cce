"""A whole gateway with a store, customers' organisations in it, and keys for whatever role is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import httpx2

from argosy.gateway import GatewayConfig, GatewayServer, ModelConfig, ReplicaConfig
from argosy.store import Role, RoleScope, Store, StoreConfig, UsageRecord, open_store
from tests.support.scripted_server import rough_server

Holding = Literal["gateway", "own", "other"]
Json = dict[str, Any]

_number = itertools.count()


@dataclass(frozen=True)
class Ids:
    """What an organisation has, one of each; by default what nobody has."""

    organisation: str = "org_nobodys"
    project: str = "proj_nobodys"
    user: str = "user_nobodys"
    key: str = "key_nobodys"
    limit: str = "limit_nobodys"
    request: str = "req-nobodys"


def name() -> str:
    """One that nobody has yet."""
    return f"name-{next(_number)}"


def user_body(ids: Ids) -> Json:
    return {"organisation": ids.organisation, "email": f"{name()}@x.test", "project": ids.project}


def key_body(ids: Ids) -> Json:
    return {"project": ids.project, "name": name(), "user": ids.user}


def limit_body(kind: str) -> Callable[[Ids], Json]:
    def body(ids: Ids) -> Json:
        owner = asdict(ids)[kind]
        limited = {"unit": "tokens", "window": "day", "amount": 5}
        return {"owner_kind": kind, "owner": owner} | limited

    return body


class World:
    """A gateway with a store, and an admin's key for the whole gateway, which is one of the project `home`."""

    def __init__(self, url: str, base: str, store: Store, home: str, root: str) -> None:
        self.url = url
        self.store = store
        self.client = httpx2.AsyncClient(base_url=base, timeout=30)
        self.home = home
        self.root = {"authorization": f"Bearer {root}"}

    def organisation(self, called: str) -> str:
        return self.store.accounts.create_organisation(f"{called}-{name()}", actor="test").id

    async def customer(self) -> Ids:
        """An organisation with one of each, one request in the ledger and one that can be explained."""
        accounts, organisation = self.store.accounts, self.organisation("customer")
        project = accounts.create_project(organisation, "web", actor="test").id
        user = accounts.create_user(organisation, f"{name()}@x.test", actor="test").id
        limit = self.store.limits_and_prices.set_limit(
            "project", project, "requests", 9, window="day", actor="test"
        )
        key = await self.made("/admin/keys", {"project": project, "name": "web", "user": user})
        sent = {"model": "big", "prompt": "Say", "max_tokens": 1}
        headers = {"authorization": f"Bearer {key['key']}"}
        answer = await self.client.post("/v1/completions", json=sent, headers=headers)
        request = answer.headers["x-request-id"]
        row = UsageRecord(
            request=name(),
            organisation=organisation,
            project=project,
            started_at=1,
            ended_at=2,
            status="completed",
        )
        self.store.ledger.add_records([row])
        return Ids(organisation, project, user, key["id"], limit.id, request)

    async def made(self, path: str, body: Json) -> Json:
        """What the operator of the whole gateway makes: known at once, which it is not without the API."""
        answer = await self.client.post(path, json=body, headers=self.root)
        assert answer.status_code == 200, answer.text
        made: Json = answer.json()
        return made

    async def headers(self, role: Role, scope: RoleScope, organisation: str | None) -> Json:
        """Those of a key with a role, in a project of its own."""
        project = self.home
        if organisation is not None:
            made = self.store.accounts.create_project(organisation, name(), actor="test")
            project = made.id
        body = {"project": project, "name": name(), "role": role, "scope": scope}
        return {"authorization": f"Bearer {(await self.made('/admin/keys', body))['key']}"}

    async def holder(self, role: Role, holding: Holding, customer: Ids) -> Json:
        """The headers of somebody with this role, held with regard to the customer as it says."""
        if holding == "gateway":
            return await self.headers(role, "gateway", None)
        own = holding == "own"
        organisation = customer.organisation if own else self.organisation("other")
        return await self.headers(role, "organisation", organisation)


@contextlib.asynccontextmanager
async def gateway_with_store(url: str) -> AsyncIterator[World]:
    """A gateway with the store at this URL, which is migrated."""
    store = open_store(url)
    fleet = store.accounts.create_organisation(name(), actor="test").id
    home = store.accounts.create_project(fleet, "fleet", actor="test").id
    _, root = store.accounts.create_key(home, "root", role="admin", scope="gateway", actor="test")
    async with rough_server() as replica:
        behind = ReplicaConfig(url=replica.url, kind="openai", model="rough")
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name="big", replicas=[behind])],
            store=StoreConfig(url=url),
        )
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = GatewayServer(config, ready.set_result)
        task = asyncio.create_task(server.run())
        try:
            world = World(url, await ready, store, home, root)
            async with world.client:
                yield world
        finally:
            server.stop()
            await task
            store.close()
