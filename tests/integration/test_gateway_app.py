"""Gateway endpoints besides generation (models, tokenizing, readiness), and non-streamed and resumed responses."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.support.backend_formats import LlamaCpp
from tests.support.fake_backend import serve_backends
from tests.support.fake_engine import FakeEngine, Script, constant_script
from tests.support.gateway_harness import GatewayHarness, RecordingFilter, run_gateway
from tests.support.replica_servers import (
    MODEL,
    bundled_model_engine,
    chat,
    completion,
    events,
    serve,
)

from argosy.deployment import ReplicaConfig
from argosy.engine.serving.text import Tokenizer
from argosy.version import VERSION

TOKENS = list(range(100, 120))
BODY = {"model": "big", "prompt": "Say something", "max_tokens": 3}


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat(seed=3, max_tokens=14, temperature=1.3)),
    "log-probabilities": (
        "/v1/chat/completions",
        chat(seed=5, max_tokens=8, logprobs=True, top_logprobs=2, return_token_ids=True),
    ),
    "continued message": (
        "/v1/chat/completions",
        chat(
            messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The c"}],
            seed="4",
            max_tokens=6,
            n=2,
            service_tier="flex",
            continue_final_message="true",
            echo=True,
        ),
    ),
    "two choices": ("/v1/chat/completions", chat(seed=8, max_tokens=6, n=2)),
    "echo": (
        "/v1/completions",
        completion("The cat", max_tokens=8, echo=True, logprobs=1, temperature=0),
    ),
    "two prompts": (
        "/v1/completions",
        completion(["The cat", "Once"], seed=2, max_tokens=5, return_token_ids=True, logprobs=0),
    ),
    "stop string": ("/v1/completions", completion("The cat", seed=9, max_tokens=30, stop=["e"])),
    "only the prompt": (
        "/v1/completions",
        completion("The cat", max_tokens=0, echo=True, logprobs=1),
    ),
    "prompt's log-probabilities": (
        "/v1/completions",
        completion("The cat", max_tokens=2, seed=1, prompt_logprobs=1),
    ),
    "stream options": (
        "/v1/completions",
        completion(
            "The cat",
            seed=9,
            max_tokens=4,
            prompt_logprobs=None,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
    ),
    "unknown fields": (
        "/v1/completions",
        completion("A", seed=1, logit_bias={"x": 1, "5": "2"}, future_field=1),
    ),
    "no such constraint": ("/v1/completions", completion("A", guided_new="x")),
    "no possible token": (
        "/v1/completions",
        completion("A", structured_outputs={"choice": ["yes"]}, allowed_token_ids=[50]),
    ),
    "no such temperature": ("/v1/completions", completion("The cat", temperature=-1)),
}


def make_engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer, constant_script(Script(TOKENS[:10], finish="length")))


async def test_gateway_serves_models_and_tokenize_endpoints(tokenizer: Tokenizer) -> None:
    async with (
        serve(make_engine(tokenizer)) as replica_server,
        run_gateway([], ReplicaConfig(url=replica_server.url, model=MODEL)) as running,
    ):
        client, replica_client = running.client, replica_server.client
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("big", 512)
        for body in ({"prompt": "Once upon"}, {"prompt": "Once", "model": "big"}):
            tokenized = await client.post("/tokenize", json=body)
            assert (
                tokenized.json()
                == (await replica_client.post("/tokenize", json={"prompt": body["prompt"]})).json()
            )
        text = await client.post("/detokenize", json={"tokens": tokenized.json()["tokens"]})
        assert text.json()["prompt"].endswith("Once")
        assert (await client.post("/tokenize", json={"model": "other"})).status_code == 404
        info = (await replica_client.get("/tokenizer_info")).json()
        assert info["eos_token"] == tokenizer.decode(tokenizer.eos_token_ids, False)
        assert {"tokenizer_class", "chat_template"} <= info.keys()
        for query in ("", "?model=big"):
            assert (await client.get(f"/tokenizer_info{query}")).json() == info
        assert (await client.get("/tokenizer_info?model=other")).status_code == 404
        rejected = await client.post("/tokenize", json={"prompt": 3})
        assert rejected.json()["error"]["param"] == "prompt"
        for path in ("/tokenize", "/detokenize"):
            for invalid_body in (
                b'{"model": "\xff"}',
                b'{"model": [3]}',
                b'{"model": %s}' % (b"9" * 5000),
            ):
                rejected = await client.post(path, content=invalid_body)
                assert rejected.status_code == 400
                assert rejected.json()["error"]["code"] in {"invalid_json", "invalid_type"}
        assert (await client.delete("/v1/models")).headers["allow"] == "GET"
        assert (await client.get("/ready")).status_code == 200


async def test_version_is_that_of_the_process_after_another_one_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    async with (
        serve(make_engine(tokenizer)) as replica_server,
        run_gateway([], ReplicaConfig(url=replica_server.url, model=MODEL)) as running,
    ):
        metadata = tmp_path / "argosy-99.0.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: argosy\nVersion: 99.0\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert importlib.metadata.version("argosy") == "99.0"
        for client in (running.client, replica_server.client):
            assert (await client.get("/version")).json()["version"] == VERSION != "99.0"
            assert "99.0" not in next(
                line
                for line in (await client.get("/metrics")).text.splitlines()
                if "build_info{" in line
            )


async def test_unknown_context_length_does_not_limit_outer_gateway() -> None:
    backend = LlamaCpp()
    async with (
        serve_backends(backend),
        run_gateway([], ReplicaConfig(url=backend.url, model=backend.model)) as inner,
        run_gateway([], ReplicaConfig(url=str(inner.client.base_url), model="big")) as outer,
    ):
        await outer.probe()
        (card,) = (await outer.client.get("/v1/models")).json()["data"]
        assert card["max_model_len"] is None
        assert (await outer.client.post("/v1/completions", json=BODY)).status_code == 200


async def test_request_id_header_takes_precedence_over_body(tokenizer: Tokenizer) -> None:
    """The replica and the gateway use the same precedence."""
    named = BODY | {"request_id": "mine-7"}
    async with (
        serve(make_engine(tokenizer)) as replica_server,
        run_gateway([], ReplicaConfig(url=replica_server.url, model=MODEL)) as running,
    ):
        for client, model in ((replica_server.client, MODEL), (running.client, "big")):
            body = named | {"model": model}
            response = await client.post("/v1/completions", json=body)
            assert response.headers["x-request-id"] == "mine-7"
            headers = {"x-request-id": "other"}
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.headers["x-request-id"] == "other"


async def test_prompt_above_context_is_rejected_before_queueing(tokenizer: Tokenizer) -> None:
    recorder = RecordingFilter()
    async with (
        serve(make_engine(tokenizer)) as replica_server,
        run_gateway([recorder], ReplicaConfig(url=replica_server.url, model=MODEL)) as running,
    ):
        for prompt in ([1] * 513, "x" * 512 * 200):
            response = await running.client.post("/v1/completions", json=BODY | {"prompt": prompt})
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "This model's maximum context length is 512 tokens" in error["message"]
    assert not recorder.completed


async def test_not_ready_error_names_model_without_replica(tokenizer: Tokenizer) -> None:
    async with (
        serve(make_engine(tokenizer)) as replica_server,
        run_gateway([], ReplicaConfig(url=replica_server.url, model=MODEL)) as running,
    ):
        await replica_server.client.post("/drain")
        while (ready := await running.client.get("/ready")).status_code == 200:
            await running.probe()
        assert ready.status_code == 503
        assert "big" in ready.json()["error"]["message"]
        assert ready.headers["retry-after"]


async def test_replica_with_other_model_gets_no_requests(tokenizer: Tokenizer) -> None:
    async with serve(make_engine(tokenizer)) as one, serve(make_engine(tokenizer)) as two:
        right = ReplicaConfig(url=one.url, model=MODEL)
        wrong = ReplicaConfig(url=two.url)
        with capture_logs() as logs:
            async with run_gateway([], right, wrong) as running:
                for _ in range(3):
                    await running.probe()
                for _ in range(4):
                    response = await running.client.post("/v1/completions", json=BODY)
                    assert response.status_code == 200
        (event,) = (entry for entry in logs if entry["event"] == "replica_model_missing")
        assert (event["replica"], event["model"]) == (wrong.url, "big")
        for only in (wrong, ReplicaConfig(url=two.url, kind="argosy")):
            async with run_gateway([], only) as running:
                response = await running.client.post("/v1/completions", json=BODY)
                assert (response.status_code, response.json()["error"]["code"]) == (
                    503,
                    "no_replica",
                )


def normalize(text: str) -> str:
    """Remove ids, timestamps and cache counts, which differ between responses."""
    text = re.sub(r'"id":"[^"]*"', '"id":""', text)
    text = re.sub(r'"request_id":"[^"]*"', '"request_id":""', text)
    text = re.sub(r'"cached_tokens":\d+', "", text)
    return re.sub(r'"created":\d+', '"created":0', text)


async def test_non_streamed_response_equals_replica_response() -> None:
    recorder = RecordingFilter()
    async with (
        serve(bundled_model_engine()) as real_replica,
        run_gateway([recorder], ReplicaConfig(url=real_replica.url, model=MODEL)) as running,
    ):
        for kind, (path, body) in BODIES.items():
            direct = await real_replica.client.post(path, json=body)
            proxied = await running.client.post(path, json=body | {"model": "big"})
            assert proxied.status_code == direct.status_code, kind
            assert normalize(proxied.text) == normalize(direct.text), kind
            if direct.status_code == 200:
                usage = direct.json()["usage"]
                delivered = recorder.completed[-1].delivered
                assert delivered.output_tokens == usage["completion_tokens"], kind
                assert delivered.prompt_tokens == usage["prompt_tokens"], kind


@contextlib.asynccontextmanager
async def failing_pair(
    tokenizer: Tokenizer, crash_after: int, *filters: RecordingFilter
) -> AsyncIterator[tuple[GatewayHarness, FakeEngine]]:
    """Run a gateway before two replicas that take turns, of which the first fails after some tokens."""
    crash = Script(TOKENS[:crash_after], crash=RuntimeError("gone"))
    failing, working = (
        FakeEngine(tokenizer, constant_script(script))
        for script in (crash, Script(TOKENS, finish="length"))
    )
    async with serve(failing) as one, serve(working) as two:
        replicas = [ReplicaConfig(url=each.url, model=MODEL) for each in (one, two)]
        async with run_gateway(filters, *replicas) as running:
            yield running, working


async def test_non_streamed_response_resumes_on_other_replica(tokenizer: Tokenizer) -> None:
    recorder = RecordingFilter()
    async with failing_pair(tokenizer, 7, recorder) as (running, working):
        body = completion("Once", max_tokens=20, return_token_ids=True) | {"model": "big"}
        for _ in range(2):  # one of the two starts on the failing replica
            response = await running.client.post("/v1/completions", json=body)
            assert response.json()["choices"][0]["token_ids"] == TOKENS
            assert response.json()["usage"]["completion_tokens"] == 20
    assert max(len(context.trace.attempts) for context in recorder.completed) == 2
    assert any(request.resumed_tokens == TOKENS[:7] for request in working.requests)


async def test_stream_resumed_by_client_resumes_on_other_replica(tokenizer: Tokenizer) -> None:
    resume = {"model": "big", "resume": {"token_ids": TOKENS[:4]}}
    async with failing_pair(tokenizer, 9) as (running, working):
        body = completion("Once", max_tokens=20, stream=True, return_token_ids=True) | resume
        for _ in range(2):  # one of the two starts on the failing replica
            response = await running.client.post("/v1/completions", json=body)
            *chunks, done = events(response.content)
            assert done == b"[DONE]"
            token_ids = [json.loads(chunk)["choices"][0]["token_ids"] for chunk in chunks]
            assert [token for ids in token_ids for token in ids] == TOKENS[4:]
        chat_body = chat(max_tokens=20, stream=True) | resume
        for _ in range(2):
            response = await running.client.post("/v1/chat/completions", json=chat_body)
            parsed = [json.loads(event) for event in events(response.content)[:-1]]
            has_role = ["role" in chunk["choices"][0]["delta"] for chunk in parsed]
            assert has_role == [True] + [False] * (len(has_role) - 1)
    assert any(request.resumed_tokens == TOKENS[:9] for request in working.requests)
