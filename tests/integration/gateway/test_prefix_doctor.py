"""Diagnosis of prompts that miss the prefix cache of a real replica, and who may start it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.gateway_client import QUICK_TIMEOUTS, run_gateway_server
from tests.support.organisations import AdminGateway
from tests.support.replica_servers import MODEL, bundled_model_engine, serve
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import ExplainConfig, GatewayConfig, ModelConfig, ReplicaConfig

PATH = "/admin/prefix-doctor"
RULES = "Answer in one short sentence. Be polite, and name the source of each fact that you use.\n"
OTHER_RULES = (
    "Reply with a table of rivers and towns in it, sorted by their length and their age. " * 12
)
CANARY = "canary4711"


async def test_real_replica_loses_tokens_by_time_and_by_eviction() -> None:
    """A time in the system prompt is blamed with its position; a good prompt that was evicted is not."""
    engine = bundled_model_engine(blocks=32, max_seqs=1)
    async with serve(engine) as replica:
        model = ModelConfig(name="big", replicas=[ReplicaConfig(url=replica.url, model=MODEL)])
        config = GatewayConfig(
            port=0,
            models=[model],
            timeouts=QUICK_TIMEOUTS,
            explain=ExplainConfig(prefix_sample_ratio=1),
        )
        async with run_gateway_server(config) as (_, client):
            used = list[dict[str, Any]]()

            async def send(system: str, question: str) -> None:
                roles = {"system": system, "user": question}
                messages = [{"role": role, "content": text} for role, text in roles.items()]
                body = {"model": "big", "messages": messages, "max_tokens": 1}
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                used.append(response.json()["usage"])

            async def read() -> dict[str, Any]:
                """Return the report, once all prompts are examined."""
                report: dict[str, Any] = {}
                while report.get("requests") != len(used):
                    await asyncio.sleep(0.01)
                    (report,) = (await client.get(PATH)).json()["data"] or [{}]
                return report

            for minute in range(3):
                await send(f"It is 12:0{minute}. {RULES * 12}", f"Is {CANARY} a bird?")
            report = await read()
            total = sum(each["prompt_tokens"] for each in used)
            cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in used)
            assert (report["input_tokens"], report["cached_tokens"]) == (total, cached)
            (finding,) = report["findings"]
            assert (finding["cause"], finding["requests"]) == ("time", 2)
            assert finding["segment"] == "system prompt"
            assert finding["position_tokens"] < 16
            assert report["lost_by_prompt_tokens"] == finding["tokens"] > 0.5 * total / 3
            assert finding["saved_ttft_s"] > 0

            url = str(client.base_url)
            options = ["--model", "big", "--url", url]
            arguments = ["doctor", "prefix", *options]
            shown = await asyncio.to_thread(CliRunner().invoke, app, arguments)
            assert "System prompt, about token" in " ".join(shown.output.split()), shown.output
            started = await asyncio.to_thread(
                CliRunner().invoke, app, [*arguments, "--for", "10m", "--json"]
            )
            assert '"model": "big"' in started.output
            assert (await client.get(PATH)).json()["data"] == [], "its sums begin again"

            used.clear()
            for system in (OTHER_RULES, "Many words fill all of the cache. " * 50, OTHER_RULES):
                await send(system, "Is it?")
            report = await read()
            assert {each["cause"] for each in report["findings"]} == {"evicted"}
            assert report["lost_by_prompt_tokens"] == 0
            text = (await client.get(PATH)).text
            assert CANARY not in text
            assert "polite" not in text


async def test_tenants_see_and_start_only_their_own(admin_gateway: AdminGateway) -> None:
    """An operator of an organisation examines its prompts and sees no others."""
    client = admin_gateway.client
    _, user, operator = await admin_gateway.add_tenant()
    _, other_user, other_operator = await admin_gateway.add_tenant()
    body = {"duration_s": 60}
    assert (await client.post(PATH, json=body, headers=user)).status_code == 403
    started = await client.post(PATH, json=body, headers=operator)
    assert started.status_code == 200, started.text
    assert (await client.post(PATH, json={"duration_s": 9e9}, headers=operator)).status_code == 400
    completion = {"model": "big", "prompt": "Tell me " * 50, "max_tokens": 1}
    for headers in (user, other_user):
        response = await client.post("/v1/completions", json=completion, headers=headers)
        assert response.status_code == 200, response.text

    async def list_reports(headers: dict[str, str]) -> list[Any]:
        return list((await client.get(PATH, headers=headers)).json()["data"])

    reports = list[Any]()
    while not reports:
        await asyncio.sleep(0.01)
        reports = await list_reports(operator)
    assert [each["requests"] for each in reports] == [1]
    assert await list_reports(other_operator) == []
    assert reports == await list_reports(admin_gateway.root_headers)
    (watch,) = (await client.get(PATH, headers=operator)).json()["watches"]
    assert watch == started.json()
    assert (await client.get(PATH, headers=other_operator)).json()["watches"] == []
    for headers, is_shown in ((operator, True), (other_operator, False)):
        audit = await client.get("/admin/audit", headers=headers)
        assert ("prefix.examine" in audit.text) == is_shown
