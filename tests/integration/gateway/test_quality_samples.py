"""Samples of answers: whose are kept, what of them, who grades them, and what they do not count for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, listening
from tests.support.gateway_client import run_gateway_server
from tests.support.gateway_processes import OrganisationAccounts, open_organisation
from tests.support.native_upstream import NativeScript, NativeUpstream
from tests.support.waiting import until

from argosy.deployment import (
    GatewayConfig,
    ModelConfig,
    QualityConfig,
    ReplicaConfig,
    SampleJudge,
    ScheduledRun,
    SeriesConfig,
)
from argosy.quality import GoldenSet, decode_set
from argosy.store import StoreConfig

EMAIL = "jane.roe@example.com"
GOLDEN: GoldenSet = decode_set(
    json.dumps(
        {
            "items": [
                {
                    "id": "hello",
                    "messages": [{"role": "user", "content": "Hello?"}],
                    "assertions": [{"type": "contains", "value": "Write to"}],
                }
            ]
        }
    ).encode()
)


@dataclass
class JudgeUpstream(FakeUpstream):
    """Model that grades all answers with 3 of 10, as a server of another kind."""

    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.script = self.probe_script = self._judge

    async def _judge(self, request: UpstreamRequest) -> None:
        self.seen.append(request.body["messages"][-1]["content"])
        content = json.dumps({"score": 3, "reason": f"asks {EMAIL}"})
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
        request.send_json(200, answer | {"choices": [choice], "usage": usage})


@dataclass
class SampledGateway:
    client: httpx2.AsyncClient
    accounts: OrganisationAccounts
    judge: JudgeUpstream
    projects: dict[str, str]
    """Ids by name."""
    keys: dict[str, str]

    async def chat(self, project: str, path: str = "chat/completions", **fields: Any) -> str:  # noqa: ANN401 - fields of a request
        body = {"model": "big", "messages": [{"role": "user", "content": f"I am {EMAIL}."}]}
        if path == "responses":
            body = {"model": "big", "input": "Hello"}
        headers = {"authorization": f"Bearer {self.keys[project]}"}
        response = await self.client.post(f"/v1/{path}", json=body | fields, headers=headers)
        assert response.status_code == 200, response.text
        return response.headers["x-argosy-request"]


@contextlib.asynccontextmanager
async def sampled_gateway(folder: Path, **quality: Any) -> AsyncIterator[SampledGateway]:  # noqa: ANN401 - settings
    url = f"sqlite:///{folder / 'argosy.db'}"
    model, judge = NativeUpstream(), JudgeUpstream()
    model.native_script = NativeScript(deltas=[{"content": each} for each in f"Write to {EMAIL}."])
    with open_organisation(url) as accounts:
        projects = {
            name: accounts.project(name, quality=name) for name in ("judged", "automatic", "off")
        }
        projects["payer"] = accounts.project("payer")
        keys = {name: accounts.key(each) for name, each in projects.items()}
        root = accounts.key(projects["payer"], "root", role="admin", scope="gateway")
        golden = accounts.store.quality.add_version(
            "greetings", GOLDEN.encode(), digest=GOLDEN.digest, items=1, actor="test"
        )
        assert golden.organisation is None
        async with listening(model), listening(judge):
            replicas = {
                "big": ReplicaConfig(url=model.url, kind="argosy", model="m"),
                "judge": ReplicaConfig(url=judge.url, kind="openai", model="m"),
            }
            config = GatewayConfig(
                port=0,
                models=[ModelConfig(name=name, replicas=[each]) for name, each in replicas.items()],
                store=StoreConfig(url=url),
                series=SeriesConfig(file=str(folder / "series.sqlite")),
                quality=QualityConfig(
                    sample_ratio=1.0,
                    project=projects["payer"],
                    judge=SampleJudge(model="judge"),
                    **quality,
                ),
            )
            async with run_gateway_server(config) as (_, client):
                client.headers["authorization"] = f"Bearer {root}"
                yield SampledGateway(client, accounts, judge, projects, keys)


async def test_only_answers_with_consent_are_kept_redacted_and_graded(tmp_path: Path) -> None:
    async with sampled_gateway(tmp_path) as gateway:
        accounts, quality = gateway.accounts, gateway.accounts.store.quality
        sampled = [
            await gateway.chat("judged"),
            await gateway.chat("judged", stream=True),
            await gateway.chat("automatic"),
        ]
        await gateway.chat("off")
        for fields in ({}, {"path": "responses"}):
            await gateway.chat("judged", store=False, **fields)
        await gateway.chat("judged", n=2)
        await until(lambda: len(quality.list_samples()) == 3)
        grades = [
            (each.id, each.project, each.judge, each.score, each.has_passed)
            for each in quality.list_samples()
        ]
        assert grades == [
            (sampled[0], gateway.projects["judged"], "judge", 0.3, False),
            (sampled[1], gateway.projects["judged"], "judge", 0.3, False),
            (sampled[2], gateway.projects["automatic"], "", 1.0, True),
        ]
        assert len(gateway.judge.seen) == 2
        assert EMAIL not in str(gateway.judge.seen)

        texts = (await gateway.client.get(f"/admin/quality/samples/{sampled[1]}")).json()
        assert (texts["question"], texts["answer"]) == ("I am [email].", "Write to [email].")
        assert texts["reason"] == "asks [email]"
        reads = (await gateway.client.get("/admin/audit?action=content.read")).json()["data"]
        assert [each["subject"] for each in reads] == [sampled[1]]
        rows = await accounts.wait_for_rows(9)
        assert {(row.project, row.model) for row in rows if row.route == "quality"} == {
            (gateway.projects["payer"], "judge")
        }
        summary = (await gateway.client.get("/admin/quality/summary")).json()["data"]
        assert [(each["judge"], each["samples"], each["passed"]) for each in summary] == [
            ("", 1, 1),
            ("judge", 2, 0),
        ]
        series: dict[str, list[float]] = {}
        while sum(map(sum, series.values())) < 10:
            query = {"scope": "fleet", "metrics": "requests,passed_grades,failed_grades"}
            answer = (await gateway.client.get("/admin/series", params=query)).json()
            series = {name: list(filter(None, each)) for name, each in answer["metrics"].items()}
        assert {name: sum(each) for name, each in series.items()} == {
            "requests": 7,
            "passed_grades": 1,
            "failed_grades": 2,
        }
        change = {"quality": "off"}
        await gateway.client.patch(f"/admin/projects/{gateway.projects['judged']}", json=change)
        assert [each.id for each in quality.list_samples()] == [sampled[2]]


async def test_golden_set_runs_once_when_it_is_due(tmp_path: Path) -> None:
    entry = ScheduledRun(set="greetings", model="big")
    async with sampled_gateway(tmp_path, schedule=(entry,)) as gateway:
        quality = gateway.accounts.store.quality
        await until(quality.list_runs)
        (run,) = quality.list_runs()
        assert (run.model, run.score, run.created_by) == ("big", 1.0, "schedule")
        (row,) = await gateway.accounts.wait_for_rows(1)
        assert (row.project, row.route) == (gateway.projects["payer"], "quality")
