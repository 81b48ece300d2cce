"""Other engines behind the gateway, each as a double that speaks its shapes: found, read, failed over, counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from structlog.testing import capture_logs
from tests.support.backend_formats import (
    SELF_HOSTED,
    Hosted,
    LlamaCpp,
    Lmdeploy,
    Sglang,
    TensorRtLlm,
    Tgi,
    Vllm,
)
from tests.support.fake_backend import (
    ANSWER,
    FIRST_ID,
    PROMPT_IDS,
    WHOLE,
    Double,
    Fault,
    running,
)
from tests.support.gateway_client import (
    BODIES,
    CHAT,
    COMPLETION,
    Seen,
    gateway,
    stream,
)
from tests.support.waiting import until

from argosy.gateway import (
    GatewayConfig,
    GatewayServer,
    ModelConfig,
    ReplicaConfig,
    Timeouts,
    load_config,
)
from argosy.gateway.backends import ResumeMode
from argosy.policy import BLOCK_TOKENS

Family = type[Double]
KINDS: tuple[Literal["error", "abort", "stall"], ...] = ("error", "abort", "stall")
USAGE = {"include_usage": True}
FOUND: dict[Family, tuple[str, int | None, float, int]] = {
    Vllm: ("vllm", 5, 0.25, 0),
    Sglang: ("sglang", 5, 0.5, 8),
    TensorRtLlm: ("tensorrt-llm", 5, 0.25, 8),
    Tgi: ("tgi", 5, 0.0, 0),
    Lmdeploy: ("lmdeploy", 5, 0.125, 0),
    LlamaCpp: ("llama.cpp", 0, 0.0, 4),
}
CARRIED: dict[Family, tuple[str, ...]] = {
    Vllm: (CHAT, COMPLETION),
    Sglang: (CHAT, COMPLETION),
    TensorRtLlm: (COMPLETION,),
    Tgi: (CHAT, COMPLETION),
    Lmdeploy: (COMPLETION,),
    LlamaCpp: (CHAT, COMPLETION),
}
each_family = pytest.mark.parametrize("family", SELF_HOSTED, ids=lambda family: family.__name__)


def behind(double: Double, **settings: Any) -> ReplicaConfig:  # noqa: ANN401 - the struct's own
    return ReplicaConfig(url=double.url, model=double.model, **settings)


# --- what is there -------------------------------------------------------------------------------


@each_family
async def test_what_it_is_and_its_load_are_found_by_asking(family: Family) -> None:
    double = family(running=3, waiting=5)
    async with running(double), gateway(behind(double)) as (server, _):
        replica = server.replicas[0]
        kind, waiting, kv_used, capacity = FOUND[family]
        await until(lambda: replica.load.running)
        load = replica.load
        told = (replica.kind, load.running, load.waiting, load.kv_usage_ratio, load.max_seqs)
        assert told == (kind, 3, waiting, kv_used, capacity)
        if family is Vllm:  # 40 blocks of 16: more prompts than that it cannot have cached
            replica.prefix_index.on_prompt_sent([b"%d" % number for number in range(1000)])
            assert len(replica.prefix_index) == 40 * 16 // BLOCK_TOKENS
        assert replica.max_model_len == (64 if family is Vllm else None)


async def test_a_server_that_is_not_up_yet_is_found_when_it_is() -> None:
    double = Sglang(healthy=False)
    async with running(double), gateway(behind(double)) as (server, client):
        assert server.replicas[0].kind == "auto"
        refused = await client.post(COMPLETION, json=BODIES[COMPLETION])
        assert refused.status_code == 503
        double.healthy = True
        await until(lambda: server.replicas[0].kind != "auto")
        assert (await stream(client, COMPLETION)).text == WHOLE


async def test_requests_go_where_less_waits() -> None:
    busy, idle = Vllm(waiting=40), Vllm()
    async with running(busy, idle), gateway(behind(busy), behind(idle)) as (server, client):
        loads = {replica.name: replica.load for replica in server.replicas}
        await until(lambda: loads[busy.url].waiting)
        assert loads[busy.url].queued_tokens > loads[idle.url].queued_tokens == 0
        del client


@each_family
async def test_a_server_without_metrics_is_still_served_by(family: Family) -> None:
    class Quiet(family):  # type: ignore[misc, valid-type]
        def pages(self) -> dict[str, object]:
            return {p: page for p, page in super().pages().items() if p in {"/v1/models", "/info"}}

    double = Quiet()
    async with running(double), gateway(behind(double)) as (server, client):
        assert server.replicas[0].kind == FOUND[family][0]
        await until(lambda: "/health" in double.got)
        assert server.replicas[0].breaker.is_closed
        assert (await stream(client, COMPLETION)).text == WHOLE


async def test_a_server_that_tells_its_load_from_its_first_request_on_is_asked_again() -> None:
    """TGI has no gauge that was never set."""

    class New(Tgi):
        def pages(self) -> dict[str, object]:
            pages = super().pages()
            return pages if self.asked else pages | {"/metrics": ""}

    double = New(running=3)
    with capture_logs() as logs:
        async with running(double), gateway(behind(double)) as (server, client):
            await until(lambda: double.got.count("/health") > 1)
            assert (await stream(client, COMPLETION)).text == WHOLE
            await until(lambda: server.replicas[0].load.running == 3)
    assert [told["event"] for told in logs].count("load_report_invalid") == 1


# --- streams pass --------------------------------------------------------------------------------


@each_family
async def test_a_client_gets_what_it_would_have_got_from_the_server(family: Family) -> None:
    double = family()
    async with (
        running(double),
        gateway(behind(double)) as (_, client),
        httpx2.AsyncClient(base_url=double.url) as direct,
    ):
        for path, asks in itertools.product((CHAT, COMPLETION), ({}, {"stream_options": USAGE})):
            through = await stream(client, path, **asks)
            mine = double.asked[-1].body
            assert "seed" not in mine
            assert mine["model"] == double.model
            straight = await stream(direct, path, **asks)
            assert through.text == straight.text == WHOLE
            # Without being asked, some tell these in their last chunk.
            unseen = {"id", *(() if asks else ("usage", "timings"))}
            assert without(unseen, through) == without(unseen, straight)
            assert through.done == 1


def without(names: set[str], seen: Seen) -> list[dict[str, Any]]:
    """The chunks without these fields, and without what some engines leave out where others say null."""

    def said(fields: dict[str, Any]) -> dict[str, Any]:
        none = ("token_ids", "prompt_token_ids", "usage")
        return {n: v for n, v in fields.items() if n not in none or v is not None}

    return [
        {n: v for n, v in said(chunk).items() if n not in names}
        | {"choices": [said(choice) for choice in chunk["choices"]]}
        for chunk in seen.chunks
    ]


@each_family
async def test_whole_answers_and_refusals_pass_as_they_came(family: Family) -> None:
    double = family()
    async with running(double), gateway(behind(double)) as (_, client):
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"session_id": "a", "timeout_s": 5})
        assert answer.json()["choices"][0]["message"]["content"] == WHOLE
        assert answer.json()["usage"]["completion_tokens"] == len(ANSWER)
        double.faults.append(Fault("refuse", status=422))
        refused = await client.post(CHAT, json=BODIES[CHAT])
        assert (refused.status_code, refused.json()) == (422, double.error(422, "not now"))


# --- streams are carried on ----------------------------------------------------------------------


@each_family
async def test_a_stream_goes_on_wherever_its_server_dies(family: Family) -> None:
    one, two = family(name="one"), family(name="two")
    async with running(one, two), gateway(behind(one), behind(two)) as (server, client):
        for path in CARRIED[family]:
            whole = await stream(client, path, stream_options=USAGE)
            for count in range(len(whole.chunks) + 1):
                one.faults.append(Fault("die", count))
                seen = await stream(client, path, stream_options=USAGE)
                assert not one.faults
                assert (seen.text, seen.finish, seen.done) == (WHOLE, ["stop"], 1), count
                assert not seen.errors
                assert seen.roles == whole.roles
                assert len(seen.identities) == 1
                (usage,) = seen.usage
                assert usage["completion_tokens"] == len(ANSWER)
                # Most tell it at the end only: if they die just then, the prompt's is about right.
                at_the_end = count >= len(whole.chunks) - 1
                assert usage["prompt_tokens"] == len(PROMPT_IDS) or at_the_end, count
        assert all(replica.load.in_flight == 0 for replica in server.replicas)


@each_family
async def test_errors_in_the_stream_and_stalls_are_deaths_too(family: Family) -> None:
    one, two = family(), family()
    timeouts = Timeouts(
        first_token_timeout_s=5.0, stream_idle_timeout_s=0.3, failover_timeout_s=2.0
    )
    async with (
        running(one, two),
        gateway(behind(one), behind(two), timeouts=timeouts) as (_, client),
    ):
        for kind in KINDS:
            one.faults.append(Fault(kind, 4))
            seen = await stream(client, COMPLETION)
            assert (seen.text, seen.finish, seen.done, seen.errors) == (WHOLE, ["stop"], 1, [])
            if kind != "stall":
                one.faults.append(Fault(kind, 4))  # more than text: nobody can go on
                seen = await stream(client, COMPLETION, n=2)
                assert (seen.done, len(seen.errors)) == (0, 1)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_token_ids_carry_a_stream_on_where_they_are_told(path: str) -> None:
    one, two = Vllm(), Vllm()
    async with running(one, two), gateway(behind(one), behind(two)) as (_, client):
        one.faults.append(Fault("die", 4))
        assert (await stream(client, path)).text == WHOLE
        first, second = sorted(
            [*one.asked, *two.asked], key=lambda asked: "Tell" not in str(asked.body)
        )
        told = 3 if path == CHAT else 4
        assert first.path == path
        assert second.path == COMPLETION
        assert second.body["prompt"] == [*PROMPT_IDS, *range(FIRST_ID, FIRST_ID + told)]
        assert second.body["max_tokens"] == (
            64 - len(PROMPT_IDS) - told if path == CHAT else 12 - told
        )


async def test_a_client_that_asks_for_token_ids_gets_them_from_all_servers() -> None:
    one, two = Vllm(), Vllm()
    async with running(one, two), gateway(behind(one), behind(two)) as (_, client):
        one.faults.append(Fault("die", 4))
        seen = await stream(client, COMPLETION, return_token_ids=True)
        ids = [
            i for chunk in seen.chunks for choice in chunk["choices"] for i in choice["token_ids"]
        ]
        assert ids == [*range(FIRST_ID, FIRST_ID + len(ANSWER))]


async def test_where_text_lags_behind_the_tokens_for_stop_strings_it_goes_on_from_the_text() -> (
    None
):
    one, two = Sglang(), Sglang()
    async with running(one, two), gateway(behind(one), behind(two)) as (_, client):
        one.faults.append(Fault("die", 3))
        assert (await stream(client, COMPLETION, stop=["never"])).text == WHOLE
        prompts = {asked.body["prompt"] for asked in (*one.asked, *two.asked)}
        assert prompts == {"Tell me", "Tell meOnce upon a"}


async def test_a_chat_goes_on_in_the_assistants_message_where_there_are_no_token_ids() -> None:
    one, two = Sglang(), Sglang()
    async with running(one, two), gateway(behind(one), behind(two)) as (_, client):
        one.faults.append(Fault("die", 4))
        assert (await stream(client, CHAT)).text == WHOLE
        last = next(a.body for a in (*one.asked, *two.asked) if len(a.body["messages"]) == 2)
        assert last["messages"][-1] == {"role": "assistant", "content": "Once upon a"}
        assert (last["continue_final_message"], last["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_who_gave_a_seed_can_see_from_where_on_it_does_not_count(path: str) -> None:
    one, two = Vllm(), Vllm()
    async with running(one, two), gateway(behind(one), behind(two)) as (_, client):
        for seed, marks in ((7, {None, "resumed"}), (None, {None})):
            one.faults.append(Fault("die", 4))
            seen = await stream(client, path, seed=seed)
            assert seen.text == WHOLE
            assert {chunk.get("system_fingerprint") for chunk in seen.chunks} == marks


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (Vllm, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (Sglang, {"response_format": {"type": "json_object"}}),
        (Tgi, {"logprobs": True}),
        (LlamaCpp, {"n": 2}),
        (TensorRtLlm, {}),
        (Lmdeploy, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value),
)
async def test_what_is_more_than_text_ends_with_an_error_that_says_so(
    family: Family, changes: dict[str, object]
) -> None:
    one, two = family(), family()
    async with running(one, two), gateway(behind(one), behind(two)) as (_, client):
        one.faults.append(Fault("die", 5))
        seen = await stream(client, CHAT, **changes)
        assert WHOLE.startswith(seen.text)
        assert seen.text
        assert [error["code"] for error in seen.errors] == ["upstream_failed"]
        assert not seen.done
        one.faults.append(Fault("die", 0))  # nothing was told yet: somebody else begins
        assert (await stream(client, CHAT, **changes)).text == WHOLE


@pytest.mark.parametrize(("resume_mode", "text"), [("none", "Once upon a"), ("prefill", WHOLE)])
async def test_the_configuration_says_how_far_it_may_go(carry: ResumeMode, text: str) -> None:
    one, two = Vllm(), Vllm()
    async with (
        running(one, two),
        gateway(behind(one, resume_mode=carry), behind(two, carry=carry)) as (_, client),
    ):
        one.faults.append(Fault("die", 4))
        seen = await stream(client, CHAT)
        assert seen.text == text
        assert bool(seen.errors) == (carry == "none")
        assert not any("return_token_ids" in asked.body for asked in (*one.asked, *two.asked))


async def test_who_cannot_go_on_is_passed_over_for_who_can() -> None:
    one, two, three = Vllm(), Vllm(), Vllm()
    async with (
        running(one, two, three),
        gateway(behind(one), behind(two, resume_mode="none"), behind(three)) as (server, client),
    ):
        for _ in range(6):  # whoever is asked first dies
            one.faults.append(Fault("die", 4))
            alone = len(two.asked)
            seen = await stream(client, CHAT)
            if len(two.asked) == alone:
                assert (seen.text, seen.errors, seen.done) == (WHOLE, [], 1)
            await stream(client, CHAT)  # now it is another's turn
        assert [asked for asked in (*one.asked, *three.asked) if asked.path == COMPLETION]
        assert all(replica.load.in_flight == 0 for replica in server.replicas)


@pytest.mark.parametrize("begins", ["able", "unable"])
async def test_where_nobody_else_can_go_on_who_began_is_asked_again_or_that_is_told(
    begins: str,
) -> None:
    able, unable = Vllm(), Vllm()
    async with running(able, unable):
        replicas = [
            behind(able, name="2-able"),
            behind(unable, resume_mode="none", name=f"{1 if begins == 'unable' else 3}-unable"),
        ]
        async with gateway(*replicas) as (_, client):  # takes them by their names
            able.faults.append(Fault("die", 4))
            seen = await stream(client, CHAT)
            asked = len(able.asked), len(unable.asked)
            if begins == "able":
                assert (seen.text, seen.finish, seen.errors, seen.done) == (WHOLE, ["stop"], [], 1)
                assert asked == (2, 0)
            else:
                assert (seen.text, seen.finish, seen.done) == ("Once upon a", [], 0)
                assert [error["code"] for error in seen.errors] == ["upstream_failed"]
                assert asked == (0, 1)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_stop_string_over_two_servers_ends_the_answer_at_once(path: str) -> None:
    one, two = Vllm(), Vllm()
    patient = Timeouts(first_token_timeout_s=600, stream_idle_timeout_s=600)
    async with (
        running(one, two),
        gateway(behind(one), behind(two), timeouts=patient) as (server, client),
    ):
        one.faults += [Fault("die", 4), Fault("stall", 1)]  # the second does not see the string
        stop = "a time" if path == CHAT else "time,"
        seen = await stream(client, path, stop=[stop], stream_options=USAGE)
        assert (seen.text, seen.finish) == (WHOLE.partition(stop)[0], ["stop"])
        tokens = 4 if path == CHAT else 5
        assert (seen.counts, seen.errors, seen.done) == ([(len(PROMPT_IDS), tokens)], [], 1)
        assert all(replica.load.in_flight == 0 for replica in server.replicas)
        assert all(replica.breaker.is_closed for replica in server.replicas)
        one.faults.clear()
        assert (await stream(client, path)).text == WHOLE


# --- breakers, and hosted APIs -------------------------------------------------------------------


@each_family
async def test_full_servers_are_left_alone_for_a_moment(family: Family) -> None:
    one, two = family(), family()
    async with running(one, two), gateway(behind(one), behind(two)) as (server, client):
        one.faults.append(Fault("refuse", status=503))
        assert (await stream(client, CHAT)).text == WHOLE
        assert all(replica.breaker.is_closed for replica in server.replicas)
        assert len(one.asked) + len(two.asked) == 2


@pytest.mark.parametrize("priority", [False, True])
async def test_servers_that_are_not_well_are_left_out_until_they_are(priority: bool) -> None:
    """Where they compute by priority, what finds out whether they are well waits for nobody."""
    one, two = Sglang(), Sglang()
    async with (
        running(one, two),
        gateway(*(behind(each, priority_scheduling=priority) for each in (one, two))) as it,
    ):
        server, client = it
        one.healthy = False
        breaker = next(r.breaker for r in server.replicas if r.name == one.url)
        await until(lambda: not breaker.is_closed)
        for _ in range(4):
            assert (await stream(client, CHAT)).text == WHOLE
        assert not one.asked
        one.healthy = True
        await until(lambda: breaker.is_closed)
        for _ in range(2):
            assert (await stream(client, CHAT)).text == WHOLE
        probe, asked = one.asked
        assert (probe.body["max_tokens"], asked.body["stream"]) == (1, True)
        assert probe.body.get("priority", 0) >= asked.body.get("priority", 0)
        assert ("priority" in probe.body) == priority


@pytest.mark.parametrize(("family", "sign"), [(Vllm, 1), (Sglang, -1)])
async def test_engines_that_compute_by_priority_are_told_it(
    family: Family, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one tier who comes first, of two the higher; but who has waited for long goes before those that come."""
    now = 1_000_000.5
    monkeypatch.setattr(time, "time", lambda: now)
    double = family()
    async with running(double), gateway(behind(double, priority_scheduling=True)) as (_, client):
        for later, back in ((0, 0), (1, 0), (2, 1), (24, 0), (26, 0)):
            now = 1_000_000.5 + later
            await stream(client, CHAT, priority=back)
        await client.post(CHAT, json=BODIES[CHAT])
        *_, whole = said = [sign * asked.body["priority"] for asked in double.asked]
        assert said == [1_000_005, 1_000_006, 1_000_032, 1_000_029, 1_000_031, whole]
        assert whole == said[-2]


async def test_a_stream_that_goes_on_elsewhere_is_as_urgent_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = Vllm(), Vllm()
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    async with (
        running(one, two),
        gateway(*(behind(each, priority_scheduling=True) for each in (one, two))) as (_, client),
    ):
        one.faults = two.faults = deque([Fault("stall", 3)])
        telling = asyncio.create_task(stream(client, CHAT))
        await until(lambda: bool(one.asked or two.asked))
        now += 100
        assert (await telling).text == WHOLE
        assert [asked.body["priority"] for asked in (*one.asked, *two.asked)] == [1_000_005] * 2


async def test_nobody_else_is_told_a_priority() -> None:
    plain, unknown = Vllm(), LlamaCpp()
    async with (
        running(plain, unknown),
        gateway(behind(plain), behind(unknown, priority_scheduling=True)) as (_, client),
    ):
        for _ in range(2):
            await stream(client, CHAT, priority=1)
        assert [("priority" in each.asked[0].body) for each in (plain, unknown)] == [False] * 2


async def test_a_hosted_api_gets_its_key_and_no_field_that_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOSTED_KEY", Hosted.key)
    double = Hosted()
    settings: dict[str, Any] = {
        "api_key_env": "HOSTED_KEY",
        "key_header": "api-key",
        "key_prefix": "Key ",
        "headers": {"OpenAI-Organization": "org-1"},
        "stream_usage": False,
    }
    async with running(double), gateway(behind(double, **settings)) as (server, client):
        assert server.replicas[0].kind == "openai"
        extras = {"session_id": "s", "cache_salt": "c", "timeout_s": 30.0, "priority": 1}
        seen = await stream(client, CHAT, **extras)
        assert (seen.text, seen.done, seen.errors) == (WHOLE, 1, [])
        asked = double.asked[0]
        assert asked.headers["openai-organization"] == "org-1"
        assert asked.body.keys() == {"model", "messages", "stream"}
        trace = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "vendor=1"}
        answer = await client.post(CHAT, json=BODIES[CHAT], headers=trace)
        assert {name: double.asked[1].headers[name] for name in trace} == trace
        assert answer.headers["openai-version"] == "2020-10-01"
        double.faults.append(Fault("die", 3))
        assert (await stream(client, CHAT)).errors


@pytest.mark.parametrize("streams", [False, True])
async def test_who_wants_an_answer_to_go_on_after_tokens_is_told_who_cannot(streams: bool) -> None:
    """From the start again it would be another answer, which its client takes for the rest of one."""
    double = Vllm()
    async with running(double), gateway(behind(double)) as (_, client):
        asked = BODIES[COMPLETION] | {"stream": streams}
        answer = await client.post(COMPLETION, json=asked | {"resume": {"token_ids": [100, 101]}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "resume")
        assert not double.asked
        assert (await client.post(COMPLETION, json=asked | {"resume": None})).status_code == 200


@each_family
async def test_no_client_says_what_only_parts_of_a_fleet_may_say(family: Family) -> None:
    double = family()
    async with running(double), gateway(behind(double)) as (_, client):
        await stream(client, CHAT)
        elsewhere = {
            "rid": "another's",
            "request_id": "another's",
            "bootstrap_host": "10.0.0.1",
            "kv_transfer_params": {"remote_host": "10.0.0.1"},
            "migration_request": {"remote_engine_id": "10.0.0.1"},
            "disaggregated_params": {"request_type": "generation_only"},
            "lora_path": "/another",
            "Model": "another",
            "models": ["another"],
            "fallbacks": [{"model": "another"}],
            "id_slot": 0,
            "custom_logit_processor": "{}",
        }
        for path in (CHAT, COMPLETION):
            await stream(client, path, **elsewhere)
            await client.post(path, json=BODIES[path] | elsewhere)
        assert len(double.asked) == 5
        for asked in double.asked:
            assert asked.body.keys().isdisjoint(elsewhere)


async def test_nor_within_what_is_for_an_engines_own_plugins() -> None:
    """What transfers KV blocks in vLLM reads it as a map, unchecked."""
    double = Vllm()
    extra = {"ngram_size": 30, "whitelist": [1, 2], "kv_transfer_params": "10.0.0.1"}
    async with running(double), gateway(behind(double)) as (_, client):
        for given in (extra, None):
            await client.post(CHAT, json=BODIES[CHAT] | {"vllm_xargs": given})
        answer = await client.post(CHAT, json=BODIES[CHAT] | {"vllm_xargs": [extra]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "vllm_xargs")
    told = [asked.body["vllm_xargs"] for asked in double.asked]
    assert told == [{"ngram_size": 30, "whitelist": [1, 2]}, {}]


async def test_requests_that_call_themselves_alike_are_not_alike_to_their_engine() -> None:
    double = Vllm()
    async with running(double), gateway(behind(double)) as (_, client):
        for _ in range(2):
            answer = await client.post(CHAT, json=BODIES[CHAT], headers={"x-request-id": "mine"})
            assert answer.headers["x-request-id"] == "mine"
    ids = {asked.headers["x-request-id"] for asked in double.asked}
    assert len(ids) == 2
    assert "mine" not in ids


@pytest.mark.parametrize(
    ("sent", "passed"),
    [
        ({"traceparent": "x" * 60_000, "tracestate": "a=1"}, set()),
        (
            {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "a" * 9_000},
            {"traceparent"},
        ),
        ({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "tracestate": "é"}, {"traceparent"}),
        ({"tracestate": "a=1"}, set()),
    ],
)
async def test_no_client_makes_a_server_ill_with_headers(
    sent: dict[str, str], passed: set[str]
) -> None:
    double = Vllm()
    headers = {name.encode(): value.encode() for name, value in sent.items()}
    async with running(double), gateway(behind(double)) as (_, client):
        await client.post(CHAT, json=BODIES[CHAT], headers=headers)
    assert {"traceparent", "tracestate"} & double.asked[0].headers.keys() == passed


# --- hostile servers, and settings ---------------------------------------------------------------

HOSTILE = [
    b"",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nshort",
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 5_000,
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
    b'HTTP/1.1 200 OK\r\ncontent-length: 21\r\n\r\ndata: {"choices": 7}\n\n',
]


async def test_hostile_servers_cost_an_attempt_each_and_nothing_else() -> None:
    answers = deque(HOSTILE)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            well = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
            writer.write(well if head.startswith(b"GET") else answers.popleft())
            await writer.drain()
        writer.close()

    good = LlamaCpp()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    bad = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, running(good):
        while answers:
            left = len(answers)
            async with gateway(ReplicaConfig(url=bad, kind="vllm"), behind(good)) as (_, client):
                while len(answers) == left:  # until it is the bad one's turn
                    assert (await stream(client, CHAT)).text == WHOLE


@pytest.mark.parametrize(
    "settings",
    [
        {"headers": {"a b": "c"}},
        {"headers": {"a": "c\r\nx: y"}},
        {"headers": {"a": "\u20ac"}},
        {"api_key_env": "A_VARIABLE_THAT_IS_NOT_SET"},
    ],
)
def test_what_cannot_be_a_header_is_refused_at_the_start(settings: dict[str, Any]) -> None:
    model = ModelConfig(name="m", replicas=[ReplicaConfig(url="http://a:1", **settings)])
    with pytest.raises(ValueError, match=r"http://a:1: .*(plain ASCII|set the environment)"):
        GatewayServer(GatewayConfig(models=[model]), lambda _: None)


def test_the_settings_in_the_documentation_are_settings(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    path = tmp_path / "gateway.yaml"
    path.write_text(text.split("```yaml\n")[1].split("```")[0])
    config = load_config(path)
    assert [model.name for model in config.models] == ["qwen", "gpt"]
