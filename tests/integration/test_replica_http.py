"""HTTP API of the replica: shapes of responses, streams and errors."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
from collections.abc import Iterable
from typing import Any

import httpx2
import msgspec
import pytest
from openai.types.chat import ChatCompletion
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, Script, arithmetic, constant_script, reply_script
from tests.support.replica_servers import (
    CONFIG,
    MODEL,
    RunningReplica,
    chat,
    completion,
    events,
    load_text_processing,
    serve,
)

from argosy.engine import EngineRequest
from argosy.engine.serving.api_server.generation import Generation
from argosy.engine.serving.preprocessing.text_processing import TextProcessing
from argosy.engine.serving.text import ChatTemplate, Tokenizer
from argosy.protocol import LOAD_SCHEMA_VERSION, ApiError, ArithmeticIdentity


async def post(replica_server: RunningReplica, path: str, body: object) -> httpx2.Response:
    return await replica_server.client.post(path, json=body)


def flatten(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


async def stream_chunks(
    replica_server: RunningReplica, path: str, body: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the chunks of a stream, and check that it ends with [DONE]."""
    response = await post(replica_server, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response.content)
    assert last == b"[DONE]"
    return [json.loads(chunk) for chunk in chunks]


# --- whole responses -----------------------------------------------------------------------------------------


async def test_chat_response_shape(replica_server: RunningReplica, tokenizer: Tokenizer) -> None:
    response = await post(replica_server, "/v1/chat/completions", chat())
    body = response.json()
    reply = tokenizer.encode(REPLY, add_special_tokens=False)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == MODEL
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": REPLY, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert (body["prompt_token_ids"], body["prompt_logprobs"]) == (None, None)
    assert (body["system_fingerprint"], "service_tier" in body) == (None, False)
    usage = body["usage"]
    assert usage["completion_tokens"] == len(reply) + 1  # the end-of-sequence token counts
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert response.headers["openai-processing-ms"].isdigit()


async def test_prompts_and_choices_keep_their_index(
    replica_server: RunningReplica, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    def script(request: EngineRequest) -> Script:
        return reply_script(tokenizer, f"response {request.id.rsplit('-', 1)[1]}")

    engine.script = script
    response = await post(replica_server, "/v1/completions", completion(["one", "two"], n=2))
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == [f"response {i}" for i in range(4)]
    prompts = [len(request.prompt) for request in engine.requests[::2]]
    assert response.json()["usage"]["prompt_tokens"] == sum(prompts)


async def test_stop_string_truncates_text_and_usage_and_aborts(
    replica_server: RunningReplica, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    response = await post(
        replica_server, "/v1/chat/completions", chat(stop=["can I"], return_token_ids=True)
    )
    choice = response.json()["choices"][0]
    assert choice["message"]["content"] == "Hello there. How "
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "can I"
    used = response.json()["usage"]["completion_tokens"]
    assert used == len(choice["token_ids"]) < len(tokenizer.encode(REPLY))
    await engine.wait_idle()
    assert len(engine.aborted) == 1


async def test_chat_logprobs_shape(replica_server: RunningReplica, tokenizer: Tokenizer) -> None:
    response = await post(
        replica_server, "/v1/chat/completions", chat(logprobs=True, top_logprobs=2, max_tokens=2)
    )
    content = response.json()["choices"][0]["logprobs"]["content"]
    first = tokenizer.encode(REPLY, add_special_tokens=False)[0]
    assert len(content) == 2
    assert content[0]["token"] == tokenizer.token_text(first)
    assert bytes(content[0]["bytes"]) == tokenizer.token_bytes(first)
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]


async def test_echo_without_output_scores_prompt(
    replica_server: RunningReplica, tokenizer: Tokenizer
) -> None:
    """lm-eval sends such requests: token ids as prompt, and no tokens to generate."""
    prompt = tokenizer.encode("The cat sat", add_special_tokens=False)
    body = completion(prompt, echo=True, max_tokens=0, logprobs=1)
    response = (await post(replica_server, "/v1/completions", body)).json()
    choice = response["choices"][0]
    assert choice["text"] == "The cat sat"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(token) for token in prompt]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(prompt) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][-1] == len("The cat sat") - len(logprobs["tokens"][-1])
    assert response["usage"]["completion_tokens"] == 0


async def test_vllm_extension_fields(replica_server: RunningReplica) -> None:
    body = completion(
        "The cat",
        max_tokens=2,
        logprobs=1,
        prompt_logprobs=1,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
    choice = (await post(replica_server, "/v1/completions", body)).json()["choices"][0]
    assert len(choice["token_ids"]) == 2
    assert choice["prompt_logprobs"][0] is None
    second = choice["prompt_token_ids"][1]
    assert choice["prompt_logprobs"][1][str(second)]["rank"] == 1
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    for name, top in zip(
        choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
    ):
        assert next(iter(top)) == name


async def test_continued_message_is_echoed_before_its_continuation(
    replica_server: RunningReplica,
) -> None:
    begin = {"role": "assistant", "content": [{"type": "text", "text": "The "}]}
    body = chat(messages=[{"role": "user", "content": "Hi"}, begin], service_tier="flex")
    body |= {"continue_final_message": True, "echo": True}
    whole = (await post(replica_server, "/v1/chat/completions", body)).json()
    assert whole["choices"][0]["message"]["content"] == f"The {REPLY}"
    chunks = await stream_chunks(replica_server, "/v1/chat/completions", body)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == f"The {REPLY}"
    assert {chunk["service_tier"] for chunk in (whole, *chunks)} == {"default"}


# --- streams -------------------------------------------------------------------------------------


async def test_chat_stream_shape(replica_server: RunningReplica) -> None:
    chunks = await stream_chunks(replica_server, "/v1/chat/completions", chat())
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta["content"] for delta in deltas[:-1]) == REPLY
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[:-1] == [None] * (len(chunks) - 1)
    assert reasons[-1] == "stop"


async def test_usage_ascends_and_the_last_chunk_has_that_of_the_response(
    replica_server: RunningReplica,
) -> None:
    path, body = "/v1/completions", completion()
    complete = (await post(replica_server, path, body)).json()
    options: dict[str, bool] = {"include_usage": True}
    *chunks, last = await stream_chunks(replica_server, path, body | {"stream_options": options})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], complete["usage"])
    options = options | {"continuous_usage_stats": True}
    chunks = await stream_chunks(replica_server, path, body | {"stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == counts[-2]
    body = chat(stream_options=options)
    first, *_ = await stream_chunks(replica_server, "/v1/chat/completions", body)
    assert first["usage"]["completion_tokens"] == 0  # its delta has the role alone


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"logprobs": 2},
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"n": 3, "echo": True, "logprobs": 0},
        {"stop": ["help"], "logprobs": 1},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
    ],
    ids=str,
)
async def test_stream_equals_non_streamed_response(
    replica_server: RunningReplica, extra: dict[str, Any]
) -> None:
    body = completion("The cat sat", **{"max_tokens": 12, "return_token_ids": True, **extra})
    complete = (await post(replica_server, "/v1/completions", body)).json()
    chunks = await stream_chunks(replica_server, "/v1/completions", body)
    for expected in complete["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert flatten(part["token_ids"] for part in parts) == expected["token_ids"]
        assert parts[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
        assert parts[-1]["stop_reason"] == expected["stop_reason"]
        if expected["logprobs"] is not None:
            for name, values in expected["logprobs"].items():
                logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
                assert flatten(part[name] for part in logprobs) == values, name


async def test_chat_stream_logprobs_and_ids_equal_response(replica_server: RunningReplica) -> None:
    body = chat(logprobs=True, top_logprobs=1, return_token_ids=True, n=2)
    complete = (await post(replica_server, "/v1/chat/completions", body)).json()
    chunks = await stream_chunks(replica_server, "/v1/chat/completions", body)
    assert chunks[0]["prompt_token_ids"] == complete["prompt_token_ids"]
    for expected in complete["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        ids = flatten(part.get("token_ids", []) for part in parts)
        content = flatten(p["logprobs"]["content"] for p in parts if p["logprobs"])
        assert ids == expected["token_ids"]
        assert content == expected["logprobs"]["content"]


async def test_paused_stream_gets_keepalive_comments(
    engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    script = reply_script(tokenizer, REPLY)
    script.pause_after = 2
    engine.script = constant_script(script)
    config = CONFIG.__class__(port=0, served_model_names=(MODEL,), sse_keepalive_interval_s=0.05)
    async with serve(engine, config) as replica_server:
        received = b""
        async with replica_server.client.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True)
        ) as response:
            async for piece in response.aiter_bytes():
                received += piece
                if b": keep-alive\n\n" in received:
                    engine.may_continue.set()
    assert events(received)[-1] == b"[DONE]"


async def test_engine_error_is_500_or_the_last_event(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    for tokens in ([], [100, 101, 102]):
        engine.script = constant_script(Script(tokens, finish="error", error="a row failed"))
        response = await post(replica_server, "/v1/chat/completions", chat(stream=True))
        assert response.status_code == (200 if tokens else 500)
        body = json.loads(events(response.content)[-1]) if tokens else response.json()
        assert body["error"]["code"] == "engine_error"
        assert "a row failed" in body["error"]["message"]


async def test_timeout_returns_partial_output(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    engine.script = constant_script(Script([100, 101, 102], finish="timeout"))
    response = await post(replica_server, "/v1/chat/completions", chat())
    (choice,) = response.json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
    ChatCompletion.model_validate(response.json())
    assert response.json()["usage"]["completion_tokens"] == 3


async def test_timeout_without_a_token_is_408(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    engine.script = constant_script(Script([], finish="timeout"))
    for stream in (True, False):
        response = await post(replica_server, "/v1/chat/completions", chat(stream=stream))
        assert (response.status_code, response.json()["error"]["code"]) == (408, "timeout")


async def test_unexpected_exception_is_500_without_details(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    engine.script = constant_script(Script([100], crash=RuntimeError("secret path /etc")))
    response = await post(replica_server, "/v1/chat/completions", chat())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert (await replica_server.client.get("/health")).status_code == 200


# --- headers and other endpoints -----------------------------------------------------------------


async def test_request_id_is_echoed_or_generated(replica_server: RunningReplica) -> None:
    given = await replica_server.client.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    generated = await replica_server.client.get(
        "/health", headers={"x-request-id": "no spaces allowed"}
    )
    assert generated.headers["x-request-id"].startswith("req_")
    response = await post(replica_server, "/v1/chat/completions", chat(request_id="from-body"))
    assert response.headers["x-request-id"] == "from-body"


async def test_trusted_headers_reach_the_engine(
    replica_server: RunningReplica, engine: FakeEngine
) -> None:
    headers = {
        "x-argosy-tenant": "acme",
        "x-argosy-cache-domain": "acme-private",
        "x-argosy-tier": "0",
        "x-argosy-weight": "2.5",
    }
    await replica_server.client.post("/v1/chat/completions", json=chat(), headers=headers)
    request = engine.requests[0]
    assert (request.tenant, request.cache_domain) == ("acme", "acme-private")
    assert (request.tier, request.weight) == (0, 2.5)


async def test_invalid_trusted_header_is_400(replica_server: RunningReplica) -> None:
    for name, value in (
        ("x-argosy-tier", "1.5"),
        ("x-argosy-weight", "nan"),
        ("x-argosy-weight", "0"),
    ):
        response = await replica_server.client.post(
            "/v1/chat/completions", json=chat(), headers={name: value}
        )
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_models_are_listed_and_found(replica_server: RunningReplica) -> None:
    listed = (await replica_server.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == MODEL
    assert (await replica_server.client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    for missing in (
        await replica_server.client.get("/v1/models/gpt-9"),
        await post(replica_server, "/v1/chat/completions", chat() | {"model": "gpt-9"}),
    ):
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


async def test_hostile_chat_template_stops_only_its_own_requests(engine: FakeEngine) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = f"{{% if messages[0].content == 'loop' %}}{loops}{{% endif %}}Hello"
    loaded = load_text_processing()
    text_processing = TextProcessing(loaded.tokenizer, ChatTemplate(source, {}))
    async with serve(engine, load_text=lambda: text_processing) as running:

        async def send(content: str, path: str = "/v1/chat/completions") -> httpx2.Response:
            messages = [{"role": "user", "content": content}]
            return await running.client.post(path, json={"model": MODEL, "messages": messages})

        hostile = [
            asyncio.create_task(send("loop", path))
            for path in ("/v1/chat/completions", "/tokenize", "/v1/chat/completions")
        ]
        assert [(await send("Hi")).status_code for _ in range(10)] == [200] * 10
        assert not all(task.done() for task in hostile)
        errors = [
            (task.status_code, task.json()["error"]["code"])
            for task in await asyncio.gather(*hostile)
        ]
        assert errors == [(400, "chat_template_limit_exceeded")] * 3
        assert (await send("Hi")).status_code == 200


async def test_tokenize_and_detokenize(
    replica_server: RunningReplica, tokenizer: Tokenizer
) -> None:
    body = {"prompt": "The cat", "return_token_strs": True}
    response = (await post(replica_server, "/tokenize", body)).json()
    assert response["tokens"] == tokenizer.encode("The cat")
    assert response["count"] == len(response["tokens"])
    assert response["token_strs"] == [*map(tokenizer.vocabulary_token, response["tokens"])]
    bare = (await post(replica_server, "/tokenize", {"content": "The cat"})).json()
    assert bare["tokens"] == tokenizer.encode("The cat", add_special_tokens=False)
    tokens = tokenizer.encode("The cat", add_special_tokens=False)
    detokenized = await post(replica_server, "/detokenize", {"tokens": tokens})
    assert detokenized.json() == {"prompt": "The cat"}


async def test_load_reports_capacity_and_what_the_replica_is(engine: FakeEngine) -> None:
    engine.arithmetic = arithmetic(quantization="int4")
    config = msgspec.structs.replace(CONFIG, zone="rack-7", labels={"pool": "a"})
    async with serve(engine, config) as running:
        body = (await running.client.get("/load")).json()
        chunk, *_ = await stream_chunks(running, "/v1/completions", completion())
    assert body["schema_version"] == LOAD_SCHEMA_VERSION
    assert (body["server_load"], body["state"], body["exact"]) == (0, "ready", True)
    assert (body["max_seqs"], body["kv_blocks_total"]) == (8, 1024)
    assert (body["zone"], body["labels"]) == ("rack-7", {"pool": "a"})
    assert body["build"].startswith("argosy ")
    assert body["accelerator"] == "fake accelerator"
    assert body["arithmetic"]["quantization"] == "int4"
    assert body["arithmetic"]["tokenization"]
    assert chunk["system_fingerprint"] == f"fp_{body['arithmetic_id'][:10]}"
    assert body["arithmetic_id"] == msgspec.convert(body["arithmetic"], ArithmeticIdentity).id


async def test_auxiliary_endpoints(replica_server: RunningReplica) -> None:
    assert (await replica_server.client.get("/version")).json()["version"]
    assert (await replica_server.client.get("/ready")).json() == {"status": "ready"}
    assert (await replica_server.client.get("/openapi.json")).json()["openapi"] == "3.1.0"
    assert (await replica_server.client.head("/health")).status_code == 200


async def test_wrong_method_and_path_have_error_codes(replica_server: RunningReplica) -> None:
    wrong = await replica_server.client.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    unknown_path = await replica_server.client.get("/v2/nothing")
    assert unknown_path.status_code == 404
    assert unknown_path.json()["error"]["type"] == "not_found_error"
    unversioned = await replica_server.client.post(
        "/chat/completions", json=chat() | {"model": None}
    )
    assert (unversioned.status_code, unversioned.json()["model"]) == (200, MODEL)
    doubled = await replica_server.client.post("/v1/v1/chat/completions", json=chat())
    error = doubled.json()["error"]
    assert error["code"] == "not_found"
    assert "'/v1/chat/completions'" in error["message"]
    assert "/v1 exactly once" in error["message"]


async def test_restarting_engine_is_not_ready_but_healthy(engine: FakeEngine) -> None:
    async with serve(engine) as replica_server:
        engine.rejection = ApiError(503, "engine_unavailable", "restarting", retry_after_s=1.5)
        rejected = await post(replica_server, "/v1/chat/completions", chat())
        assert rejected.status_code == 503
        assert rejected.headers["retry-after"] == "2"
        assert rejected.headers["retry-after-ms"] == "1500"
        engine.state = "restarting"
        assert (await replica_server.client.get("/ready")).status_code == 503
        rejected = await post(replica_server, "/v1/chat/completions", chat())
        assert rejected.json()["error"]["code"] == "engine_unavailable"
        assert (await replica_server.client.get("/health")).status_code == 200


def generations() -> list[Generation]:
    return [each for each in gc.get_objects() if type(each) is Generation]


@pytest.mark.exhaustive
async def test_responses_leave_no_reference_cycles(
    engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    """Streams whose client has gone are freed too, although only by the collector."""
    gc.collect()
    before = generations()
    async with serve(engine) as replica_server:
        gc.disable()
        try:
            for stream in (True, False):
                body = chat(stream=stream, n=2)
                response = await post(replica_server, "/v1/chat/completions", body)
                assert response.status_code == 200
            assert generations() == before
        finally:
            gc.enable()
        engine.script = constant_script(
            Script(reply_script(tokenizer, REPLY).tokens, pause_after=2)
        )
        for _ in range(3):
            request = replica_server.client.stream(
                "POST", "/v1/chat/completions", json=chat(stream=True)
            )
            async with request as response:
                await anext(response.aiter_bytes())
            await engine.wait_idle()
    gc.collect()
    assert generations() == before
