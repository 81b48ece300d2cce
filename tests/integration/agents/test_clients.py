"""The official clients of all APIs, in Python and JavaScript, hold the same conversation with the bundled model."""

from __future__ import annotations

import asyncio

import httpx2
import msgspec
from tests.integration.test_metrics import samples
from tests.support.agents.task import Server
from tests.support.conversation import (
    APIS,
    Person,
    Question,
    Script,
    Transcript,
    converse,
    open_sdks,
)
from tests.support.javascript_sdk import run_javascript
from tests.support.waiting import until

WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
CAPITAL, FOX = "What is the capital of France?", "Tell me a story about a fox."
IN_PARIS = Question("What is the weather in Paris?", tool=WEATHER)
SCRIPT = Script(
    questions={
        "whole": Question(CAPITAL, stream=False),
        "streamed": Question(CAPITAL),
        "stopped": Question("Count from one to nine.", stop=("5",)),
        "reasoning": Question("What is 17 + 25?", effort="low"),
        "call": IN_PARIS,
    },
    tool_loop=IN_PARIS,
    typed=Question("Give me a person as JSON."),
    cancelled=Question(FOX),
)


async def converse_in_python(server: Server) -> dict[str, Transcript]:
    async with open_sdks(server.root_url, "unused") as sdks:
        clients = sdks.clients(server.model)
        transcripts = await asyncio.gather(
            *(converse(client, SCRIPT) for client in clients.values())
        )
        return dict(zip(clients, transcripts, strict=True))


async def converse_in_javascript(server: Server) -> dict[str, Transcript]:
    script = msgspec.json.encode(SCRIPT).decode()
    results = await run_javascript("conversation.mjs", server.root_url, server.model, script)
    return msgspec.convert(results, dict[str, Transcript])


async def test_clients_of_all_apis_hold_the_same_conversation(server: Server) -> None:
    cancelled = count_cancelled(server)
    python, javascript = await asyncio.gather(
        converse_in_python(server), converse_in_javascript(server)
    )
    transcripts = [conversation[api] for conversation in (python, javascript) for api in APIS]
    first = python["chat"]
    for api, transcript in zip(APIS * 2, transcripts, strict=True):
        if api == "responses":  # has no stop sequences
            del transcript.answers["stopped"]
        for name, answer in transcript.answers.items():
            assert answer == first.answers[name], (api, name)
        assert transcript.tool_loop == first.tool_loop, api
        Person.model_validate(transcript.typed)
        assert transcript.error[0] == 404
        assert "'missing'" in transcript.error[1]
        assert transcript.cancelled_after
    # On a busy machine some streams end before their client leaves.
    await until(lambda: count_cancelled(server) > cancelled)
    check_answers(first)


def check_answers(transcript: Transcript) -> None:
    answers = transcript.answers
    assert "Paris" in answers["whole"].text
    assert answers["streamed"] == answers["whole"]
    assert answers["stopped"].text.endswith("4, ")
    assert answers["reasoning"].thinking
    assert answers["reasoning"].text
    assert answers["call"].calls == [("get_weather", {"city": "Paris"})]
    assert transcript.tool_loop.calls == answers["call"].calls
    assert transcript.tool_loop.text


def count_cancelled(server: Server) -> float:
    """Return how many requests ended because their client left."""
    text = httpx2.get(f"{server.root_url}/metrics").text
    return sum(
        value
        for name, labels, value in samples(text)
        if name == "argosy_gateway_requests_total" and labels["status"] == "cancelled"
    )
