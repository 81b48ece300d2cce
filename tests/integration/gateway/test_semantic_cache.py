"""Semantic cache in a gateway: which questions share an answer, which never do, and what happens without embeddings."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, listening
from tests.support.gateway_client import run_gateway_server
from tests.support.native_upstream import NativeScript, NativeUpstream
from typer.testing import CliRunner

from argosy.cli.app import app
from argosy.deployment import (
    CacheRule,
    ContentRule,
    GatewayConfig,
    ModelConfig,
    ReplicaConfig,
    SemanticCacheConfig,
    load_config,
)
from argosy.policy.paraphrase import CacheEvaluation, guard_version

CHAT = "/v1/chat/completions"
EVALUATION = CacheEvaluation(
    embedding_digest="unverified",
    pairs_digest="0" * 64,
    guard="no_substitution",
    guard_version=guard_version(),
    threshold=0.85,
    equal_pairs=100,
    hits=60,
    unequal_pairs=200,
    wrong_answers=1,
)
ON = SemanticCacheConfig(embedding_model="embedder", evaluation=EVALUATION, timeout_s=5.0)
QUESTION = "How do I reset my password?"
PARAPHRASE = "What are the steps to reset my password?"


class Embedder(FakeUpstream):
    """Embedding server that finds all texts alike but those of cats. Never compared with a real one."""

    def __init__(self) -> None:
        super().__init__(self._embed)
        self.mode = ""
        self.count = 0

    async def _embed(self, request: UpstreamRequest) -> None:
        self.count += 1
        if self.mode == "slow":
            await asyncio.Event().wait()
        texts = request.body["input"]
        vectors = [[1.0, 0.1 * len(text) / 100, float("cat" in text)] for text in texts]
        if self.mode == "wrong":
            vectors = [[0.0, 0.0, 0.0]]
        data = [{"index": at, "embedding": each} for at, each in enumerate(vectors)]
        status = 500 if self.mode == "broken" else 200
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        request.send_json(status, {"object": "list", "data": data, "model": "e", "usage": usage})


class CountingReplica(NativeUpstream):
    """Replica whose answers are numbered."""

    async def _stream(self, request: UpstreamRequest) -> None:
        number = str(sum("messages" in each.body for each in self.requests))
        self.native_script = NativeScript(
            deltas=[{"content": each} for each in ("Answer ", number)]
        )
        await super()._stream(request)


@contextlib.asynccontextmanager
async def semantic_gateway(
    semantic: SemanticCacheConfig | None = ON,
    **config: Any,  # noqa: ANN401
) -> AsyncIterator[tuple[httpx2.AsyncClient, CountingReplica, Embedder]]:
    replica, embedder = CountingReplica(), Embedder()
    async with listening(replica), listening(embedder):
        models = [
            ModelConfig(name="big", replicas=[ReplicaConfig(url=replica.url, kind="argosy", model="m")]),
            ModelConfig(name="embedder", replicas=[ReplicaConfig(url=embedder.url, kind="openai", model="e")]),
        ]  # fmt: skip
        rule = CacheRule(name="all", model="big", semantic=semantic, with_tools=True)
        settings = GatewayConfig(port=0, models=models, cache_rules=[rule], **config)
        async with run_gateway_server(settings) as (_, client):
            yield client, replica, embedder


async def ask(
    client: httpx2.AsyncClient,
    question: Any,  # noqa: ANN401
    headers: dict[str, str] | None = None,
    **fields: Any,  # noqa: ANN401
) -> tuple[str, str]:
    """Return how the cache answers, and the answer."""
    messages = question if isinstance(question, list) else [{"role": "user", "content": question}]
    body = {"model": "big", "messages": messages, "temperature": 0} | fields
    response = await client.post(CHAT, json=body, headers=headers)
    assert response.status_code == 200, response.text
    text = response.json()["choices"][0]["message"]["content"]
    return response.headers["x-argosy-cache"], text


async def test_a_paraphrase_gets_the_answer_and_a_different_question_does_not() -> None:
    async with semantic_gateway() as (client, replica, embedder):
        assert await ask(client, QUESTION) == ("miss", "Answer 1")
        assert await ask(client, PARAPHRASE) == ("semantic", "Answer 1")
        assert await ask(client, QUESTION) == ("hit", "Answer 1")
        assert await ask(client, "How do I not reset my password?") == ("miss", "Answer 2")
        assert await ask(client, "How do I reset my cat's password?") == ("miss", "Answer 3")
        assert embedder.count == 4
        assert sum("messages" in each.body for each in replica.requests) == 3
        metrics = (await client.get("/metrics")).text
        for result in ("served", "rejected", "none"):
            assert f'semantic_lookups_total{{result="{result}",rule="all"}}' in metrics
        assert 'cache_requests_total{result="semantic",rule="all"} 1.0' in metrics


SYSTEM = {"role": "system", "content": "Be brief"}
USER = {"role": "user", "content": PARAPHRASE}
OTHERS: list[tuple[list[dict[str, Any]], dict[str, Any], dict[str, str]]] = [
    ([SYSTEM, USER], {}, {}),
    ([USER, {"role": "assistant", "content": "x"}, USER], {}, {}),
    ([USER | {"name": "jo"}], {}, {}),
    ([{"role": "user", "content": [{"type": "text", "text": each} for each in ("So", PARAPHRASE)]}], {}, {}),
    ([USER], {"max_tokens": 7}, {}),
    ([USER], {"seed": 7}, {}),
    ([USER], {"a_later_parameter": 1}, {}),
    ([USER], {"response_format": {"type": "json_object"}}, {}),
    ([USER], {"tools": [{"type": "function", "function": {"name": "f"}}]}, {}),
    ([USER], {}, {"x-filter": "1"}),
    ([USER], {}, {"cache-control": "no-store"}),
]  # fmt: skip


async def test_only_the_question_may_differ() -> None:
    rule = ContentRule(headers={"x-filter": "1"}, output={"email": "redact"})
    async with semantic_gateway(content_rules=[rule]) as (client, _, _):
        assert (await ask(client, QUESTION))[0] == "miss"
        for messages, fields, headers in OTHERS:
            result, _ = await ask(client, messages, headers, **fields)
            assert result in {"miss", "bypass"}, (messages, fields, headers)
        parts = [{"type": "text", "text": "How can I reset my password?"}]
        assert (await ask(client, [{"role": "user", "content": parts}]))[0] == "semantic"


@pytest.mark.parametrize("mode", ["slow", "broken", "wrong"])
async def test_without_an_embedding_the_answer_is_computed(mode: str) -> None:
    config = msgspec.structs.replace(ON, timeout_s=0.05 if mode == "slow" else 5.0)
    async with semantic_gateway(config) as (client, _, embedder):
        embedder.mode = mode
        for number, question in enumerate((QUESTION, PARAPHRASE, "How can I reset it?"), 1):
            assert await ask(client, question) == ("miss", f"Answer {number}")
        calls = embedder.count
        assert await ask(client, "Is it down?") == ("miss", "Answer 4")
        assert embedder.count == calls  # it is not asked again at once
        assert await ask(client, QUESTION) == ("hit", "Answer 1")


async def test_a_dry_run_counts_and_compares_but_does_not_answer() -> None:
    config = SemanticCacheConfig(embedding_model="embedder", dry_run=True, compared_share=1, timeout_s=5.0)  # fmt: skip
    async with semantic_gateway(config) as (client, _, _):
        assert await ask(client, QUESTION) == ("miss", "Answer 1")
        assert await ask(client, PARAPHRASE) == ("miss", "Answer 2")
        for result in ("would_serve", "agreed"):
            line = f'semantic_lookups_total{{result="{result}",rule="all"}} 1.0'
            while line not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - the gateway's own count
                await asyncio.sleep(0.01)


async def test_entries_are_bounded_and_the_least_used_is_dropped() -> None:
    config = msgspec.structs.replace(ON, max_entries=2)
    async with semantic_gateway(config) as (client, _, _):
        for word in ("alpha", "beta", "gamma"):
            assert (await ask(client, f"How do I reset {word}?"))[0] == "miss"
        words = ("gamma", "beta", "alpha")
        results = [(await ask(client, f"How can I reset {each}?"))[0] for each in words]
        assert results == ["semantic", "semantic", "miss"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"embedding_model": "other"}, "embedding_model"),
        ({"evaluation": None}, "argosy cache evaluate"),
        ({"guard": "no_residual"}, "of the guard"),
        ({"max_wrong_answers": 0.02}, "max_wrong_answers"),
        ({"evaluation": msgspec.structs.replace(EVALUATION, threshold=0.9)}, "threshold"),
        ({"evaluation": msgspec.structs.replace(EVALUATION, guard_version="1")}, "of the guard"),
        ({"evaluation": msgspec.structs.replace(EVALUATION, unequal_pairs=10)}, "max_wrong_answers"),
    ],
)  # fmt: skip
def test_a_rule_without_a_passing_evaluation_is_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    semantic = msgspec.to_builtins(msgspec.structs.replace(ON, **changes))
    models = [{"name": each, "replicas": [{"url": "http://localhost:1"}]} for each in ("big", "embedder")]  # fmt: skip
    path = tmp_path / "gateway.yaml"
    path.write_text(json.dumps({"models": models, "cache_rules": [{"semantic": semantic}]}))
    with pytest.raises(ValueError, match=problem):
        load_config(path)


@pytest.mark.parametrize("change", ["embedding_digest", "guard_version"])
async def test_a_rule_whose_evaluation_does_not_hold_finds_equal_requests_only(change: str) -> None:
    evaluation = msgspec.structs.replace(EVALUATION, **{change: "other"})
    config = msgspec.structs.replace(ON, evaluation=evaluation)
    async with semantic_gateway(config) as (client, _, embedder):
        assert [(await ask(client, each))[0] for each in (QUESTION, PARAPHRASE)] == ["miss", "miss"]
        assert embedder.count == 0


async def test_commands_evaluate_pairs_and_show_and_purge_the_cache(tmp_path: Path) -> None:
    pairs, output = tmp_path / "pairs.jsonl", tmp_path / "report.json"
    rows = [
        (QUESTION, PARAPHRASE, True),
        (QUESTION, "Where is the cat?", True),
        ("Is it safe?", "Is it not safe?", False),
        ("Is milk safe?", "Is raw milk safe?", False),
    ]
    lines = [json.dumps({"a": a, "b": b, "same": same, "kind": "k"}) for a, b, same in rows]
    pairs.write_text("\n".join(lines))
    async with semantic_gateway() as (client, _, _):

        async def run(*arguments: str) -> Any:  # noqa: ANN401 - JSON
            command = ["cache", *arguments, "--url", str(client.base_url), "--json"]
            result = await asyncio.to_thread(CliRunner().invoke, app, command)
            assert result.exit_code == 0, result.output
            start = re.search(
                r"^[\[{]$", result.stdout, re.MULTILINE
            )  # after the gateway's log lines
            assert start is not None
            return json.JSONDecoder().raw_decode(result.stdout, start.start())[0]

        options = ["--pairs", str(pairs), "--embedding-model", "embedder", "--output", str(output)]
        evaluations = msgspec.convert(await run("evaluate", *options), list[CacheEvaluation])
        counts = [(each.guard, each.hits, each.wrong_answers) for each in evaluations[::5]]
        assert counts == [("no_substitution", 1, 1), ("no_residual", 1, 0)]
        assert evaluations[0].wrong_bound > 0.9
        (wrong,) = json.loads(output.read_text())["wrong"]
        assert wrong["b"] == "Is raw milk safe?"
        assert [(await ask(client, each))[0] for each in (QUESTION, PARAPHRASE)] == [
            "miss",
            "semantic",
        ]
        (shown,) = await run("show")
        assert (shown["hit_rate"], shown["questions"]) == (0.5, {"none": 1, "served": 1})
        assert (await run("purge", "--model", "big"))["purged"] == 1
        assert await ask(client, PARAPHRASE) == ("miss", "Answer 2")
