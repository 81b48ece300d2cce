"""Gateway with a store, in which tests create customer organisations and keys of any role."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2

from argosy.deployment import (
    GatewayConfig,
    ModelConfig,
    ObjectivesConfig,
    ReplicaConfig,
    SloConfig,
)
from argosy.lessons import LESSONS
from argosy.store import (
    QualitySample,
    Role,
    RoleScope,
    SampledTexts,
    Store,
    StoreConfig,
    UsageRecord,
)
from tests.support.fake_upstream import (
    FakeUpstream,
    UpstreamScript,
    fake_upstream,
    respond_with_tokens,
)
from tests.support.gateway_client import serve_gateway
from tests.support.migrated_store import SQLITE, open_migrated_store

CallerReach = Literal["gateway", "own", "other"]
"""Where a role is held: in the whole gateway, in the customer's organisation or in another one."""
Json = dict[str, Any]

RUN_RESULT = """{"model":"big","against":"small","items":160,"total_items":300,"score":0.7,"passed":112,
"judge":"judge","judge_warning":"the judge is uncalibrated (0 labels of people)","discordant":[["<b>sum</b>",0.0,1.0]],
"comparison":{"verdict":"worse","clusters":160,"wins":3,"losses":21,"difference":-0.1125,"lower":-0.2,"upper":-0.03,
"margin":0.05,"worse_evidence":101.0,"not_worse_evidence":0.1,"detectable_loss":0.105}}"""
"""Parts of the result of a run that the console shows."""
_name_numbers = itertools.count()


@dataclass(frozen=True)
class ResourceIds:
    """Ids of one resource of each kind in an organisation. The defaults do not exist."""

    organisation: str = "org_unknown"
    project: str = "proj_unknown"
    user: str = "user_unknown"
    key: str = "key_unknown"
    limit: str = "limit_unknown"
    request: str = "req-unknown"
    adapter: str = "adapter_unknown"
    prompt: str = "prompt_unknown"
    sample: str = "chatcmpl-unknown"


def unique_name() -> str:
    return f"name-{next(_name_numbers)}"


def user_body(ids: ResourceIds) -> Json:
    email = f"{unique_name()}@x.test"
    return {"organisation": ids.organisation, "email": email, "project": ids.project}


def key_body(ids: ResourceIds) -> Json:
    return {"project": ids.project, "name": unique_name(), "user": ids.user}


def limit_body(owner_kind: str) -> Callable[[ResourceIds], Json]:
    def build_body(ids: ResourceIds) -> Json:
        owner = {"owner_kind": owner_kind, "owner": asdict(ids)[owner_kind]}
        return owner | {"unit": "tokens", "window": "day", "amount": 5}

    return build_body


class AdminGateway:
    """Running gateway with a store, an HTTP client, and the key of an administrator of the whole gateway."""

    upstreams: Sequence[FakeUpstream] = ()
    """The servers behind the model `big`."""

    def __init__(
        self, store_url: str, gateway_url: str, store: Store, home_project: str, root_key: str
    ) -> None:
        self.store_url = store_url
        self.store = store
        self.client = httpx2.AsyncClient(base_url=gateway_url, timeout=30)
        self.home_project = home_project
        self.root_headers = {"authorization": f"Bearer {root_key}"}
        self._headers: dict[tuple[Role, str], Json] = {}
        self._customer: ResourceIds | None = None
        self._other_organisation = ""

    def create_organisation(self, prefix: str) -> str:
        name = f"{prefix}-{unique_name()}"
        return self.store.accounts.create_organisation(name, actor="test").id

    async def create_customer(self) -> ResourceIds:
        """Create an organisation with one resource of each kind, a usage record and an explainable request."""
        accounts, organisation = self.store.accounts, self.create_organisation("customer")
        project = accounts.create_project(organisation, "web", actor="test").id
        user = accounts.create_user(organisation, f"{unique_name()}@x.test", actor="test").id
        limit = self.store.limits_and_prices.set_limit(
            "project", project, "requests", 9, window="day", actor="test"
        )
        key = await self.create("/admin/keys", {"project": project, "name": "web", "user": user})
        completion = {"model": "big", "prompt": "Say", "max_tokens": 1}
        headers = {"authorization": f"Bearer {key['key']}"}
        response = await self.client.post("/v1/completions", json=completion, headers=headers)
        record = UsageRecord(
            request=unique_name(),
            organisation=organisation,
            project=project,
            started_at=1,
            ended_at=2,
            status="completed",
        )
        self.store.ledger.add_records([record])
        request = response.headers["x-request-id"]
        adapter_name = unique_name()
        for digit in "12":
            adapter = self.store.adapters.add_version(
                adapter_name,
                "big",
                f"sha256:{digit * 64}",
                organisation=organisation,
                actor="test",
            )
        prompt = self.store.prompts.add_version(
            unique_name(), '{"text":"Be kind."}', organisation=organisation, actor="test"
        )
        golden_set = self.store.quality.add_version(
            unique_name(),
            b"{}",
            digest=unique_name(),
            items=300,
            organisation=organisation,
            actor="test",
        )
        self.store.quality.add_run(
            golden_set.id,
            model="big",
            against="small",
            verdict="worse",
            score=0.7,
            result=RUN_RESULT,
            actor="test",
        )
        self.store.accounts.change_project(project, quality="automatic", actor="test")
        sample = QualitySample(
            id=unique_name(),
            organisation=organisation,
            project=project,
            model=f"tuned-{organisation}",
            score=1.0,
            has_passed=True,
            created_at=time.time(),
        )
        texts = SampledTexts(reason="", question="Hello?", answer=f"Hi, {organisation}.")
        assert self.store.quality.add_sample(sample, texts)
        return ResourceIds(
            *(organisation, project, user, key["id"], limit.id, request, adapter.id, prompt.id),
            sample.id,
        )

    async def create(self, path: str, body: Json) -> Json:
        """Create a record as administrator. The gateway knows such a record at once."""
        response = await self.client.post(path, json=body, headers=self.root_headers)
        assert response.status_code == 200, response.text
        created: Json = response.json()
        return created

    async def key_headers(self, role: Role, scope: RoleScope, organisation: str | None) -> Json:
        """Return headers with a new key of a role, in a new project of an organisation or in the home project."""
        project = self.home_project
        if organisation is not None:
            accounts = self.store.accounts
            project = accounts.create_project(organisation, unique_name(), actor="test").id
        return await self._add_key(project, role, scope)

    async def _add_key(self, project: str, role: Role, scope: RoleScope = "organisation") -> Json:
        body = {"project": project, "name": unique_name(), "role": role, "scope": scope}
        return {"authorization": f"Bearer {(await self.create('/admin/keys', body))['key']}"}

    async def add_tenant(self) -> tuple[str, Json, Json]:
        """Return the id of a new organisation, and headers of a user and of an operator of its project `web`."""
        organisation = self.create_organisation("tenant")
        project = self.store.accounts.create_project(organisation, "web", actor="test").id
        user, operator = [await self._add_key(project, role) for role in ("user", "operator")]
        return organisation, user, operator

    async def current_customer(self, *, renews: bool = False) -> ResourceIds:
        """Return the customer that tests share until one changes it. `renews` creates another one."""
        if self._customer is None or renews:
            self._customer = await self.create_customer()
        return self._customer

    async def caller_headers(self, role: Role, reach: CallerReach, customer: ResourceIds) -> Json:
        """Return headers with a key of a role whose reach is relative to a customer."""
        if reach == "other" and not self._other_organisation:
            self._other_organisation = self.create_organisation("other")
        organisation = {"own": customer.organisation, "other": self._other_organisation}.get(reach)
        found = self._headers.get((role, organisation or ""))
        if found is None:
            scope: RoleScope = "gateway" if organisation is None else "organisation"
            found = await self.key_headers(role, scope, organisation)
            self._headers[role, organisation or ""] = found
        return found


OBJECTIVES = ObjectivesConfig(slos=(SloConfig(name="answers", availability="99%"),))


@contextlib.asynccontextmanager
async def run_admin_gateway(
    folder: Path,
    *,
    model: str = "big",
    replica_names: Sequence[str] = ("a", "b"),
    script: UpstreamScript = respond_with_tokens,
    replica_settings: Mapping[str, Any] | None = None,
    **settings: Any,  # noqa: ANN401 - fields of `GatewayConfig`
) -> AsyncIterator[AdminGateway]:
    """Run a gateway with a new store in a folder and further settings.

    Its model has a replica of each name, which answers by `script`.
    """
    store_url = f"{SQLITE}{folder / 'argosy.db'}"
    store = open_migrated_store(store_url)
    home = store.accounts.create_organisation(unique_name(), actor="test").id
    home_project = store.accounts.create_project(home, "fleet", actor="test").id
    _, root_key = store.accounts.create_key(
        home_project, "root", role="admin", scope="gateway", actor="test"
    )
    async with contextlib.AsyncExitStack() as stack:
        upstreams = [await stack.enter_async_context(fake_upstream(script)) for _ in replica_names]
        common: dict[str, Any] = {"kind": "openai", "model": "rough", **(replica_settings or {})}
        replicas = [
            ReplicaConfig(url=upstream.url, name=name, **common)
            for name, upstream in zip(replica_names, upstreams, strict=True)
        ]
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name=model, replicas=replicas)],
            store=StoreConfig(url=store_url),
            fleet="demo",
            **{"objectives": OBJECTIVES, **settings},
        )
        _, url = await stack.enter_async_context(serve_gateway(config, lessons=LESSONS))
        gateway = AdminGateway(store_url, url, store, home_project, root_key)
        gateway.upstreams = upstreams
        async with gateway.client:
            yield gateway
    store.close()
