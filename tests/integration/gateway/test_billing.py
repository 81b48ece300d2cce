"""Billed is what was given, whatever servers leave unsaid: rows of the ledger, explanations and metrics agree."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.support.backend_formats import Vllm
from tests.support.fake_backend import Fault
from tests.support.fake_backend import running as listening
from tests.support.fake_engine import FakeEngine, Script, always
from tests.support.metered_gateway import (
    CHATS,
    COMPLETIONS,
    PROMPT,
    STREAM,
    books,
    carriable,
    kept,
)
from tests.support.replica_servers import MODEL, serve
from tests.support.scripted_server import Asked, rough_server
from tests.support.waiting import until

from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig
from argosy.gateway.proxy import response_writers as answers
from argosy.protocol import format_event
from argosy.store import UsageRecord


def usage(**fields: object) -> bytes:
    """The event of a stream that tells it."""
    return format_event(json.dumps({"choices": [], "usage": fields}).encode())


@pytest.mark.parametrize(
    ("told", "counts"),
    [
        ([usage(prompt_tokens=7, completion_tokens=3)], (7, 0, 3)),
        ([usage(prompt_tokens=7)], (7, 0, 2)),
        ([usage()], (len(PROMPT) // 4, 0, 2)),
        ([usage(prompt_tokens=None, completion_tokens=None)], (len(PROMPT) // 4, 0, 2)),
        (
            [
                usage(
                    prompt_tokens=7,
                    completion_tokens=2,
                    prompt_tokens_details={"cached_tokens": 10},
                )
            ],
            (7, 7, 2),
        ),
        ([], (len(PROMPT) // 4, 0, 2)),
    ],
    ids=["all", "prompt", "nothing", "null", "more cached than there is", "none"],
)
@pytest.mark.parametrize("choices", [1, 2], ids=["carriable", "passed"])
async def test_of_what_a_server_does_not_say_is_counted_what_it_gave(
    tmp_path: Path, told: list[bytes], counts: tuple[int, int, int], choices: int
) -> None:
    async def script(asked: Asked) -> None:
        asked.stream()
        asked.say("a")
        asked.say("b", "stop")
        for said in told:
            asked.send(said)
        asked.end()

    async with rough_server(script) as rough, carriable(tmp_path, rough.url) as here:
        await here.ask(n=choices, **STREAM)
        row = await here.agree()
        assert (row.input_tokens, row.cached_tokens, row.output_tokens) == counts


@pytest.mark.parametrize("name", ["content", "reasoning", "tool_calls"])
@pytest.mark.parametrize("choices", [1, 2], ids=["carriable", "passed"])
async def test_who_leaves_before_the_usage_pays_for_more_than_an_events_first_token(
    tmp_path: Path, choices: int, name: str
) -> None:
    """Hosted APIs, and engines that are told to, send dozens of tokens with each event."""
    words = "forty words or so " * 20
    calls = [{"index": 0, "function": {"arguments": words}}]

    async def script(asked: Asked) -> None:
        asked.stream()
        delta = {name: calls if name == "tool_calls" else words}
        for finish in (None, "stop"):
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            asked.send(format_event(json.dumps({"choices": [choice]}).encode()))
        await asked.writer.drain()
        await asyncio.Event().wait()

    async with rough_server(script) as rough, carriable(tmp_path, rough.url) as here:
        body = {"model": "big", "messages": [], "n": choices, **STREAM}
        async with here.running.client.stream("POST", CHATS, json=body) as answer:
            async for line in answer.aiter_lines():
                if "stop" in line:
                    break
        await here.running.idle()
        assert here.row().output_tokens == 2 * (len(words) // 4)


async def test_a_usage_of_nothing_with_each_piece_makes_none_of_them_free(tmp_path: Path) -> None:
    """LiteLLM's proxy tells it with each chunk of a completion that is streamed without its usage."""

    async def script(asked: Asked) -> None:
        asked.stream()
        for finish in (None, "stop"):
            choice = {"index": 0, "text": "a", "finish_reason": finish}
            none = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
            asked.send(format_event(json.dumps({"choices": [choice], "usage": none}).encode()))
        asked.end()

    async with rough_server(script) as rough, books(tmp_path, rough.url) as here:
        await here.ask(stream=True)
        row = await here.agree()
        assert (row.input_tokens, row.output_tokens) == (len(PROMPT) // 4, 2)


async def test_a_prompt_that_is_echoed_is_no_answer(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        asked.stream()
        asked.say(PROMPT * 9)
        asked.say(" a story", "stop")
        asked.end()

    async with rough_server(script) as rough, books(tmp_path, rough.url) as here:
        await here.ask(echo=True, **STREAM)
        assert (await here.agree()).output_tokens == 2


async def test_counts_that_cannot_be_are_not_believed(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        asked.stream()
        asked.say("a", "stop")
        asked.send(usage(prompt_tokens=2**40, completion_tokens=2**40))
        asked.end()

    async with rough_server(script) as rough, books(tmp_path, rough.url) as here:
        await here.ask(n=2, **STREAM)
        row = await here.agree()
        assert (row.input_tokens, row.output_tokens) == (len(PROMPT) // 4, 1)


@pytest.mark.parametrize("choices", [1, 2], ids=["carriable", "passed"])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "refusal", "tool_calls"])
async def test_what_is_no_text_counts_where_no_usage_tells(
    tmp_path: Path, name: str, choices: int
) -> None:
    said = [{"index": 0, "id": "c", "function": {"name": "f"}}] if name == "tool_calls" else "Hm"

    async def script(asked: Asked) -> None:
        asked.stream()
        for delta in ({"role": "assistant", "content": ""}, {name: said}, {name: said}):
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            asked.send(format_event(json.dumps({"choices": [choice]}).encode()))
        ended = {"index": 0, "delta": {}, "finish_reason": "stop"}
        asked.send(format_event(json.dumps({"choices": [ended]}).encode()))
        asked.end()

    async with rough_server(script) as rough, carriable(tmp_path, rough.url) as here:
        await here.ask(CHATS, n=choices, **STREAM)
        row = await here.agree()
        assert (row.input_tokens > 0, row.output_tokens) == (True, 2)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_each_choice_is_billed_where_a_server_tells_the_usage_of_each(
    tmp_path: Path, path: str
) -> None:
    """llama.cpp does: with a completion's last chunk, after a chat's, while other choices go on."""
    told = [usage(prompt_tokens=7, completion_tokens=tokens) for tokens in (2, 30)]

    async def script(asked: Asked) -> None:
        asked.stream()
        for place, tokens in enumerate((2, 30)):
            for at in range(tokens):
                end = "length" if at == tokens - 1 else None
                delta = {"delta": {"content": "a"}} if path == CHATS else {"text": "a"}
                choice = {"index": place, "finish_reason": end, **delta}
                asked.send(format_event(json.dumps({"choices": [choice]}).encode()))
            asked.send(told[place])
        asked.end()

    async with rough_server(script) as rough, carriable(tmp_path, rough.url) as here:
        await here.ask(path, n=2, **STREAM)
        row = await here.agree()
        assert (row.input_tokens, row.output_tokens) == (7, 32)


async def test_each_prompt_is_billed_where_a_server_tells_the_usage_of_each(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        asked.stream()
        for place, prompt in enumerate((100, 3, 9)):
            used = {"prompt_tokens": prompt, "completion_tokens": 5}
            choice = {"index": place, "text": "five of these", "finish_reason": "length"}
            asked.send(format_event(json.dumps({"choices": [choice], "usage": used}).encode()))
        asked.end()

    async with rough_server(script) as rough, carriable(tmp_path, rough.url) as here:
        await here.ask(prompt=[PROMPT * 9, "Hi", "You there"], **STREAM)
        row = await here.agree()
        assert (row.input_tokens, row.output_tokens) == (112, 15)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_a_whole_answer_that_tells_the_usage_of_its_first_choice_is_billed_whole(
    tmp_path: Path, path: str
) -> None:
    texts = ["a", "forty words or so " * 20, "b"]

    async def script(asked: Asked) -> None:
        said = [{"message": {"content": t}} if path == CHATS else {"text": t} for t in texts]
        choices = [{"index": at, "finish_reason": "stop", **one} for at, one in enumerate(said)]
        asked.json(200, {"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 1}})

    async with rough_server(script) as rough, carriable(tmp_path, rough.url) as here:
        prompts = {"n": 3} if path == CHATS else {"prompt": [PROMPT] * 3}
        await here.ask(path, **prompts)
        row = await here.agree()
        assert row.output_tokens == 2 + len(texts[1]) // 4
        assert row.input_tokens == 7 if path == CHATS else row.input_tokens >= 3 * len(PROMPT) // 4


async def test_a_whole_answer_that_tells_its_prompt_alone_is_not_free(tmp_path: Path) -> None:
    async def script(asked: Asked) -> None:
        choice = {"index": 0, "text": "hello " * 50, "finish_reason": "stop"}
        asked.json(200, {"choices": [choice], "usage": {"prompt_tokens": 7}})

    async with rough_server(script) as rough, books(tmp_path, rough.url) as here:
        await here.ask()
        row = await here.agree()
        assert (row.input_tokens, row.output_tokens > 50) == (7, True)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_of_a_whole_answer_that_tells_no_usage_is_counted_what_it_says(
    tmp_path: Path, path: str
) -> None:
    """And not its ids, its log-probabilities and the empty lines before it."""
    texts = ["forty words or so " * 20, "b"]

    async def script(asked: Asked) -> None:
        said = [{"message": {"content": t}} if path == CHATS else {"text": t} for t in texts]
        more = {"finish_reason": "stop", "logprobs": {"top_logprobs": [{"a": -1.0}] * 50}}
        asked.json(200, {"choices": [{"index": at, **one, **more} for at, one in enumerate(said)]})

    async with rough_server(script) as rough, carriable(tmp_path, rough.url) as here:
        await here.ask(path, n=2)
        assert (await here.agree()).output_tokens == len(texts[0]) // 4 + 1


async def test_a_whole_answer_of_parts_and_calls_that_tells_no_usage_is_not_free(
    tmp_path: Path,
) -> None:
    async def script(asked: Asked) -> None:
        parts = [{"type": "text", "text": "hello " * 50}]
        call = {"name": "f", "arguments": '{"a": "' + "b" * 400 + '"}'}
        message = {"content": parts, "function_call": call}
        asked.json(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async with rough_server(script) as rough, books(tmp_path, rough.url) as here:
        await here.ask(CHATS)
        row = await here.agree()
        assert 175 <= row.output_tokens <= 210


# --- what got no answer --------------------------------------------------------------------------

NOTHING = (0, 0, 0, 0)


def counts(row: UsageRecord) -> tuple[int, int, int, int]:
    return row.input_tokens, row.cached_tokens, row.output_tokens, row.nano_dollars


@pytest.mark.parametrize("events", [0, 1], ids=["silent", "a role"])
@pytest.mark.parametrize("timeout_s", [None, 0.2], ids=["left", "too late"])
async def test_whoever_got_no_token_pays_no_prompt_of_another_server_either(
    tmp_path: Path, timeout_s: float | None, events: int
) -> None:
    double = Vllm()
    async with listening(double), books(tmp_path, double.url) as here:
        double.faults.append(Fault("stall", events))
        body = STREAM | ({} if timeout_s is None else {"timeout_s": timeout_s})
        asking = asyncio.create_task(here.ask(CHATS, **body))
        if timeout_s is None:
            await until(lambda: bool(double.asked))
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: here.spool.pending_records == 1)
        row = await here.agree()
        assert counts(row) == NOTHING
        assert row.status == ("cancelled" if timeout_s is None else "stopped")


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_pays_for_what_came_and_of_an_answer_to_be_sent_whole_nothing_had(
    tmp_path: Path, tokenizer: Tokenizer, stream: bool
) -> None:
    engine = FakeEngine(tokenizer, always(Script([*range(100, 110)], pause_after=4)))
    async with (
        serve(engine) as served,
        kept(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as here,
    ):
        asking = asyncio.create_task(here.ask(stream=stream, request_id="mine"))
        await engine.paused.wait()
        trace = here.running.traces.find("mine")
        assert trace is not None
        await until(lambda: trace.last_token_at is not None)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: here.spool.pending_records == 1)
        row = await here.agree()
        assert row.status == "cancelled"
        assert (counts(row) == NOTHING) is not stream


async def test_an_answer_to_be_sent_whole_ends_where_it_is_too_large_to_be_kept(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices with all their log-probabilities took as much of the gateway's memory as there was."""
    monkeypatch.setattr(answers, "MAX_AGGREGATED_BYTES", 100)
    engine = FakeEngine(tokenizer, always(Script([*range(100, 110)], pause_after=4)))
    async with (
        serve(engine) as served,
        kept(tmp_path, ReplicaConfig(url=served.url, model=MODEL)) as here,
    ):
        answer = json.loads(await here.ask())
        row = await here.agree()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert 0 < answer["usage"]["completion_tokens"] == row.output_tokens <= 4


async def test_an_answer_that_broke_before_its_first_token_is_not_billed(tmp_path: Path) -> None:
    double = Vllm()
    async with listening(double), books(tmp_path, double.url) as here:
        double.faults.append(Fault("die", 1))
        assert "upstream_failed" in await here.ask(CHATS, n=2, **STREAM)
        row = await here.agree()
        assert (counts(row), row.status) == (NOTHING, "failed")
