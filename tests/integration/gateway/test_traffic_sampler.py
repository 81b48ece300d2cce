"""Signals of sampled requests: language, template, tool calls and embeddings, and none of what is not sampled."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fake_upstream import FakeUpstream, UpstreamRequest, listening
from tests.support.gateway_client import run_gateway_server
from tests.support.waiting import until

from argosy.deployment import GatewayConfig, ModelConfig, ReplicaConfig, SeriesConfig
from argosy.policy.detection import LANGUAGES, CellKey, RequestSignals, find_language

VECTOR = [0.5, -1.0, 0.25, 0.125]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


async def respond(request: UpstreamRequest) -> None:
    """Answer with a call whose arguments are the user's text, or with an embedding."""
    body: dict[str, Any] = {"id": "x", "created": 1, "model": "m"}
    if "input" in request.body:
        is_packed = request.body.get("encoding_format") == "base64"
        packed = b64encode(np.array(VECTOR, "<f4").tobytes()).decode()
        vector = packed if is_packed else VECTOR
        body |= {"object": "list", "data": [{"index": 0, "embedding": vector}]}
        request.send_json(200, body | {"usage": {"prompt_tokens": 3, "total_tokens": 3}})
        return
    text = request.body["messages"][-1]["content"]
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": text}}
    has_tools = "tools" in request.body and text.startswith("{")
    message = {"tool_calls": [call]} if has_tools else {"content": text}
    message |= {"role": "assistant"}
    finish = "tool_calls" if has_tools else "stop"
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    if request.body.get("stream"):
        request.start_stream()
        delta = message | ({"tool_calls": [{"index": 0} | call]} if has_tools else {})
        for choice in ({"delta": delta}, {"delta": {}, "finish_reason": finish}):
            chunk = body | {"object": "chat.completion.chunk", "choices": [{"index": 0} | choice]}
            request.send_chunk(b"data: %b\n\n" % json.dumps(chunk).encode())
        request.end_stream(tokens=2)
        return
    answer = {"index": 0, "message": message, "finish_reason": finish}
    body |= {"object": "chat.completion", "choices": [answer], "usage": usage}
    request.send_json(200, body)


async def test_signals_of_requests_are_counted_without_their_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[CellKey, CellKey, RequestSignals]] = []
    for name in ("INTERVAL_S", "MIN_GAP_S"):
        monkeypatch.setattr(f"argosy.gateway.proxy.traffic_sampler.{name}", 0.0)
    monkeypatch.setattr(
        "argosy.series.request_cells.RequestCells.add_signals",
        lambda _, *given: found.append(given),
    )
    upstream = FakeUpstream(script=respond)
    async with listening(upstream):
        replica = ReplicaConfig(url=upstream.url, kind="openai", model="m")
        config = GatewayConfig(
            port=0,
            models=[ModelConfig(name="big", replicas=[replica])],
            series=SeriesConfig(file=str(tmp_path / "series.sqlite")),
        )
        async with run_gateway_server(config) as (_, client):

            async def send(path: str, **fields: Any) -> RequestSignals:  # noqa: ANN401 - fields of a request
                count = len(found)
                response = await client.post(f"/v1/{path}", json={"model": "big"} | fields)
                assert response.status_code == 200, response.text
                await until(lambda: len(found) > count)
                return found[-1][2]

            async def ask(text: str, system: str = "", **fields: Any) -> RequestSignals:  # noqa: ANN401 - as above
                messages = [{"role": "system", "content": system}]
                messages.append({"role": "user", "content": text})
                return await send("chat/completions", messages=messages, **fields)

            first = await ask("What is the weather in Paris?", "Today is 3 May 2026.")
            second = await ask("Wie ist das Wetter?", "Today is 4 May 2026.", stream=True)
            third = await ask("Paris", "You are a pirate.")
            assert [LANGUAGES[each.language or 0] for each in (first, second, third)] == [
                "english",
                "german",
                "latin",
            ]
            assert first.template == second.template != third.template
            assert first.has_valid_calls is None
            for is_stream in (False, True):
                verdicts = [
                    (await ask(text, tools=TOOLS, stream=is_stream)).has_valid_calls
                    for text in ('{"city": "Paris"}', '{"city": 5}', "{", "<tool_call>", "Hello")
                ]
                assert verdicts == [True, False, False, False, None]
            plain = await send("embeddings", input="Paris")
            packed = await send("embeddings", input="Paris", encoding_format="base64")
            assert len(plain.embedding) == 8
            assert plain.embedding == packed.embedding
            of_replica, of_tenant, _ = found[-1]
            assert (of_replica.model, of_tenant.model) == ("big", "big")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("", "none"),
        ("12 + 3 = 15", "none"),
        ("Привет, как дела?", "cyrillic"),
        ("東京の天気はどうですか", "japanese"),
        ("北京今天的天气怎么样", "chinese"),
        ("오늘 날씨 어때요", "korean"),
        ("ما هو الطقس اليوم", "arabic"),
        ("¿Cómo es el tiempo en Madrid?", "spanish"),
        ("Quel est le temps — à Paris ? 😀", "french"),
        ("Come sono le previsioni per la mia città?", "italian"),
        ("the " * 10_000, "english"),
    ],
)
def test_languages_are_told_apart(text: str, language: str) -> None:
    assert LANGUAGES[find_language(text)] == language
