"""The HTTP face of the replica: shapes of answers, streams and refusals, byte by byte where it matters."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Iterable
from typing import Any

import httpx2
import pytest
from tests.integration.conftest import REPLY
from tests.support.fake_engine import FakeEngine, Script, always, says
from tests.support.replica_servers import CONFIG, MODEL, Served, chat, completion, events, serve

from argosy.engine.serving.api_server.generation import Generation
from argosy.engine.serving.core_messages import EngineRequest
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.protocol import ApiError


async def post(served: Served, path: str, body: object) -> httpx2.Response:
    return await served.client.post(path, json=body)


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


async def streamed(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    answer = await post(served, path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(answer.content)
    assert last == b"[DONE]"
    return [json.loads(chunk) for chunk in chunks]


# --- whole answers -------------------------------------------------------------------------------


async def test_chat(served: Served, tokenizer: Tokenizer) -> None:
    answer = await post(served, "/v1/chat/completions", chat())
    body = answer.json()
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
        }
    ]
    usage = body["usage"]
    assert usage["completion_tokens"] == len(reply) + 1  # the end-of-sequence token counts
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert answer.headers["openai-processing-ms"].isdigit()


async def test_several_prompts_and_choices_keep_their_index(
    served: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    def script(request: EngineRequest) -> Script:
        return says(tokenizer, f"answer {request.id.rsplit('-', 1)[1]}")

    engine.script = script
    answer = await post(served, "/v1/completions", completion(["one", "two"], n=2))
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == [f"answer {i}" for i in range(4)]
    prompts = [len(request.prompt) for request in engine.requests[::2]]
    assert answer.json()["usage"]["prompt_tokens"] == sum(prompts)


async def test_length(served: Served) -> None:
    answer = await post(served, "/v1/completions", completion(max_tokens=3))
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"]["completion_tokens"] == 3


async def test_stop_string_cuts_text_and_usage_and_aborts(
    served: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    answer = await post(served, "/v1/chat/completions", chat(stop=["can I"], return_token_ids=True))
    choice = answer.json()["choices"][0]
    assert choice["message"]["content"] == "Hello there. How "
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == "can I"
    used = answer.json()["usage"]["completion_tokens"]
    assert used == len(choice["token_ids"]) < len(tokenizer.encode(REPLY))
    await engine.nothing_runs()
    assert len(engine.aborted) == 1


async def test_stop_token_is_named(served: Served, engine: FakeEngine) -> None:
    engine.script = always(Script([100, 101, 77], stop_token=77))
    answer = await post(served, "/v1/completions", completion(stop_token_ids=[77]))
    assert answer.json()["choices"][0]["stop_reason"] == 77


async def test_chat_logprobs(served: Served, tokenizer: Tokenizer) -> None:
    answer = await post(
        served, "/v1/chat/completions", chat(logprobs=True, top_logprobs=2, max_tokens=2)
    )
    content = answer.json()["choices"][0]["logprobs"]["content"]
    first = tokenizer.encode(REPLY, add_special_tokens=False)[0]
    assert len(content) == 2
    assert content[0]["token"] == tokenizer.token_text(first)
    assert bytes(content[0]["bytes"]) == tokenizer.token_bytes(first)
    assert content[0]["logprob"] == -0.5
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]


async def test_echo_scores_the_prompt(served: Served, tokenizer: Tokenizer) -> None:
    """What lm-eval asks: token ids as prompt, nothing to generate."""
    prompt = tokenizer.encode("The cat sat", add_special_tokens=False)
    body = completion(prompt, echo=True, max_tokens=0, logprobs=1)
    answer = (await post(served, "/v1/completions", body)).json()
    choice = answer["choices"][0]
    assert choice["text"] == "The cat sat"
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(token) for token in prompt]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(prompt) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][-1] == len("The cat sat") - len(logprobs["tokens"][-1])
    assert answer["usage"]["completion_tokens"] == 0


async def test_vllm_extras(served: Served) -> None:
    body = completion(
        "The cat",
        max_tokens=2,
        logprobs=1,
        prompt_logprobs=1,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
    choice = (await post(served, "/v1/completions", body)).json()["choices"][0]
    assert len(choice["token_ids"]) == 2
    assert choice["prompt_logprobs"][0] is None
    second = choice["prompt_token_ids"][1]
    assert choice["prompt_logprobs"][1][str(second)]["rank"] == 1
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


async def test_resume_goes_on(served: Served, tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode(REPLY, add_special_tokens=False)
    body = chat(resume={"token_ids": whole[:4]}, return_token_ids=True)
    answer = (await post(served, "/v1/chat/completions", body)).json()
    choice = answer["choices"][0]
    assert tokenizer.decode(whole[:4]) + choice["message"]["content"] == REPLY
    assert choice["token_ids"] == [*whole[4:], tokenizer.eos_token_ids[0]]
    assert answer["usage"]["completion_tokens"] == len(whole) + 1


# --- streams -------------------------------------------------------------------------------------


async def test_chat_stream_shapes(served: Served) -> None:
    chunks = await streamed(served, "/v1/chat/completions", chat())
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


async def test_usage_chunk(served: Served) -> None:
    body = chat(stream_options={"include_usage": True})
    whole = (await post(served, "/v1/chat/completions", chat())).json()
    *chunks, last = await streamed(served, "/v1/chat/completions", body)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]


async def test_continuous_usage(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await streamed(served, "/v1/completions", completion(stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == counts[-2]


async def test_completion_stream_ends_with_text_and_reason(served: Served) -> None:
    chunks = await streamed(served, "/v1/completions", completion(max_tokens=4))
    assert all(chunk["object"] == "text_completion" for chunk in chunks)
    last = chunks[-1]["choices"][0]
    assert last["finish_reason"] == "length"
    assert last["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)


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
async def test_stream_and_whole_agree(served: Served, extra: dict[str, Any]) -> None:
    body = completion("The cat sat", **{"max_tokens": 12, "return_token_ids": True, **extra})
    whole = (await post(served, "/v1/completions", body)).json()
    chunks = await streamed(served, "/v1/completions", body)
    for expected in whole["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert joined(part["token_ids"] for part in parts) == expected["token_ids"]
        assert parts[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert parts[-1]["finish_reason"] == expected["finish_reason"]
        assert parts[-1]["stop_reason"] == expected["stop_reason"]
        if expected["logprobs"] is not None:
            for name, values in expected["logprobs"].items():
                told = [part["logprobs"] for part in parts if part["logprobs"]]
                assert joined(part[name] for part in told) == values, name


async def test_chat_stream_with_logprobs_and_ids(served: Served) -> None:
    body = chat(logprobs=True, top_logprobs=1, return_token_ids=True, n=2)
    whole = (await post(served, "/v1/chat/completions", body)).json()
    chunks = await streamed(served, "/v1/chat/completions", body)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    for expected in whole["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        ids = joined(part.get("token_ids", []) for part in parts)
        content = joined(p["logprobs"]["content"] for p in parts if p["logprobs"])
        assert ids == expected["token_ids"]
        assert content == expected["logprobs"]["content"]


async def test_keep_alive_comments(engine: FakeEngine, tokenizer: Tokenizer) -> None:
    script = says(tokenizer, REPLY)
    script.pause_after = 2
    engine.script = always(script)
    config = CONFIG.__class__(port=0, served_model_names=(MODEL,), sse_keepalive_interval_s=0.05)
    async with serve(engine, config) as served:
        seen = b""
        async with served.client.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True)
        ) as answer:
            async for piece in answer.aiter_bytes():
                seen += piece
                if b": keep-alive\n\n" in seen:
                    engine.go_on.set()
    assert events(seen)[-1] == b"[DONE]"


async def test_error_before_the_first_token_is_an_error(served: Served, engine: FakeEngine) -> None:
    engine.script = always(Script([], finish="error", error="a row failed"))
    answer = await post(served, "/v1/chat/completions", chat(stream=True))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "engine_error"


async def test_error_mid_stream_is_the_last_event(served: Served, engine: FakeEngine) -> None:
    engine.script = always(Script([100, 101, 102], finish="error", error="a row failed"))
    answer = await post(served, "/v1/chat/completions", chat(stream=True))
    assert answer.status_code == 200
    last = json.loads(events(answer.content)[-1])
    assert last["error"]["code"] == "engine_error"
    assert "a row failed" in last["error"]["message"]


async def test_timeout_returns_what_there_is(served: Served, engine: FakeEngine) -> None:
    engine.script = always(Script([100, 101, 102], finish="timeout"))
    answer = await post(served, "/v1/chat/completions", chat())
    assert answer.json()["choices"][0]["finish_reason"] == "timeout"
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_timeout_without_a_token_is_408(
    served: Served, engine: FakeEngine, stream: bool
) -> None:
    engine.script = always(Script([], finish="timeout"))
    answer = await post(served, "/v1/chat/completions", chat(stream=stream))
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "timeout"


async def test_unexpected_exception_is_one_500(served: Served, engine: FakeEngine) -> None:
    engine.script = always(Script([100], crash=RuntimeError("secret path /etc")))
    answer = await post(served, "/v1/chat/completions", chat())
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert (await served.client.get("/health")).status_code == 200


async def test_no_engine_is_503_with_retry_after(served: Served, engine: FakeEngine) -> None:
    engine.refusal = ApiError(503, "engine_unavailable", "restarting", retry_after_s=1.5)
    answer = await post(served, "/v1/chat/completions", chat())
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.headers["retry-after-ms"] == "1500"


# --- headers and small endpoints -----------------------------------------------------------------


async def test_request_id_is_echoed_or_made(served: Served) -> None:
    given = await served.client.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    made = await served.client.get("/health", headers={"x-request-id": "no spaces allowed"})
    assert made.headers["x-request-id"].startswith("req_")
    answer = await post(served, "/v1/chat/completions", chat(request_id="from-body"))
    assert answer.headers["x-request-id"] == "from-body"


async def test_trusted_headers_reach_the_engine(served: Served, engine: FakeEngine) -> None:
    headers = {
        "x-argosy-tenant": "acme",
        "x-argosy-cache-domain": "acme-private",
        "x-argosy-tier": "0",
        "x-argosy-weight": "2.5",
    }
    await served.client.post("/v1/chat/completions", json=chat(), headers=headers)
    request = engine.requests[0]
    assert (request.tenant, request.cache_domain) == ("acme", "acme-private")
    assert (request.tier, request.weight) == (0, 2.5)


@pytest.mark.parametrize(
    "headers", [{"x-argosy-tier": "1.5"}, {"x-argosy-weight": "nan"}, {"x-argosy-weight": "0"}]
)
async def test_nonsense_in_trusted_headers_is_400(served: Served, headers: dict[str, str]) -> None:
    answer = await served.client.post("/v1/chat/completions", json=chat(), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(headers))


async def test_models(served: Served) -> None:
    listed = (await served.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert listed["data"][0]["id"] == MODEL
    assert (await served.client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    missing = await served.client.get("/v1/models/gpt-9")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_model_that_is_not_served_is_404(served: Served) -> None:
    answer = await post(served, "/v1/chat/completions", chat() | {"model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_tokenize_and_back(served: Served, tokenizer: Tokenizer) -> None:
    answer = (
        await post(served, "/tokenize", {"prompt": "The cat", "return_token_strs": True})
    ).json()
    assert answer["tokens"] == tokenizer.encode("The cat")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    tokens = tokenizer.encode("The cat", add_special_tokens=False)
    assert (await post(served, "/detokenize", {"tokens": tokens})).json() == {"prompt": "The cat"}


async def test_load(served: Served, engine: FakeEngine) -> None:
    body = (await served.client.get("/load")).json()
    assert body["server_load"] == 0
    assert body["state"] == "ready"
    assert body["max_seqs"] == 8
    assert body["kv_blocks_total"] == 1024


async def test_small_endpoints(served: Served) -> None:
    assert (await served.client.get("/version")).json()["version"]
    assert (await served.client.get("/ready")).json() == {"status": "ready"}
    assert (await served.client.get("/openapi.json")).json()["openapi"] == "3.1.0"
    assert (await served.client.head("/health")).status_code == 200


async def test_wrong_method_and_path(served: Served) -> None:
    wrong = await served.client.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    nowhere = await served.client.get("/v2/nothing")
    assert nowhere.status_code == 404
    assert nowhere.json()["error"]["type"] == "not_found_error"
    unversioned = await served.client.post("/chat/completions", json=chat())
    assert "/v1, once" in unversioned.json()["error"]["message"]


async def test_unknown_field_is_named(served: Served) -> None:
    answer = await post(served, "/v1/chat/completions", chat(guided_json={}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_json"


async def test_not_ready_before_the_model_is_loaded(engine: FakeEngine) -> None:
    async with serve(engine) as served:
        engine.state = "restarting"
        assert (await served.client.get("/ready")).status_code == 503
        refused = await post(served, "/v1/chat/completions", chat())
        assert refused.json()["error"]["code"] == "engine_unavailable"
        assert (await served.client.get("/health")).status_code == 200


def generations() -> list[Generation]:
    return [each for each in gc.get_objects() if type(each) is Generation]


async def test_answers_leave_nothing_for_the_garbage_collector(engine: FakeEngine) -> None:
    gc.collect()
    before = generations()
    gc.disable()
    try:
        async with serve(engine) as served:
            for stream in (True, False):
                answer = await post(served, "/v1/chat/completions", chat(stream=stream, n=2))
                assert answer.status_code == 200
        assert generations() == before
    finally:
        gc.enable()


async def test_clients_that_leave_take_everything_with_them(
    engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = always(Script(says(tokenizer, REPLY).tokens, pause_after=2))
    gc.collect()
    before = generations()
    async with serve(engine) as served:
        for _ in range(3):
            request = served.client.stream("POST", "/v1/chat/completions", json=chat(stream=True))
            async with request as answer:
                await anext(answer.aiter_bytes())
            await engine.nothing_runs()
    gc.collect()
    assert generations() == before
