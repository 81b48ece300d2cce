"""Adapters behind a gateway: names of tenants, load calls of other engines (their servers are doubles), the ledger."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from tests.support.fake_upstream import UpstreamRequest
from tests.support.organisations import AdminGateway, Json, run_admin_gateway, unique_name
from tests.support.waiting import until

from argosy.policy.rollout import GateSettings

FIRST, SECOND, THIRD, FOURTH = (f"sha256:{digit * 64}" for digit in "1234")
BODY: Json = {"model": "support", "prompt": "Say", "max_tokens": 2}
ADAPTER_ROOT = "/adapters"


async def name_adapter(request: UpstreamRequest) -> None:
    """Answer with the name of the adapter."""
    model = request.body.get("lora_path") or request.body["model"]
    choice = {"index": 0, "text": model, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    request.send_json(200, {"choices": [choice], "usage": usage})


class AdapterGateway:
    """Gateway before servers of one kind that load adapters, with two tenants."""

    def __init__(self, gateway: AdminGateway) -> None:
        self.admin = gateway
        self.client = gateway.client
        for upstream in gateway.upstreams:
            upstream.adapters = {}

    async def load(self, headers: Json, digest: str, fields: Json | None = None) -> httpx2.Response:
        body = {"lora_name": "support", "lora_path": digest} | (fields or {})
        return await self.client.post("/v1/load_lora_adapter", json=body, headers=headers)

    async def ask(self, headers: Json, model: str = "support") -> httpx2.Response:
        body, named = BODY | {"model": model}, headers | {"x-request-id": "one"}
        return await self.client.post("/v1/completions", json=body, headers=named)


@pytest.fixture(params=["vllm", "sglang"])
async def gateway(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AdapterGateway]:
    monkeypatch.setattr("argosy.gateway.adapter_keeper.CHECK_INTERVAL_S", 0.02)
    settings = {"kind": request.param, "adapter_root": ADAPTER_ROOT}
    async with run_admin_gateway(
        tmp_path, script=name_adapter, replica_settings=settings, replica_names=["a"]
    ) as running:
        yield AdapterGateway(running)


async def test_a_name_means_the_adapter_of_the_callers_tenant(gateway: AdapterGateway) -> None:
    upstream = gateway.admin.upstreams[0]
    _, first, first_operator = await gateway.admin.add_tenant()
    second_id, second, second_operator = await gateway.admin.add_tenant()
    _, foreign, _ = await gateway.admin.add_tenant()
    assert (await gateway.load(first, FIRST)).status_code == 403
    loaded = await gateway.load(first_operator, FIRST)
    assert loaded.text == "Success: LoRA adapter 'support' added successfully."
    assert (await gateway.load(second_operator, SECOND)).status_code == 200
    for headers, digest in ((first, FIRST), (second, SECOND), (first, FIRST)):
        answer = await gateway.ask(headers)
        assert answer.json()["choices"][0]["text"] == digest, answer.text
    digits = FIRST.removeprefix("sha256:")
    assert upstream.adapters is not None
    assert upstream.adapters[FIRST] == f"{ADAPTER_ROOT}/{digits}"
    assert upstream.adapter_loads == 2
    known, unknown = await gateway.ask(foreign), await gateway.ask(foreign, "nothing")
    assert known.status_code == 404
    assert known.json()["error"].items() >= {"code": "model_not_found", "param": "model"}.items()
    assert known.content.replace(b"support", b"nothing") == unknown.content
    for path in ("/v1/models/support", f"/v1/models/{FIRST}"):
        assert (await gateway.client.get(path, headers=foreign)).status_code == 404
    assert (await gateway.ask(first, FIRST)).status_code == 404
    models = (await gateway.client.get("/v1/models", headers=second)).json()["data"]
    cards = {card["id"]: (card["root"], card["parent"]) for card in models}
    assert cards == {"big": ("big", None), "support": (SECOND, "big")}

    def rows() -> list[tuple[str, str]]:
        found = itertools.chain(*gateway.admin.store.ledger.iter_records())
        return [(row.model, row.digest) for row in found if row.organisation == second_id]

    await until(lambda: rows() == [("support", SECOND)])


async def test_a_restarted_server_is_sent_the_load_call_again(gateway: AdapterGateway) -> None:
    _, user, operator = await gateway.admin.add_tenant()
    await gateway.load(operator, FIRST)
    upstream = gateway.admin.upstreams[0]

    async def refuse_unknown(request: UpstreamRequest) -> None:
        known = request.body.get("lora_path") or request.body["model"]
        if known in (upstream.adapters or {}):
            await name_adapter(request)
        else:
            request.send_json(404, {"error": {"message": "The model does not exist."}})

    upstream.script = refuse_unknown
    for loads in (1, 2):
        answers = await asyncio.gather(*(gateway.ask(user) for _ in range(4)))
        assert {answer.status_code for answer in answers} == {200}
        assert upstream.adapter_loads == loads
        assert upstream.adapters is not None
        upstream.adapters.clear()
    upstream.adapters = None  # refuses load calls
    answer = await gateway.ask(user)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "adapter_load_failed")
    upstream.script = name_adapter
    base = await gateway.ask(user, "big")
    assert base.json()["choices"][0]["text"] == "rough"


async def test_a_pinned_adapter_is_loaded_before_its_first_request(gateway: AdapterGateway) -> None:
    _, _, operator = await gateway.admin.add_tenant()
    body = {"name": "support", "base_model": "big", "digest": FIRST, "pinned": True}
    added = await gateway.client.post("/admin/adapters", json=body, headers=operator)
    assert added.json().items() >= {"wanted_replicas": 1, "resident_replicas": 0}.items()
    upstream = gateway.admin.upstreams[0]
    await until(lambda: upstream.adapter_loads == 1)
    listed = (await gateway.client.get("/admin/adapters", headers=operator)).json()["data"]
    assert [each["resident_replicas"] for each in listed] == [1]
    assert upstream.requests == []


async def test_versions_change_and_end_as_their_operator_decides(gateway: AdapterGateway) -> None:
    """Servers are let unload what no name stands for any more."""
    upstream = gateway.admin.upstreams[0]
    organisation, user, operator = await gateway.admin.add_tenant()
    await gateway.load(operator, FIRST)
    refused = [
        await gateway.load(operator, SECOND),
        await gateway.load(operator, "/etc/adapter"),
        await gateway.load(operator, FIRST, {"base_model_name": "nothing"}),
        await gateway.load(operator, FIRST, {"lora_name": "big"}),
    ]
    assert [answer.status_code for answer in refused] == [400, 400, 404, 409]
    assert (await gateway.ask(user)).json()["choices"][0]["text"] == FIRST
    assert (await gateway.load(operator, SECOND, {"load_inplace": True})).status_code == 200
    await until(lambda: upstream.adapters == {})
    assert (await gateway.ask(user)).json()["choices"][0]["text"] == SECOND
    body = {"name": "support", "base_model": "big", "digest": THIRD, "candidate_percent": 100}
    added = await gateway.client.post("/admin/adapters", json=body, headers=operator)
    assert added.json().items() >= {"digest": SECOND, "candidate": THIRD}.items()
    assert (await gateway.ask(user)).json()["choices"][0]["text"] == THIRD
    change = {"candidate_percent": 0}
    adapter = added.json()["id"]
    await gateway.client.patch(f"/admin/adapters/{adapter}", json=change, headers=operator)
    assert (await gateway.ask(user)).json()["choices"][0]["text"] == SECOND
    await gateway.client.post(f"/admin/adapters/{adapter}/promote", headers=operator)
    assert (await gateway.ask(user)).json()["choices"][0]["text"] == THIRD
    unload = {"lora_name": "support"}
    ended = [
        await gateway.client.post("/v1/unload_lora_adapter", json=unload, headers=operator)
        for _ in range(2)
    ]
    assert [answer.status_code for answer in ended] == [200, 404]
    assert (await gateway.ask(user)).status_code == 404
    await until(lambda: upstream.adapters == {})
    actions = [
        entry.action
        for entry in gateway.admin.store.audit_log.list_entries(subject=adapter)
        if entry.organisation == organisation
    ]
    assert {"adapter.create", "adapter.add_version", "adapter.promote", "adapter.delete"} <= {
        *actions
    }


async def test_a_candidate_is_rolled_out_while_it_is_no_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A good version answers all at the end, and a broken one is rolled back and not tried again.

    One without a share answers copies only, so that no user sees it.
    """
    rollouts = "argosy.gateway.adapter_rollouts"
    monkeypatch.setattr(f"{rollouts}.CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr("argosy.gateway.adapter_keeper.CHECK_INTERVAL_S", 0.02)
    for name in ("MIN_BATCH_S", "MAX_BATCH_S"):
        monkeypatch.setattr(f"argosy.policy.rollout.comparison.{name}", 0.05)
    monkeypatch.setattr("argosy.policy.rollout.share_steps.SHARE_STEPS", (50,))
    settings = GateSettings(max_miss_rate=0.3, max_false_rollbacks=0.2)
    monkeypatch.setattr(f"{rollouts}.SETTINGS", settings)
    monkeypatch.setattr(f"{rollouts}.SHADOW_FRACTION", 0.9)
    meter = "argosy.gateway.version_comparison.adapter_meter"
    monkeypatch.setattr(f"{meter}.MAX_COPIES_PER_S", 1000.0)
    statuses = set[int]()

    async def lack_latest(request: UpstreamRequest) -> None:
        if request.body["model"] in {THIRD, FOURTH}:
            request.send_json(404, {"error": {"message": "The model does not exist."}})
        else:
            await name_adapter(request)

    replica = {"kind": "vllm", "adapter_root": ADAPTER_ROOT, "max_requests": 64}
    async with run_admin_gateway(
        tmp_path, script=lack_latest, replica_settings=replica, replica_names=["a"]
    ) as running:
        gateway = AdapterGateway(running)
        _, user, operator = await gateway.admin.add_tenant()
        await gateway.load(operator, FIRST)

        async def add(digest: str, fields: Json) -> httpx2.Response:
            body = {"name": "support", "base_model": "big", "digest": digest} | fields
            return await gateway.client.post("/admin/adapters", json=body, headers=operator)

        async def ask_until(digest: str | None) -> Json:
            """Send requests of many users until the adapter has this candidate, and return it."""
            for _ in range(1000):
                listed = await gateway.client.get("/admin/adapters", headers=operator)
                adapter: Json = listed.json()["data"][0]
                if adapter["candidate"] == digest:
                    return adapter
                answers = await asyncio.gather(
                    *(
                        gateway.client.post(
                            "/v1/completions", json=BODY | {"user": unique_name()}, headers=user
                        )
                        for _ in range(10)
                    )
                )
                statuses.update(answer.status_code for answer in answers)
            raise AssertionError(adapter)

        added = (await add(SECOND, {"step_s": 1})).json()
        assert added.items() >= {"candidate": SECOND, "candidate_percent": 0}.items()
        assert added["rollout_status"] == "loading, and measuring the version that answers"
        answering = await ask_until(None)
        assert answering.items() >= {"digest": SECOND, "rejected": None}.items()
        await add(FOURTH, {"step_s": 600})
        kept = await ask_until(None)
        assert kept.items() >= {"digest": SECOND, "rejected": FOURTH}.items()
        assert statuses == {200}
        metrics = (await gateway.client.get("/metrics", headers=running.root_headers)).text
        assert 'argosy_shadow_requests_total{model="big",outcome="completed"}' in metrics
        await add(THIRD, {"candidate_percent": 50})
        kept = await ask_until(None)
        assert kept.items() >= {"digest": SECOND, "rejected": THIRD}.items()
        assert kept["rollout_status"].startswith("rolled back: errors is worse than in the stable")
        refused = await add(THIRD, {})
        assert (refused.status_code, "was rolled back" in refused.text) == (409, True)
        entries = running.store.audit_log.list_entries(subject=kept["id"])
        decided = [each for each in entries if each.actor == "adapter rollout"]
        assert [each.action.removeprefix("adapter.") for each in decided] == [
            *("roll_back", "roll_back", "promote", "raise_share"),
        ]
        assert "errors is worse" in str(decided[0].details)


async def test_a_candidate_that_cannot_be_loaded_answers_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.adapter_rollouts.CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr("argosy.gateway.adapter_keeper.CHECK_INTERVAL_S", 0.02)

    async def refuse(request: UpstreamRequest) -> None:
        error = {"code": "invalid_adapter", "message": "r is 0"}
        request.send_json(400, {"error": error})

    async with run_admin_gateway(
        tmp_path, replica_settings={"kind": "argosy"}, replica_names=["a"]
    ) as running:
        running.upstreams[0].probe_script = refuse
        body: Json = {"name": "support", "base_model": "big", "digest": FIRST}
        headers = running.root_headers
        for digest in (FIRST, SECOND):
            body["digest"] = digest
            added = await running.client.post("/admin/adapters", json=body, headers=headers)

        path = f"/admin/adapters/{added.json()['id']}"

        async def status() -> str:
            adapter = (await running.client.get(path, headers=headers)).json()
            return f"{adapter['candidate']} {adapter['rollout_status']}"

        async with asyncio.timeout(30):
            while "rolled back" not in (found := await status()):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
        assert found == "None rolled back: it cannot be loaded: status 400: r is 0"
