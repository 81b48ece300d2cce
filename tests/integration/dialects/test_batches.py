"""Batches through the official SDKs: results in order at half the price, errors, cancellation, and other tenants."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tests.integration.dialects.conftest import MODEL, DialectFleet
from tests.support.javascript_sdk import run_javascript

from argosy.store import ItemOwner, Price

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT: Any = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
MISSING = "batch_00000000000000000000000000000000"
RATE = 3
"""Nano-dollars of each token."""


def line(custom_id: str, url: str = CHAT, **body: Any) -> str:  # noqa: ANN401 - fields of a request
    fields = {"model": MODEL, "messages": MESSAGES} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields})


async def create(
    fleet: DialectFleet,
    *lines: str,
    key: str = "",
    **options: Any,  # noqa: ANN401 - of the SDK
) -> openai.types.Batch:
    client = fleet.openai(key)
    content = "\n".join(lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        **({"endpoint": CHAT, "completion_window": "24h"} | options), input_file_id=file.id
    )


async def wait_ended(
    fleet: DialectFleet, batch: openai.types.Batch, key: str = ""
) -> openai.types.Batch:
    async with asyncio.timeout(60):
        while batch.status in {"validating", "in_progress", "finalizing", "cancelling"}:
            await asyncio.sleep(0.1)
            batch = await fleet.openai(key).batches.retrieve(batch.id)
    return batch


async def read_lines(
    fleet: DialectFleet, file_id: str | None, key: str = ""
) -> list[dict[str, Any]]:
    assert file_id is not None
    content = await fleet.openai(key).files.content(file_id)
    return [json.loads(text) for text in content.text.splitlines()]


async def test_openai_batch_is_answered_in_order_at_half_the_price(fleet: DialectFleet) -> None:
    price = Price(model=MODEL, input=RATE, cached_input=RATE, output=RATE)
    fleet.accounts.store.limits_and_prices.set_price(price, actor="test")
    await asyncio.sleep(1.5)  # until the gateway has read it
    client = fleet.openai()
    lines = [line(f"q{number}") for number in range(6)]
    lines.insert(3, line("bad", temperature="hot"))
    batch = await create(fleet, *lines, metadata={"job": "labels"})
    with pytest.raises(openai.ConflictError):
        await client.files.delete(batch.input_file_id)
    ended = await wait_ended(fleet, batch)
    assert (ended.status, ended.model, ended.metadata) == ("completed", MODEL, {"job": "labels"})
    counts = ended.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (7, 6, 1)
    answers = await read_lines(fleet, ended.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"q{number}" for number in range(6)]
    for each in answers:
        assert each["error"] is None
        assert each["response"]["body"]["choices"][0]["message"]["content"] == "Hello!"
    (failed,) = await read_lines(fleet, ended.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    rows = [row for row in fleet.accounts.rows() if row.service_tier == "batch"]
    assert {row.request for row in rows} >= {each["id"] for each in answers}
    assert len({row.request for row in rows}) == len(rows)
    for row in rows:
        assert row.nano_dollars == (row.input_tokens + row.output_tokens) * RATE // 2
    usage: Any = ended.usage
    assert usage.input_tokens == sum(row.input_tokens for row in rows)
    assert usage.output_tokens == sum(row.output_tokens for row in rows)
    assert any(each.id == batch.id for each in (await client.batches.list()).data)
    await client.files.delete(batch.input_file_id)
    with pytest.raises(openai.ConflictError) as late:
        await client.batches.cancel(batch.id)
    assert late.value.code == "batch_not_cancellable"
    text = (await fleet.client.get("/metrics", headers={"api-key": fleet.key})).text
    assert 'argosy_gateway_time_to_first_token_seconds_count{model="big"}' not in text


async def test_budget_ends_one_line_which_is_billed_and_others_wait(
    fleet: DialectFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("argosy.gateway.batches.dispatcher.BUDGET_BACKOFF_S", 0.1)
    accounts, budget = fleet.accounts, 8
    project = accounts.project("poor")
    accounts.price(per_output_token=2)  # one nano-dollar for a line
    accounts.limit(project, "nano_dollars", budget, "day")
    key = accounts.key(project)
    await fleet.wait_for_key(key)
    fleet.output = "word " * 40
    batch = await create(fleet, line("a"), line("b"), key=key)
    (row,) = await fleet.take_rows(1)
    assert (row.status, row.nano_dollars) == ("stopped", row.output_tokens)
    assert budget <= row.output_tokens < 40
    assert (await fleet.openai(key).batches.retrieve(batch.id)).status == "in_progress"
    accounts.limit(project, "nano_dollars", 1_000_000, "day")
    ended = await wait_ended(fleet, batch, key)
    choices = [
        each["response"]["body"]["choices"][0]
        for each in await read_lines(fleet, ended.output_file_id, key)
    ]
    assert sorted(each["stop_reason"] or "" for each in choices) == ["", "budget"]
    assert len(fleet.requests) == len(await fleet.take_rows(2)) == 2


async def test_invalid_file_fails_with_all_errors_and_runs_nothing(fleet: DialectFleet) -> None:
    batch = await create(
        fleet,
        line("a"),
        "no JSON",
        line("a"),
        line("b", url="/v1/completions"),
        line("c", stream=True),
        line("d", model="unknown"),
        json.dumps({"custom_id": "e", "method": "POST", "url": CHAT}),
        json.dumps({"custom_id": "f", "method": "GET", "url": CHAT, "body": {"model": MODEL}}),
    )
    ended = await wait_ended(fleet, batch)
    assert ended.status == "failed"
    assert ended.errors is not None
    found = {(error.line, error.code) for error in ended.errors.data or ()}
    assert found == {
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_url"),
        (5, "stream_unsupported"),
        (6, "model_not_found"),
        (7, "missing_required_parameter"),
        (8, "invalid_method"),
    }
    assert not fleet.requests
    empty = await wait_ended(fleet, await create(fleet, "", ""))
    assert [error.code for error in (empty.errors and empty.errors.data) or ()] == ["empty_batch"]


async def test_repeated_create_and_cancel_have_one_effect(fleet: DialectFleet) -> None:
    client = fleet.openai()
    fleet.hold(after=0)
    headers = {"Idempotency-Key": "once"}
    other_window: Any = "12h"
    first = await create(fleet, line("a"), line("b"), extra_headers=headers)
    again = await client.batches.create(
        input_file_id=first.input_file_id,
        endpoint=CHAT,
        completion_window="24h",
        extra_headers=headers,
    )
    assert again.id == first.id
    with pytest.raises(openai.UnprocessableEntityError):
        await client.batches.create(
            input_file_id=first.input_file_id,
            endpoint=CHAT,
            completion_window=other_window,
            extra_headers=headers,
        )
    await fleet.wait_held()
    cancelled = await client.batches.cancel(first.id)
    assert cancelled.status == "cancelling"
    assert (await client.batches.cancel(first.id)).id == first.id
    ended = await wait_ended(fleet, cancelled)
    fleet.release()
    assert ended.status == "cancelled"
    errors = await read_lines(fleet, ended.error_file_id)
    codes = [each["error"]["code"] for each in errors if each["error"]]
    assert codes
    assert set(codes) == {"batch_cancelled"}


@pytest.mark.parametrize("change", ["file", "endpoint", "window", "purpose"])
async def test_create_refuses_what_it_knows_to_be_wrong(fleet: DialectFleet, change: str) -> None:
    client = fleet.openai()
    purpose: Any = "user_data" if change == "purpose" else "batch"
    file = await client.files.create(file=("in.jsonl", line("a").encode()), purpose=purpose)
    options: dict[str, Any] = {
        "input_file_id": "file-0" if change == "file" else file.id,
        "endpoint": "/v1/audio" if change == "endpoint" else CHAT,
        "completion_window": "5m" if change == "window" else "24h",
    }
    with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
        await client.batches.create(**options)


async def test_batches_of_other_tenants_do_not_exist(fleet: DialectFleet) -> None:
    batch = await create(fleet, line("a"))
    other, messages = fleet.openai(fleet.other_key), fleet.anthropic(fleet.other_key)
    file: Any = batch.input_file_id
    for call in (
        other.batches.retrieve(batch.id),
        other.batches.cancel(batch.id),
        other.batches.retrieve(MISSING),
        other.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    for foreign in (
        messages.messages.batches.retrieve(batch.id),
        messages.messages.batches.cancel("msgbatch_0"),
        messages.messages.batches.delete("msgbatch_0"),
    ):
        with pytest.raises(anthropic.NotFoundError):
            await foreign
    assert (await other.batches.list()).data == []
    await wait_ended(fleet, batch)


async def test_anthropic_batch_has_its_results_in_order(fleet: DialectFleet) -> None:
    batches = fleet.anthropic().messages.batches
    params: Any = {"model": MODEL, "max_tokens": 20, "messages": MESSAGES}
    requests: list[Any] = [{"custom_id": f"q{number}", "params": params} for number in range(5)]
    requests.append({"custom_id": "bad", "params": params | {"max_tokens": 0}})
    batch = await batches.create(requests=requests)
    assert (batch.processing_status, batch.request_counts.processing) == ("in_progress", 6)
    async with asyncio.timeout(60):
        while batch.processing_status != "ended":
            await asyncio.sleep(0.1)
            batch = await batches.retrieve(batch.id)
    counts = batch.request_counts
    assert (counts.processing, counts.succeeded, counts.errored) == (0, 5, 1)
    results: list[Any] = [each async for each in await batches.results(batch.id)]
    assert [each.custom_id for each in results] == [each["custom_id"] for each in requests]
    assert {each.result.type for each in results[:5]} == {"succeeded"}
    assert results[0].result.message.content[0].text == "Hello!"
    assert results[0].result.message.usage.service_tier == "batch"
    assert results[5].result.error.error.type == "invalid_request_error"
    assert [each.id for each in (await batches.list(limit=1)).data] == [batch.id]
    await batches.delete(batch.id)
    with pytest.raises(anthropic.NotFoundError):
        await batches.retrieve(batch.id)
    with pytest.raises(anthropic.BadRequestError):
        await batches.create(requests=[*requests[:1], *requests[:1]])


async def test_javascript_sdks_use_batches(fleet: DialectFleet) -> None:
    found = await run_javascript("batches.mjs", fleet.url, fleet.key, MODEL)
    theirs = found["openai"]
    assert theirs["answered"]["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert [each["custom_id"] for each in theirs["output"]] == ["q0", "q1", "q2"]
    assert (theirs["cancelled"]["status"], theirs["ended"]["status"]) == ("cancelling", "cancelled")
    assert theirs["listed"][:2] == [theirs["ended"]["id"], theirs["answered"]["id"]]
    other = found["anthropic"]
    assert other["succeeded"]["request_counts"]["succeeded"] == 3
    assert [each["result"]["message"]["content"][0]["text"] for each in other["results"]] == [
        "Hello!"
    ] * 3
    counts = other["ended"]["request_counts"]
    assert (other["canceling"]["processing_status"], counts["processing"]) == ("canceling", 0)
    assert counts["canceled"] == sum(
        each["result"]["type"] == "canceled" for each in other["endedResults"]
    )
    assert 0 < counts["canceled"] <= len(other["endedResults"]) == 300
    assert other["deleted"]["type"] == "message_batch_deleted"


async def test_command_creates_awaits_and_lists_batches(
    fleet: DialectFleet, tmp_path: Path
) -> None:
    async def run(*arguments: str) -> tuple[int, str]:
        server = ("--url", fleet.url, "--api-key", fleet.key)
        command = (sys.executable, "-m", "argosy.cli", "batch", *arguments, *server)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(f"{line('a')}\n{line('b')}\n")
    batch_id = json.loads((await run("create", str(file), "--json"))[1])["id"]
    assert await run("wait", batch_id, "-o", str(output)) == (
        0,
        f"{batch_id} completed: 2 of 2 lines answered, 0 failed\n",
    )
    answers = [json.loads(text) for text in output.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == ["a", "b"]
    status, text = await run("list", "--limit", "1", "--json")
    assert (status, [each["id"] for each in json.loads(text)]) == (0, [batch_id])
    invalid = await create(fleet, "no JSON")
    status, text = await run("wait", invalid.id)
    assert status == 1
    assert "line 1: The line is no JSON object" in text


async def test_stopped_gateway_loses_its_claims_and_no_line(fleet: DialectFleet) -> None:
    fleet.hold(after=0)
    batch = await create(fleet, line("a"), line("b"))
    await fleet.wait_held()
    store = fleet.accounts.store.batches
    holders = store.list_holders()
    for holder in holders:  # as another gateway does once the heartbeats have stopped
        store.release_holder(holder)
    fleet.release()
    ended = await wait_ended(fleet, batch)
    answers = await read_lines(fleet, ended.output_file_id)
    assert [each["custom_id"] for each in answers] == ["a", "b"]
    rows = [row.request for row in fleet.accounts.rows()]
    assert all(rows.count(each["id"]) == 1 for each in answers)
    (project,) = (
        each for each in fleet.accounts.store.accounts.list_projects() if each.name == "shop"
    )
    owner = ItemOwner(project.organisation, project.id)
    assert store.get(owner, batch.id).bytes == 0
