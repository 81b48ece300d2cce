"""A gateway keeps nothing that a content rule removes: in its store, its other files, its log and explanations."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
from tests.support.fake_upstream import UpstreamRequest, listening
from tests.support.gateway_processes import OrganisationAccounts, gateways, open_organisation
from tests.support.native_upstream import NativeScript, NativeUpstream
from tests.support.waiting import until

from argosy.deployment import (
    AuthConfig,
    CascadeConfig,
    ContentRule,
    GatewayConfig,
    JudgeConfig,
    ModelConfig,
    ReplicaConfig,
    RouteConfig,
)
from argosy.store import StoreConfig, UsageRecord

CARD = "4111 1111 1111 1111"
DOMAIN = "@leak.example"
KEPT = "4242 4242 4242 4242"


def plant(channel: str) -> str:
    """Return a text that names its channel, with an address and a card."""
    return f"{channel}{DOMAIN} has {CARD}"


def list_requests(conversation: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return requests with something planted in each channel that a client has: method, path and body."""
    chat: dict[str, Any] = {
        "model": "big",
        "messages": [
            {"role": "system", "content": plant("system")},
            {"role": "user", "name": f"name{DOMAIN}", "content": [{"type": "text", "text": plant("part")}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function":
                {"name": "f", "arguments": json.dumps({f"key{DOMAIN}": plant("argument")})}}]},
            {"role": "tool", "tool_call_id": "a", "content": plant("result")},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": plant("tool"),
                   "parameters": {"type": "object", "properties": {f"property{DOMAIN}": {"type": "string"}}}}}],
        "metadata": {f"meta{DOMAIN}": plant("metadata")},
        "user": f"user{DOMAIN}", "safety_identifier": f"safety{DOMAIN}", "request_id": f"body-id{DOMAIN}",
    }  # fmt: skip
    response: dict[str, Any] = {
        "model": "big",
        "input": [{"role": "user", "content": plant("input")}],
        "instructions": plant("instructions"),
        "metadata": {f"meta{DOMAIN}": plant("metadata")},
        "user": f"user{DOMAIN}",
    }
    conversations = "/v1/conversations"
    items = {"items": [{"role": "user", "content": plant("item")}]}
    metadata = {"metadata": {"a": plant("conversation")}}
    return [
        ("POST", "/v1/chat/completions", chat | {"store": True}),
        ("POST", "/v1/chat/completions", chat | {"store": True, "stream": True}),
        ("POST", "/v1/responses", response),
        ("POST", "/v1/responses", response | {"stream": True, "conversation": conversation}),
        ("POST", "/v1/responses", response | {"background": True}),
        ("POST", conversations, items | metadata),
        ("POST", f"{conversations}/{conversation}", metadata),
        ("POST", f"{conversations}/{conversation}/items", items),
        ("POST", "/v1/messages", {"model": "big", "max_tokens": 9, "system": plant("system"),
                                  "messages": [{"role": "user", "content": plant("message")}]}),
        ("POST", "/api/chat", {"model": "big", "messages": [{"role": "user", "content": plant("ollama")}]}),
        ("POST", "/v1/chat/completions", chat | {"model": f"model{DOMAIN}"}),
        ("POST", "/v1/chat/completions", chat | {"temperature": plant("type")}),
        ("GET", f"/v1/responses/path{DOMAIN}?query=query{DOMAIN}", {}),
    ]  # fmt: skip


async def test_nothing_that_a_rule_removes_reaches_a_file_or_the_log(tmp_path: Path) -> None:
    answer = f"{plant('answer')}, {KEPT}."
    replica = NativeUpstream(
        native_script=NativeScript(
            deltas=[{"content": each} for each in answer],
            report={"steps": 3},
            content={"prompts": [plant("prompt")], "outputs": [plant("output")]},
        )
    )
    stream = replica.script

    async def respond(request: UpstreamRequest) -> None:
        if "refuse" in json.dumps(request.body):
            error = {"message": f"Bad prompt: {plant('error')}", "code": "bad"}
            request.send_json(400, {"error": error})
        elif stream is not None:
            await stream(request)

    replica.script = respond
    url = f"sqlite:///{tmp_path}/store.db"
    with open_organisation(url) as accounts:
        key = accounts.key(accounts.project("shop"))
        rule = ContentRule(output={"*": "report"}, at_rest={"email": "redact", "card": "mask"})
        cascade = CascadeConfig(judge=JudgeConfig(model="big"))
        async with listening(replica):
            config = GatewayConfig(
                port=0,
                models=[
                    ModelConfig(name=name, replicas=[ReplicaConfig(url=replica.url, kind="argosy", model="m")])
                    for name in ("big", "small")
                ],
                routes=[RouteConfig(model="big", target_model="small", cascade=cascade)],
                store=StoreConfig(url=url),
                auth=AuthConfig(mode="required"),
                content_rules=[rule],
                log_content=True,
            )  # fmt: skip
            async with gateways(config, tmp_path) as (gateway,):
                await send_all(gateway.url, key)
                await until(lambda: any(each.route == "judge" for each in read_rows(accounts)))
                judged = [each.request for each in read_rows(accounts) if each.route == "judge"]
                async with httpx2.AsyncClient(
                    base_url=gateway.url, headers={"api-key": key}
                ) as client:
                    for request in judged:
                        explained = (await client.get(f"/admin/requests/{request}")).text
                        assert '"steps"' in explained
                        assert CARD not in explained
                await gateway.stop()
                log = "".join(gateway.log)
        found = [each.findings for each in read_rows(accounts)]
    assert sum("output card report" in each for each in found) >= 4
    for path in list_files(tmp_path):
        content = path.read_bytes()
        for needle in (DOMAIN, CARD):
            at = content.find(needle.encode())
            assert at < 0, (path, content[max(0, at - 200) : at + 200])
    assert DOMAIN not in log, [line for line in log.splitlines() if DOMAIN in line]
    assert CARD not in log
    assert "[email]" in log
    assert b"**** **** **** 4242" in (tmp_path / "store.db").read_bytes()


def read_rows(accounts: OrganisationAccounts) -> list[UsageRecord]:
    """Return the rows of the ledger."""
    return [each for page in accounts.store.ledger.iter_records() for each in page]


def list_files(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return [each for each in folder.rglob("*") if each.is_file()]


async def send_all(url: str, key: str) -> None:
    """Send all requests, and check that what is read again and explained has nothing to remove."""
    headers = {"api-key": key, "idempotency-key": f"header{DOMAIN}", "user-agent": f"agent{DOMAIN}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        created = await client.post("/v1/conversations", json={})
        requests = list_requests(created.json()["id"])
        for number, (method, path, body) in enumerate(requests):
            name = f"header{number}{DOMAIN}"
            options: dict[str, Any] = {"headers": {"x-request-id": name, "idempotency-key": name}}
            if method == "POST":
                options["json"] = body
            response = await client.request(method, path, **options)
            assert response.status_code < 500, response.text
            if body.get("background"):
                while response.json()["status"] in {"queued", "in_progress"}:
                    await asyncio.sleep(0.05)
                    response = await client.get(f"/v1/responses/{response.json()['id']}")
                assert CARD not in response.text
            elif response.status_code == 200 and "x-argosy-request" in response.headers:
                assert CARD in response.text
                explained = await client.get(
                    f"/admin/requests/{response.headers['x-argosy-request']}"
                )
                assert (explained.status_code, CARD in explained.text) == (200, False)
        refused = requests[0][2] | {"messages": [{"role": "user", "content": "refuse"}]}
        assert (await client.post("/v1/chat/completions", json=refused)).status_code == 400
        stored = (await client.get("/v1/chat/completions")).json()
        assert len(stored["data"]) == 2
        assert "[email] has" in json.dumps(stored)
