"""Request fields without effect are named in a response header, by a replica and through the gateway."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tests.support.fake_engine import FakeEngine
from tests.support.gateway_harness import run_gateway
from tests.support.replica_servers import CONFIG, MODEL, RunningReplica, chat, completion, serve

from argosy.deployment import ReplicaConfig

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
UNKNOWN: dict[str, Any] = {"future_field": 1}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
"""Content that only the last message of a conversation is refused for."""
HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "see"}, PICTURE]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "why"}], "tool_calls": []},
    {"role": "user", "content": "go on"},
]
REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown": (CHAT, chat(**UNKNOWN, also=None), "future_field,also"),
    "stream": (CHAT, chat(stream=True, stream_options={"x": 1}), "stream_options.x"),
    "unsupported": (
        CHAT,
        chat(store=True, verbosity="low", metadata={"a": "b"}, service_tier="auto"),
        "store,verbosity",
    ),
    "completion": (COMPLETION, completion(**UNKNOWN), "future_field"),
    "buffered": (COMPLETION, completion(**UNKNOWN, prompt_logprobs=1), "future_field"),
    "tokenize": ("/tokenize", {"model": MODEL, "prompt": "x", **UNKNOWN}, "future_field"),
    "history": (
        CHAT,
        chat(messages=HISTORY),
        "messages[0].content[1],messages[1].content",
    ),
    "tokenized history": (
        "/tokenize",
        {"messages": HISTORY},
        "messages[0].content[1],messages[1].content",
    ),
    "nothing": (CHAT, chat(user="u", prompt_cache_key="k"), ""),
}
HEADER = "x-argosy-ignored-fields"


@pytest.mark.parametrize("kind", REQUESTS)
async def test_ignored_fields_are_named_in_header(
    replica_server: RunningReplica, kind: str
) -> None:
    path, body, names = REQUESTS[kind]
    direct = await replica_server.client.post(path, json=body)
    assert (direct.status_code, direct.headers.get(HEADER, "")) == (200, names)
    replica = ReplicaConfig(url=replica_server.url, model=MODEL)
    async with run_gateway([], replica) as running:
        proxied = await running.client.post(path, json=body | {"model": "big"})
    named = proxied.headers.get(HEADER, "").replace(", ", ",")  # the gateway adds a line of its own
    assert (proxied.status_code, named) == (200, names)


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, chat(**UNKNOWN), "future_field", "unknown_parameter"),
        ("/tokenize", {"prompt": "x", **UNKNOWN}, "future_field", "unknown_parameter"),
        (CHAT, chat(messages=HISTORY), "messages[0].content[1]", "unsupported_parameter"),
        ("/tokenize", {"messages": HISTORY}, "messages[0].content[1]", "unsupported_parameter"),
    ],
)
async def test_setting_refuses_what_would_be_ignored(
    engine: FakeEngine, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    config = msgspec.structs.replace(CONFIG, unknown_fields="refuse")
    async with serve(engine, config) as server:
        refusal = await server.client.post(path, json=body)
    error = json.loads(refusal.content)["error"]
    assert refusal.status_code == 400
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_gateway_setting_refuses_unknown_fields(
    replica_server: RunningReplica, path: str
) -> None:
    replica = ReplicaConfig(url=replica_server.url, model=MODEL)
    body = chat(**UNKNOWN) if path == CHAT else {"prompt": "x", **UNKNOWN}
    async with run_gateway([], replica, unknown_fields="refuse") as running:
        refusal = await running.client.post(path, json=body | {"model": "big"})
    assert refusal.status_code == 400
    assert refusal.json()["error"]["code"] == "unknown_parameter"
