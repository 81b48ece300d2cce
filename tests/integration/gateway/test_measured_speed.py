"""What routing counts on is measured: by our engine, from the streams of others, from what answers say."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.support.fake_engine import FakeEngine, always, says
from tests.support.gateway_harness import Watching, front, opened
from tests.support.replica_servers import MODEL, chat, completion, real_engine, serve
from tests.support.scripted_server import Asked, plain, rough_server
from tests.support.waiting import until

from argosy.engine.serving.core_messages import CoreStats
from argosy.engine.serving.text.tokenizer import Tokenizer
from argosy.gateway import ReplicaConfig
from argosy.gateway.pool.prober import Prober
from argosy.gateway.pool.replica_endpoint import ReplicaEndpoint
from argosy.gateway.upstream.upstream import Upstream
from argosy.policy import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    AttemptOutcome,
    EstimatedPrefixIndex,
    ReplicaLoad,
    compute_prefix_keys,
)
from argosy.protocol import parse_endpoint

UNKNOWN = ReplicaLoad("unknown")


async def test_a_replica_of_ours_tells_its_speed_its_context_and_the_size_of_its_cache() -> None:
    async with serve(real_engine(blocks=96)) as served:
        replica = ReplicaEndpoint("r", "argosy", MODEL, Upstream(parse_endpoint(served.url)))
        prober = Prober(replica)
        await prober.probe()
        assert not replica.has_reported_speed
        body = completion("Once upon a time " * 40, max_tokens=20, ignore_eos=True)
        assert (await served.client.post("/v1/completions", json=body)).status_code == 200
        await prober.probe()
        told = (await served.client.get("/load")).json()
        assert replica.has_reported_speed
        assert replica.load.prefill_tokens_per_s == told["prefill_tokens_per_s"] > 0
        assert replica.load.inter_token_s == told["decode_s"] > 0
        assert replica.max_model_len == told["max_model_len"]
        blocks = 96 * told["block_size"] // BLOCK_TOKENS
        replica.prefix_index.on_prompt_sent(
            compute_prefix_keys(b"", b"x" * BLOCK_BYTES * 500, BLOCK_BYTES)
        )
        assert len(replica.prefix_index) == blocks
        replica.upstream.close()


async def test_the_speed_of_another_server_is_measured_from_its_streams() -> None:
    watching, more = Watching(), asyncio.Event()

    async def slow(asked: Asked) -> None:
        asked.stream()
        asked.say("first")
        await more.wait()
        asked.say("last", "stop")
        asked.end()

    async with (
        rough_server(slow) as other,
        front([watching], ReplicaConfig(url=other.url, kind="openai", model="rough")) as running,
    ):
        body = completion("Say it. " * 200, model="big", max_tokens=9, stream=True)
        async with running.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            more.set()
            assert "last" in "".join([piece async for piece in pieces])
        (load,) = watching.left[0].pool.reachable_loads()
        assert load.ttft.value(watching.left[0].trace.arrived_at) > 0
        assert load.prefill_tokens_per_s != UNKNOWN.prefill_tokens_per_s
        assert load.inter_token_s != UNKNOWN.inter_token_s


async def test_one_that_comes_back_is_not_as_slow_as_while_it_stood_still() -> None:
    """Else it would get nothing, for as long as others have room, that could show how fast it is."""
    watching, more = Watching(), asyncio.Event()

    async def stands_still(asked: Asked) -> None:
        asked.stream()
        asked.say("first")
        await more.wait()
        asked.say("second")
        await asyncio.Event().wait()

    async with (
        rough_server(stands_still) as other,
        front([watching], ReplicaConfig(url=other.url, kind="openai", model="rough")) as running,
    ):
        (replica,) = running.replicas
        body = completion("Say it.", model="big", max_tokens=9, stream=True)
        async with running.client.stream("POST", "/v1/completions", json=body) as answer:
            pieces = answer.aiter_text()
            await anext(pieces)
            more.set()
            await until(lambda: replica.load.inter_token_s > 1.0)
        opened(replica)
        await running.probe()
        assert replica.load.inter_token_s == UNKNOWN.inter_token_s


@pytest.mark.parametrize("tokens", [None, 4096])
async def test_another_server_may_tell_how_long_a_prompt_may_be(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = {"id": "rough", "object": "model"} | ({"max_model_len": tokens} if tokens else {})
    monkeypatch.setattr("tests.support.scripted_server.MODELS", {"data": [card]})
    async with rough_server() as other:
        replica = ReplicaEndpoint("r", "openai", "rough", Upstream(parse_endpoint(other.url)))
        await Prober(replica).probe()
        assert replica.max_model_len == tokens
        replica.upstream.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hit_that_was_none_corrects_what_is_believed_of_the_cache(
    tokenizer: Tokenizer, stream: bool
) -> None:
    watching = Watching()
    engine = FakeEngine(tokenizer, always(says(tokenizer, "Yes.")))
    async with (
        serve(engine) as served,
        front([watching], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):

        async def believed(number: int) -> int:
            """Ask; how many prompts the replica is believed to have cached now."""
            body = chat(f"{number}: " + "and so on " * 100, model="big", stream=stream)
            answer = await running.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            (replica,) = watching.left[-1].pool.replicas.values()
            return len(replica.prefix_index) // (
                len(watching.left[-1].fields.raw_prompt) // BLOCK_BYTES
            )

        assert [await believed(number) for number in range(5)] == [1, 2, 3, 4, 5]
        assert await believed(3) == 2  # three of its tokens were cached: what is older has gone too
        assert await believed(9) == 3


async def test_a_server_that_does_not_tell_is_believed_to_have_what_it_was_sent() -> None:
    watching = Watching()
    async with (
        rough_server() as other,
        front([watching], ReplicaConfig(url=other.url, kind="openai", model="rough")) as running,
    ):
        for number in (1, 2, 3, 1):
            prompt = f"{number}: " + "and so on " * 100
            body = completion(prompt, model="big", max_tokens=3, stream=True)
            assert (await running.client.post("/v1/completions", json=body)).is_success
        (replica,) = watching.left[-1].pool.replicas.values()
        assert len(replica.prefix_index) == 3 * (
            len(watching.left[-1].fields.raw_prompt) // BLOCK_BYTES
        )


def test_what_was_sent_counts_until_it_was_computed_whether_or_not_the_server_reports() -> None:
    replica = ReplicaEndpoint(
        "r", "openai", "rough", Upstream(parse_endpoint("http://localhost:1"))
    )
    load = replica.load
    for tokens in (500, 300, 200):
        replica.on_request_sent(tokens)
    replica.on_prefill_done(500, sent_at=9.5)
    assert load.sent_tokens == 500
    load.reported_at, load.sent_tokens = 10.0, 0
    replica.on_request_sent(100)
    replica.on_prefill_done(300, sent_at=9.5)
    assert load.sent_tokens == 100
    for _ in range(4):
        replica.on_request_ended(None, 11.0)
    assert load.sent_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_what_has_ended_in_whatever_way_is_not_waited_for(stream: bool) -> None:
    watching, stuck = Watching(), asyncio.Event()

    async def scripted(asked: Asked) -> None:
        prompt = str(asked.body["prompt"])
        if prompt.startswith("long"):
            await stuck.wait()
        if prompt.startswith("broken"):
            asked.json(500, {"error": {"message": "out of order"}})
        elif asked.body.get("stream"):
            await plain(asked)
        else:
            asked.json(200, {"choices": [{"index": 0, "text": "yes", "finish_reason": "stop"}]})

    async with (
        rough_server(scripted) as other,
        front([watching], ReplicaConfig(url=other.url, kind="openai")) as running,
    ):

        def asks(prompt: str) -> asyncio.Task[httpx2.Response]:
            body = completion(prompt + " and so on" * 100, model="big", max_tokens=3, stream=stream)
            return asyncio.create_task(running.client.post("/v1/completions", json=body))

        long = asks("long")  # it is never idle meanwhile
        await until(lambda: len(other.asked) == 1)
        (replica,) = running.replicas
        waits = replica.load.sent_tokens
        assert waits > 0
        for number in range(5):
            assert (await asks(f"{number}")).status_code == 200
            assert replica.load.sent_tokens == waits
        assert (await asks("broken")).status_code == 502
        gone = asks("long ago")
        await until(lambda: replica.load.in_flight == 2)
        gone.cancel()
        await until(lambda: replica.load.in_flight == 1)
        assert replica.load.sent_tokens == waits
        stuck.set()
        assert (await long).status_code == 200


async def test_a_replica_that_was_started_anew_is_believed_to_have_nothing(
    tokenizer: Tokenizer,
) -> None:
    engine = FakeEngine(tokenizer, always(says(tokenizer, "Yes.")))
    keys = compute_prefix_keys(b"", b"x" * 1000, BLOCK_BYTES)
    async with serve(engine) as served:
        replica = ReplicaEndpoint("r", "argosy", MODEL, Upstream(parse_endpoint(served.url)))
        prober = Prober(replica)
        replica.prefix_index.on_prompt_sent(keys)
        for step, believed in ((7, 3), (8, 3), (2, 0)):
            engine.stats = CoreStats(step=step, blocks_total=1024)
            await prober.probe()
            assert len(replica.prefix_index) == believed
        replica.prefix_index.on_prompt_sent(keys)
        for _ in range(3):
            replica.on_request_sent(1)
            replica.on_request_ended(AttemptOutcome.FAILURE, 0.0)
        assert len(replica.prefix_index) == 0
        replica.upstream.close()


async def test_the_log_says_once_why_a_replica_cannot_be_reached_and_when_it_can() -> None:
    async with rough_server(plain) as other:
        replica = ReplicaEndpoint("r", "openai", "rough", Upstream(parse_endpoint(other.url)))
    prober = Prober(replica)
    with capture_logs() as logs:
        await prober.probe()
        await prober.probe()
    (line,) = [line for line in logs if line["event"] == "replica_unreachable"]
    assert "refused" in line["reason"]
    with capture_logs() as logs:
        async with rough_server(plain, port=other.port):
            await prober.probe()
            await prober.probe()
    assert [line["event"] for line in logs].count("replica_reachable_again") == 1
    replica.upstream.close()
    with capture_logs() as logs:
        await prober.probe()
    assert [line["replica"] for line in logs] == ["r"]


def test_memory_is_flat_under_many_distinct_prompts() -> None:
    index = EstimatedPrefixIndex(1000)
    for number in range(20_000):
        index.on_prompt_sent(
            compute_prefix_keys(b"%d" % number, b"x" * BLOCK_BYTES * 2, BLOCK_BYTES)
        )
        assert len(index) <= 1000


async def test_answers_are_expected_to_be_as_long_as_those_before(tokenizer: Tokenizer) -> None:
    watching = Watching()
    engine = FakeEngine(tokenizer, always(says(tokenizer, "Yes.")))
    async with (
        serve(engine) as served,
        front([watching], ReplicaConfig(url=served.url, model=MODEL)) as running,
    ):
        for _ in range(100):
            body = chat("Is it so?", model="big", n=2)
            assert (await running.client.post("/v1/chat/completions", json=body)).is_success
        context = watching.left[-1]
        decode_s = context.pool.reachable_loads()[0].inter_token_s
        (cost,) = context.trace.attempts[-1].candidate_costs
        assert cost.decode_s < 100 * decode_s


async def test_whole_answers_of_other_servers_tell_how_long_answers_are_too() -> None:
    async def short(asked: Asked) -> None:
        usage = {"prompt_tokens": 3, "completion_tokens": 4}
        choices = [{"index": i, "text": "yes", "finish_reason": "stop"} for i in range(2)]
        asked.json(200, {"choices": choices, "usage": usage})

    watching = Watching()
    async with (
        rough_server(short) as other,
        front([watching], ReplicaConfig(url=other.url, kind="openai")) as running,
    ):
        body = completion("Is it so?", model="big", n=2, max_tokens=500)
        before = None
        for _ in range(100):
            assert (await running.client.post("/v1/completions", json=body)).is_success
            context = watching.left[-1]
            before = before or context.pool.expected_output_tokens(context.fields)
        assert before is not None
        assert before > 400
        assert context.pool.expected_output_tokens(context.fields) <= 2 * 32
