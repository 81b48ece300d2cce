"""Tool calls and reasoning of native replicas: aggregated, resumed, billed and explained."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from rich.console import Console
from tests.support.fake_upstream import listening
from tests.support.gateway_client import parse_stream
from tests.support.metered_gateway import CHATS, MeteredGateway, run_gateway_before
from tests.support.native_upstream import (
    PROMPT_TOKENS,
    NativeScript,
    NativeUpstream,
    continue_call,
    start_call,
    think,
)

from argosy.cli.explain import print_explanation
from argosy.deployment import ReplicaConfig, Timeouts
from argosy.gateway.request_trace import ContentStore
from argosy.protocol import RequestReport

ARGUMENTS = ['{"ci', 'ty": "', "Par", 'is"}']
CALL = [start_call(0, "get_weather"), *(continue_call(0, text) for text in ARGUMENTS)]
WARNING = {"code": "schema_relaxed", "message": "Not enforced: not.", "param": "tools[0]"}
REPORT = {
    "steps": 4,
    "accepted_drafts": 6,
    "draft_saved_s": 0.25,
    "no_drafts_reason": "the model has recurrent states",
    "grammar_compile_ms": 1.5,
    "masked_steps": 5,
    "reasoning_tokens": 2,
    "prediction": (3, 1),
    "tool_calls": 1,
    "parser_events": {"call_start": 1},
    "a later field": 1,
}
FUNCTION_CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}
REASONING = {"reasoning_content": "Let me see.", "reasoning": "Let me see."}
SCRIPTS: dict[str, tuple[NativeScript, dict[str, Any]]] = {
    "text": (NativeScript(deltas=[{"content": "Hi"}, {"content": "."}]), {"content": "Hi."}),
    "nothing": (NativeScript(deltas=[]), {"content": ""}),
    "call": (
        NativeScript(deltas=[{}, *CALL, {}], finish_reason="tool_calls"),
        {"content": None, "tool_calls": [FUNCTION_CALL]},
    ),
    "text and two calls": (
        NativeScript(
            deltas=[
                {"content": "Both."},
                {},
                *CALL,
                {},
                start_call(1, "shell", "custom"),
                continue_call(1, "ls ", "custom"),
                continue_call(1, "-l", "custom"),
            ],
            finish_reason="tool_calls",
            warnings=[WARNING],
        ),
        {
            "content": "Both.",
            "tool_calls": [
                FUNCTION_CALL,
                {"id": "call_1", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}},
            ],
        },
    ),
    "reasoning": (
        NativeScript(deltas=[{}, think("Let me"), think(" see.")], finish_reason="length"),
        {"content": None, **REASONING},
    ),
    "reasoning, text and call": (
        NativeScript(
            deltas=[think("Let me"), think(" see."), {}, {"content": "So:"}, *CALL],
            finish_reason="tool_calls",
            report=REPORT,
        ),
        {"content": "So:", **REASONING, "tool_calls": [FUNCTION_CALL]},
    ),
}


@contextlib.asynccontextmanager
async def run_native(
    folder: Path, script: NativeScript, *, log_content: bool = False
) -> AsyncIterator[tuple[MeteredGateway, NativeUpstream, NativeUpstream]]:
    """Run a gateway in front of two native replicas with the same script."""
    first, second = NativeUpstream(native_script=script), NativeUpstream(native_script=script)
    async with listening(first, second):
        replicas = [ReplicaConfig(url=one.url, kind="argosy") for one in (first, second)]
        settings = {"log_content": log_content, "timeouts": Timeouts()}  # on a busy machine too
        async with run_gateway_before(folder, *replicas, **settings) as gateway:
            for replica in gateway.running.replicas:
                # the fake replicas do not report readiness
                replica.health.on_reported_state("ready", 0.0)
            yield gateway, first, second


def without_identity(response: str) -> str:
    """Remove ids and times, which differ between requests."""
    assert len(set(re.findall(r'"id":"(chatcmpl-[^"]*)"', response))) == 1
    return re.sub(r'"id":"chatcmpl-[^"]*"|"created":\d+', "", response)


@pytest.mark.parametrize("kind", SCRIPTS)
async def test_whole_response_has_calls_and_reasoning(kind: str, tmp_path: Path) -> None:
    script, expected = SCRIPTS[kind]
    async with run_native(tmp_path, script) as (gateway, _, _):
        response = json.loads(await gateway.post(CHATS))
        record = await gateway.assert_consistent()
        trace = gateway.trace_dict(record)
    ChatCompletion.model_validate(response)
    (choice,) = response["choices"]
    assert choice["message"] == {"role": "assistant", "refusal": None, **expected}
    assert choice["finish_reason"] == script.finish_reason
    assert response.get("warnings", []) == script.warnings
    usage = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": script.num_tokens,
        "total_tokens": PROMPT_TOKENS + script.num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    if script.report is not None:
        usage["completion_tokens_details"] = {
            "reasoning_tokens": 2,
            "accepted_prediction_tokens": 3,
            "rejected_prediction_tokens": 1,
        }
    assert response["usage"] == usage
    assert (record.status, record.output_tokens) == ("completed", script.num_tokens)
    assert trace["tokens"].get("reasoning") == (2 if script.report else None)


@pytest.mark.parametrize(
    ("kind", "stream"),
    [
        pytest.param(kind, stream, marks=[] if is_default else [pytest.mark.exhaustive])
        for kind in SCRIPTS
        for stream, is_default in (
            (True, kind in {"nothing", "text and two calls"}),
            (False, kind == "reasoning, text and call"),
        )
    ],
)
async def test_replica_lost_at_any_token_changes_nothing(
    kind: str, tmp_path: Path, *, stream: bool
) -> None:
    script, _ = SCRIPTS[kind]
    async with run_native(tmp_path, script) as (gateway, first, second):
        fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        undisturbed = await gateway.post(CHATS, **fields)
        for cut_after in range(script.num_tokens + 1):
            first.cut_after = second.cut_after = cut_after
            response = await gateway.post(CHATS, **fields)
            assert (first.cut_after, second.cut_after) != (cut_after, cut_after)
            assert without_identity(response) == without_identity(undisturbed)
            first.cut_after = second.cut_after = None
        records = gateway.usage_records()
    assert {record.output_tokens for record in records} == {script.num_tokens}


async def test_explanation_shows_report_of_replica(tmp_path: Path) -> None:
    script, _ = SCRIPTS["reasoning, text and call"]
    async with run_native(tmp_path, script) as (gateway, _, _):
        body = await gateway.post(CHATS, stream=True)
        explanation = gateway.trace_dict(gateway.usage_record())
    assert "report" not in body
    assert parse_stream(body).finish_reasons == ["tool_calls"]
    assert explanation["replica_report"] == {
        name: value for name, value in REPORT.items() if name != "a later field"
    }
    text = io.StringIO()
    print_explanation(Console(file=text, width=100), explanation)
    assert "(2 reasoning, 2.50 a step, drafts saved 0.25 s)" in text.getvalue()
    assert "the model has recurrent states" in text.getvalue()


CONTENT = {"prompts": ["<|user|>Hi\n"], "outputs": ["<think>\x1b[31mred"]}


@pytest.mark.parametrize("log_content", [False, True])
async def test_explanation_has_content_only_if_it_is_logged(
    tmp_path: Path, *, log_content: bool
) -> None:
    script = NativeScript(deltas=[{"content": "x"}], report={"masked_steps": 1}, content=CONTENT)
    async with run_native(tmp_path, script, log_content=log_content) as (gateway, _, _):
        await gateway.post(CHATS, stream=True)
        explanation = gateway.trace_dict(gateway.usage_record())
    expected = {"masked_steps": 1} | (CONTENT if log_content else {})
    assert explanation["replica_report"] == expected
    text = io.StringIO()
    print_explanation(Console(file=text, width=100), explanation)
    assert "masked_steps" in text.getvalue()
    assert ("<|user|>Hi" in text.getvalue()) is log_content
    assert "\x1b" not in text.getvalue()


def test_content_of_the_largest_tenants_oldest_requests_is_dropped_first() -> None:
    store = ContentStore(max_bytes=4_000)

    def add(name: str, tenant: str = "large", size: int = 1_000) -> None:
        store.add(name, RequestReport(prompts=["x" * size]), tenant)

    add("small", "small", 500)
    for number in range(4):
        add(f"r{number}")
    add("r3")
    kept = [store.find(f"r{number}") is not None for number in range(4)]
    assert kept == [False, True, True, True]
    store.discard("r3")
    store.discard("r3")
    add("r4")
    assert store.find("r1") is not None
    add("too large", "small", 5_000)
    assert store.find("too large") is None
    add("other", "small", 1_000)
    assert store.find("r1") is None
    assert store.find("r2") is not None
    assert store.find("small") is not None
